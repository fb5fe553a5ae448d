from typing import Any

import pytest

from envs.adapters import libraries
from envs.conformance import assert_conforms
from envs.protocol import Action, Environment
from envs.registry import available, make, make_multi

LAKE: dict[str, Any] = {"is_slippery": False}


@pytest.mark.parametrize(
    ("id", "args"),
    [
        ("gymnasium/FrozenLake-v1", {"illegal": "first"}),
        ("gymnasium/Blackjack-v1", {"illegal": "first", "held_out": 0.4}),
        ("gymnasium/Taxi-v4", {"illegal": "first", "max_episode_steps": 20}),
        ("gymnasium/CliffWalking-v1", {}),
    ],
)
def test_games_conform(id: str, args: dict[str, Any]) -> None:
    assert_conforms(id, args, seeds=3)


def played(environment: Environment, actions: str) -> list[str]:
    return [environment.step(Action(action)).observation.text for action in actions.split()]


def test_frozen_lake_is_told_as_a_map_and_walked_by_names() -> None:
    lake = make("gymnasium/FrozenLake-v1", **LAKE)
    assert lake.reset(0).text == (
        "Walk from S to G over the frozen points F; H is a hole; @ is you. Ice may be slippery.\n"
        "actions: left down right up\n@FFF\nFHFH\nFFFH\nHFFG\n"
    )
    assert played(lake, "down 1 right down")[-1] == "\nSFFF\nFHFH\nFFFH\nH@FG\n"
    played(lake, "right right")
    with pytest.raises(RuntimeError, match="no episode is running"):
        lake.step(Action("right"))


def test_rewards_and_ends_are_gymnasiums() -> None:
    lake = make("gymnasium/FrozenLake-v1", **LAKE)
    lake.reset(0)
    played(lake, "down down right down right")
    result = lake.step(Action("right"))
    assert (result.reward, result.done) == (1.0, True)
    assert result.info == {"illegal": 0, "terminated": True, "truncated": False}
    lake = make("gymnasium/FrozenLake-v1", max_episode_steps=2, **LAKE)
    lake.reset(0)
    played(lake, "left")
    result = lake.step(Action("left"))
    assert result.done
    assert result.info == {"illegal": 0, "terminated": False, "truncated": True}


def test_actions_that_cannot_be_read_lose_or_stand_for_the_first() -> None:
    lake = make("gymnasium/FrozenLake-v1", penalty=-0.5, **LAKE)
    lake.reset(0)
    result = lake.step(Action("north"))
    assert (result.reward, result.done, result.info["illegal"]) == (-0.5, True, 1)
    taxi = make("gymnasium/Taxi-v4", illegal="first")
    shown = taxi.reset(3).text
    assert "\nlegal: " in shown
    legal = shown.splitlines()[-1].removeprefix("legal: ").split()
    illegal = next(name for name in ("south", "north", "east", "west", "pickup") if name not in legal)
    other = make("gymnasium/Taxi-v4")
    other.reset(3)
    result, expected = taxi.step(Action(illegal)), other.step(Action(legal[0]))
    assert result.observation == expected.observation
    assert result.info["illegal"] == 1


def test_own_names_and_instructions_take_the_place_of_the_known_ones() -> None:
    cards = make("gymnasium/Blackjack-v1", actions=["stay", "draw"], instruction="Cards!\n")
    assert cards.reset(1).text.startswith("Cards!\nactions: stay draw\nyou ")
    assert cards.step(Action("stay")).done


@pytest.mark.parametrize(
    ("id", "args", "message"),
    [
        ("gymnasium/Pong-v9", {}, "'gymnasium/Pong-v9' is not accepted: NameNotFound"),
        ("gymnasium/Pendulum-v1", {}, r"its actions are Box\(.*; accepted: Discrete"),
        ("gymnasium/FrozenLake-v1", {"slippery": True}, "unexpected keyword argument 'slippery'"),
        ("gymnasium/FrozenLake-v1", {"illegal": "skip"}, "illegal: 'skip' is not accepted"),
        ("gymnasium/FrozenLake-v1", {"held_out": 1.0}, "held_out: 1.0 is not accepted"),
        ("gymnasium/FrozenLake-v1", {"map_name": {1}}, "map_name: .* is not accepted; accepted: plain data"),
        ("gymnasium/Blackjack-v1", {"actions": ["a"]}, "1 names are not accepted; accepted: 2"),
    ],
)
def test_wrong_requests_name_what_is_wrong(id: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(id, **args)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package 'gymnasium': pip install 'opentinker\[envs\]'"):
        make("gymnasium/FrozenLake-v1")


def test_it_is_listed_and_has_one_agent() -> None:
    (info,) = [info for info in available() if info.id.startswith("gymnasium/")]
    assert info.kind == "single"
    assert {"actions", "illegal", "split_by"} <= {argument.name for argument in info.arguments}
    with pytest.raises(ValueError, match="has a single agent"):
        make_multi("gymnasium/FrozenLake-v1")


def test_the_environments_own_arguments_reach_it() -> None:
    assert make("gymnasium/FrozenLake-v1", map_name="8x8").reset(0).text.count("\n") == 10
