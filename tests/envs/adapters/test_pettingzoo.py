from collections.abc import Mapping
from typing import Any

import pytest

from envs.conformance import assert_conforms
from envs.multi import MultiEnvironment, Situation
from envs.protocol import Action
from envs.registry import available, make, make_multi

TIC_TAC_TOE = "pettingzoo/classic/tictactoe_v3"
RPS = "pettingzoo/classic/rps_v2"
ZOO = "pettingzoo/tests.envs.adapters.zoo"


@pytest.mark.parametrize(
    ("id", "args"),
    [
        (TIC_TAC_TOE, {}),
        (RPS, {"illegal": "first", "max_cycles": 3}),
        ("pettingzoo/classic/chess_v6", {}),
        (ZOO, {"api": "aec", "illegal": "first"}),
        (ZOO, {"illegal": "first"}),
    ],
)
def test_games_conform(id: str, args: dict[str, Any]) -> None:
    assert_conforms(id, args, seeds=2)


def say(game: MultiEnvironment, **texts: str | None) -> Situation:
    return game.step({name: None if text is None else Action(text) for name, text in texts.items()})


def texts(situation: Situation) -> Mapping[str, str]:
    return {name: observation.text for name, observation in situation.observations.items()}


def test_tic_tac_toe_is_played_in_turn_to_its_end() -> None:
    game = make_multi(TIC_TAC_TOE)
    assert game.agents == ("player_1", "player_2")
    situation = game.reset(0)
    assert (situation.to_act, situation.rewards) == (("player_1",), {})
    assert texts(situation)["player_1"] == (
        "Three in a row win. x is you, o the other. Points are numbered 0 to 8, row by row.\n"
        "you are player_1\nactions: 0 to 8\n...\n...\n...\nlegal: 0 1 2 3 4 5 6 7 8\n"
    )
    say(game, player_1="4")
    assert texts(say(game, player_2="the corner: 0")) == {
        "player_1": "\no..\n.x.\n...\nlegal: 1 2 3 5 6 7 8\n"
    }
    say(game, player_1="1")
    say(game, player_2="2")
    ended = say(game, player_1="7")
    assert ended.done
    assert ended.rewards == {"player_1": 1.0, "player_2": -1.0}


def test_what_is_not_legal_loses_and_the_others_get_nothing() -> None:
    for text in ("4", "nine", "9"):
        game = make_multi(TIC_TAC_TOE, penalty=-2.0)
        game.reset(0)
        say(game, player_1="4")
        ended = say(game, player_2=text)
        assert ended.done
        assert ended.rewards == {"player_1": 0.0, "player_2": -2.0}
        assert ended.info == {"illegal": {"player_2": 1}, "gone": [], "lost": ["player_2"]}


def test_or_the_first_legal_action_is_played() -> None:
    game = make_multi(TIC_TAC_TOE, illegal="first")
    game.reset(0)
    situation = say(game, player_1="anything")
    assert "\no..\n...\n...\nlegal: 1 " in texts(situation)["player_2"]
    assert situation.info["illegal"] == {"player_1": 1}


def test_all_choose_at_once_by_names_in_a_parallel_game() -> None:
    game = make_multi(RPS, max_cycles=2)
    situation = game.reset(0)
    assert situation.together
    assert "actions: rock paper scissors\n" in texts(situation)["player_0"]
    situation = say(game, player_1="Scissors!", player_0="rock")
    assert situation.rewards == {"player_0": 1.0, "player_1": -1.0}
    assert texts(situation)["player_1"] == "\nthe other chose rock\n"
    assert say(game, player_0="paper", player_1="paper").done


def test_the_same_game_by_the_other_interface_gives_the_same_rewards() -> None:
    game = make_multi(RPS, max_cycles=2, api="aec")
    assert not game.reset(0).together
    assert not any(say(game, player_0="rock").rewards.values())
    assert say(game, player_1="scissors").rewards == {"player_0": 1.0, "player_1": -1.0}


def test_chess_is_played_by_moves() -> None:
    game = make_multi("pettingzoo/classic/chess_v6")
    game.reset(0)
    for number, move in enumerate(["e2e4", "e7e5", "d1h5", "b8c6", "f1c4", "g8f6"]):
        situation = say(game, **{f"player_{number % 2}": move})
    shown = texts(situation)["player_0"]
    assert "\nr . b q k b . r\np p p p . p p p\n" in shown
    assert "white to move; r1bqkb1r/pppp1ppp/2n2n2/4p2Q/2B1P3/8/PPPP1PPP/RNB1K1NR w KQkq - 4 4\n" in shown
    assert " h5f7 " in shown
    assert say(game, player_0="Qxf7# is h5f7").rewards == {"player_0": 1.0, "player_1": -1.0}


def test_agents_that_are_out_are_passed_over_and_all_rewards_are_given() -> None:
    game = make_multi(ZOO, api="aec")
    assert game.agents == ("0", "1", "2")
    pot = int(texts(game.reset(5))["0"].splitlines()[2].split()[0])
    say(game, **{"0": "0"})
    situation = say(game, **{"1": "1"})
    assert situation.rewards == {"0": -1.0, "1": float(pot), "2": -1.0}
    assert situation.to_act == ("2",)
    assert say(game, **{"2": "0"}).to_act == ("0",)
    say(game, **{"0": "1"})
    ended = say(game, **{"2": "1"})
    assert (ended.done, ended.rewards) == (True, {"2": float(pot)})


def test_parallel_agents_that_are_out_are_asked_no_more() -> None:
    game = make_multi(ZOO)
    assert game.reset(1).to_act == ("ann", "bob", "cy")
    situation = say(game, ann="3", bob="0", cy="1")
    assert situation.to_act == ("bob", "cy")
    assert situation.rewards == {"ann": 1.0, "bob": 0.0, "cy": 0.0}
    assert "legal: 0 1 3\n" in texts(situation)["bob"]
    ended = say(game, bob="2", cy="1")
    assert (ended.done, ended.rewards, ended.info["lost"]) == (
        True,
        {"ann": 0.0, "bob": -1.0, "cy": 0.0},
        ["bob"],
    )


def test_who_leaves_loses() -> None:
    game = make_multi(ZOO)
    game.reset(1)
    ended = say(game, ann=None, bob="1", cy="1")
    assert (ended.done, ended.rewards) == (True, {"ann": -1.0, "bob": 0.0, "cy": 0.0})
    assert ended.info["gone"] == ["ann"]


def test_or_first_legal_actions_are_played_for_who_left() -> None:
    game = make_multi(ZOO, illegal="first")
    game.reset(1)
    situation = say(game, ann=None, bob="1", cy="0")
    assert situation.to_act == ("bob", "cy")
    assert situation.rewards == {"ann": 0.0, "bob": 1.0, "cy": 0.0}
    turns = make_multi(TIC_TAC_TOE, illegal="first")
    turns.reset(0)
    situation = say(turns, player_2=None)
    assert situation.to_act == ("player_1",)
    assert not situation.observations
    situation = say(turns, player_1="4")
    assert texts(situation) == {"player_1": "\no..\n.x.\n...\nlegal: 1 2 3 5 6 7 8\n"}
    assert say(turns, player_1=None).done


@pytest.mark.parametrize(
    ("id", "args", "message"),
    [
        ("pettingzoo/classic/tictactoe_v9", {}, "No module named 'pettingzoo.classic.tictactoe_v9'"),
        ("pettingzoo/utils/env", {}, "pettingzoo.utils.env has no env"),
        (TIC_TAC_TOE, {"api": "parallel"}, "pettingzoo.classic.tictactoe_v3 has no parallel_env"),
        (TIC_TAC_TOE, {"size": 4}, "unexpected keyword argument 'size'"),
        (TIC_TAC_TOE, {"api": "both"}, "api: 'both' is not accepted"),
        (TIC_TAC_TOE, {"actions": ["a"]}, "1 names are not accepted; accepted: 9"),
        ("pettingzoo/classic/chess_v6", {"actions": ["a"]}, "its actions cannot be named"),
        (ZOO, {"kind": "pictures"}, "ann has observations of 12288 numbers"),
        (ZOO, {"kind": "steering"}, r"the actions of ann are Box.*; accepted: Discrete"),
    ],
)
def test_wrong_requests_name_what_is_wrong(id: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_multi(id, **args)


def test_it_is_listed_and_has_several_agents() -> None:
    (info,) = [info for info in available() if info.id.startswith("pettingzoo/")]
    assert info.kind == "multi"
    with pytest.raises(ValueError, match="has the agents player_1, player_2"):
        make(TIC_TAC_TOE)
