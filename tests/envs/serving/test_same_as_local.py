"""A served environment is the local one, figure for figure."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from envs.conformance import assert_conforms
from envs.draws import stable_hash
from envs.multi import MultiDemonstrates, MultiEnvironment, Recomputes, Situation
from envs.playing import TEXTS
from envs.protocol import Action, Call, Closes, Demonstrates, DemonstratesTools, Environment
from envs.registry import make, make_any, make_multi
from envs.serving.errors import EnvironmentRaisedError
from opentinker_core.commands.environments import app
from tests.envs.serving.environments import CANARY
from tests.envs.serving.served import Served, serving

pytestmark = pytest.mark.processes

SINGLE = ("arithmetic", "guess_number", "tool_math", "reasoning_gym/leg_counting", CANARY)
SEVERAL = ("collect", "gomoku_match", "negotiate")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served") / "log", *SINGLE, *SEVERAL) as served:
        yield served


@pytest.mark.parametrize(
    ("id", "args"),
    [
        ("arithmetic", {"digits": 2, "attempts": 3, "operations": "+-"}),
        ("guess_number", {"low": 0, "high": 9, "least": 3}),
        ("reasoning_gym/leg_counting", {}),
    ],
)
def test_served_environments_conform(server: Served, id: str, args: dict[str, Any]) -> None:
    assert_conforms("remote", {"url": server.url, "id": id, "args": args}, seeds=4)


def test_the_command_checks_it_as_well(server: Served) -> None:
    arguments = ["--arg", f"url={server.url}", "--arg", "id=arithmetic", "--arg", 'args={"digits": 2}']
    checked = CliRunner().invoke(app, ["check", "remote", *arguments, "--json"])
    assert json.loads(checked.stdout)["ok"] is True


@pytest.mark.parametrize("id", [*SINGLE, *SEVERAL])
def test_it_offers_what_the_local_one_offers(server: Served, id: str) -> None:
    local, remote = make_any(id), make_any("remote", url=server.url, id=id)
    for offer in (
        Environment,
        MultiEnvironment,
        Demonstrates,
        MultiDemonstrates,
        DemonstratesTools,
        Recomputes,
    ):
        assert isinstance(remote, offer) == isinstance(local, offer), offer
    assert getattr(remote, "unlimited", False) == getattr(local, "unlimited", False)
    assert isinstance(remote, Closes)


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("id", SEVERAL)
def test_several_agents_see_and_earn_the_same(server: Served, id: str, split: Any) -> None:
    local, remote = make_multi(id, split), make_multi("remote", split, url=server.url, id=id)
    assert remote.agents == local.agents
    for seed in range(4):
        situation = local.reset(seed)
        assert remote.reset(seed) == situation
        steps: list[dict[str, str | None]] = []
        earned: list[dict[str, float]] = []
        while not situation.done and len(steps) < 40:
            actions = _actions(local, situation, seed, len(steps))
            for agent in situation.to_act:
                assert isinstance(remote, MultiDemonstrates)
                assert isinstance(local, MultiDemonstrates)
                assert remote.demonstration(agent) == local.demonstration(agent)
            situation = local.step(actions)
            assert remote.step(actions) == situation
            steps.append({agent: None if one is None else one.text for agent, one in actions.items()})
            earned.append({agent: reward for agent, reward in situation.rewards.items() if reward})
        assert isinstance(remote, Recomputes)
        assert remote.recompute(seed, steps) == earned
    remote.close()  # type: ignore[attr-defined]


def _actions(local: MultiEnvironment, situation: Situation, seed: int, turn: int) -> dict[str, Action | None]:
    """What is shown, talk, and once in a while somebody who leaves."""
    assert isinstance(local, MultiDemonstrates)
    acting = situation.to_act if situation.together else situation.to_act[:1]
    actions: dict[str, Action | None] = {}
    for agent in acting:
        draw = stable_hash("action", seed, turn, agent) % 20
        actions[agent] = Action(TEXTS[draw]) if draw < 5 else local.demonstration(agent)
        if draw == 19 and turn > 2:
            actions[agent] = None
    return actions


def test_wrong_actions_of_several_agents_are_the_same_errors(server: Served) -> None:
    local, remote = make_multi("collect"), make_multi("remote", url=server.url, id="collect")
    for environment in (local, remote):
        with pytest.raises(RuntimeError, match="no episode is running"):
            environment.step({"a1": Action("u")})
        environment.reset(1)
        with pytest.raises(ValueError, match="actions: those of a1; accepted: all of a1, a2, a3"):
            environment.step({"a1": Action("u")})
        with pytest.raises(ValueError, match="actions: those of nobody"):
            environment.step({})
        with pytest.raises(ValueError, match="agent: 'a9' may not act now"):
            environment.demonstration("a9")  # type: ignore[attr-defined]
    every = {agent: Action("u") for agent in local.agents}
    assert remote.step(every) == local.step(every)


def test_demonstrations_with_tools_are_the_same(server: Served) -> None:
    local, remote = make("tool_math"), make("remote", url=server.url, id="tool_math")
    assert isinstance(local, DemonstratesTools)
    assert isinstance(remote, DemonstratesTools)
    for seed in range(5):
        assert remote.reset(seed) == local.reset(seed)
        calls = local.demonstration_after(())
        assert remote.demonstration_after(()) == calls
        assert isinstance(calls, tuple)
        assert isinstance(calls[0], Call)


def test_an_ended_episode_takes_no_step(server: Served) -> None:
    remote = make("remote", url=server.url, id="arithmetic")
    with pytest.raises(RuntimeError, match="no episode is running"):
        remote.step(Action("7"))
    remote.reset(1)
    remote.step(Action("x"))
    with pytest.raises(EnvironmentRaisedError, match="RuntimeError: no episode is running"):
        remote.step(Action("x"))
    remote.reset(1)


def test_servers_share_the_seeds_and_it_makes_no_difference(server: Served, tmp_path: Path) -> None:
    with serving(tmp_path / "log", CANARY, "--shards", "1") as other:
        local = make(CANARY, turns=2)
        remote = make("remote", url=[server.url, other.url], id=CANARY, args={"turns": 2})
        pids = set[int]()
        for seed in range(24):
            assert remote.reset(seed) == local.reset(seed)
            result = remote.step(Action("x"))
            pids.add(result.info["pid"])
            assert result.observation == local.step(Action("x")).observation
        assert pids & set(server.shards)
        assert pids & set(other.shards)
        assert server.metric("sessions") + other.metric("sessions") >= 1
        before = other.metric("sessions_opened_total")
        remote.close()  # type: ignore[attr-defined]
    # one of the two is gone: the other takes its share
    again = make("remote", url=[server.url, other.url], id=CANARY, args={"turns": 2}, retries=0)
    for seed in range(24):
        assert again.reset(seed) == local.reset(seed)
    assert before > 0
