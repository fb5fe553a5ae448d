"""64 episodes at once, each with secrets of its own: none ever shows up in another, wherever one looks."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable

import pytest

from envs.multi import Actions, Situation, check_actions
from envs.protocol import Action, Observation, StepResult
from opentinker_core.agents.alone import AGENT, Alone
from opentinker_core.agents.coordination.checker import check
from opentinker_core.agents.coordination.log import EventLog
from opentinker_core.agents.coordination.protocol import CoordinationProtocol, TurnOrder
from opentinker_core.agents.playing import Played, play_all
from opentinker_core.config.tools import SandboxSettings, ToolsConfig
from tests.agents import speaking
from tests.agents.sandboxes import needs_sandbox
from tests.agents.speaking import Speaker
from tests.waiting import PATIENCE_S

EPISODES = 64
TURNS = 3
PROGRAMS = 4
"""One episode in so many runs programs: they are what costs time."""
AGENTS = ("ann", "bob")
VERSIONS = {"policy": "policy@1"}
TOOLS = ToolsConfig(
    names=("calculator", "python"),
    declare=False,
    call_s=PATIENCE_S,
    python=SandboxSettings(seconds=PATIENCE_S),
)
_CANARY = re.compile(r"(?:canary|told|state)-\d{4}-[a-z]+-[0-9a-f]{8}")
_PRODUCT = re.compile(r"\b9\d{4}00\d\b")


def secret(kind: str, seed: int, agent: str) -> str:
    """`canary` stands in the first prompt, `state` in the environment, `told` in what it answers."""
    return f"{kind}-{seed:04d}-{agent}-{hashlib.sha256(f'{kind} {seed} {agent}'.encode()).hexdigest()[:8]}"


def product(seed: int, agent: str) -> str:
    """What the calculator gives one agent of one episode, and no other."""
    return f"9{seed:04d}00{(AGENT, *AGENTS).index(agent)}"


def secrets(seed: int, agent: str) -> set[str]:
    return {*(secret(kind, seed, agent) for kind in ("canary", "told", "state")), product(seed, agent)}


def found_in(text: str) -> set[str]:
    return {*_CANARY.findall(text), *_PRODUCT.findall(text)}


def say(prompt: str) -> str:
    """Goes by what it was shown: first calls tools with its canary, then, with their results, answers."""
    own = next(one for one in _CANARY.findall(prompt) if one.startswith("canary"))
    _, seed, agent, _ = own.split("-")
    before, _, results = prompt.rpartition("turn>")
    if results:
        return f"I have {own}."
    expression = f"{int(product(int(seed), agent)) - 12345} + 12345"
    calls = [{"name": "calculator", "arguments": {"expression": expression}}]
    programs = {
        1: f"import os\nprint('results', os.listdir('.'))\nopen('{own}', 'w').write('{own}')",
        2: "import os\nprint('results', [(name, open(name).read()) for name in os.listdir('.')])",
    }
    turn = int(re.findall(r"turn (\d) of", before)[-1])
    if int(seed) % PROGRAMS == 0 and turn in programs:
        calls.append({"name": "python", "arguments": {"code": programs[turn]}})
    return json.dumps(calls)


class Keeping:
    """Keeps a secret between its steps, tells it, and notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def reset(self, seed: int) -> Observation:
        self.seed, self.turn, self.kept = seed, 1, secret("state", seed, AGENT)
        return Observation.user(f"{secret('canary', seed, AGENT)} turn 1 of {TURNS}, turn>")

    def step(self, action: Action) -> StepResult:
        self.heard.append(action.text)
        self.turn += 1
        shown = f"\n{self.kept} {secret('told', self.seed, AGENT)} turn {self.turn} of {TURNS}, turn>"
        return StepResult(Observation.user(shown), 1.0, self.turn > TURNS, {"kept": self.kept})


class Whispering:
    """Tells each agent its own secrets, and no other agent's."""

    agents = AGENTS

    def __init__(self) -> None:
        self.heard: dict[str, list[str]] = {agent: [] for agent in AGENTS}
        self._situation = Situation(())

    def reset(self, seed: int) -> Situation:
        self.seed, self.turn = seed, 1
        self.kept = {agent: secret("state", seed, agent) for agent in AGENTS}
        told = {
            agent: Observation.user(f"{secret('canary', seed, agent)} turn 1 of {TURNS}, turn>")
            for agent in AGENTS
        }
        self._situation = Situation(AGENTS, True, told)
        return self._situation

    def step(self, actions: Actions) -> Situation:
        check_actions(self._situation, actions)
        for agent, action in actions.items():
            assert action is not None
            self.heard[agent].append(action.text)
        self.turn += 1
        told = {
            agent: Observation.user(
                f"\n{self.kept[agent]} {secret('told', self.seed, agent)} turn {self.turn} of {TURNS}, turn>"
            )
            for agent in AGENTS
        }
        to_act = AGENTS if self.turn <= TURNS else ()
        self._situation = Situation(to_act, True, told, dict.fromkeys(AGENTS, 1.0))
        return self._situation


def check_all(played: list[Played], log: EventLog, speaker: Speaker, agents: Iterable[str]) -> None:
    """Every text that there is names the secrets of one agent of one episode, or of none."""
    owners = {
        one: (seed, agent) for seed in range(EPISODES) for agent in agents for one in secrets(seed, agent)
    }
    everywhere = Counter[str]()
    for one in played:
        seed = one.spec.environment_seed
        assert one.result.end.counts
        for agent in agents:
            (trajectory,) = one.trajectories[agent]
            text = speaking.text_of(trajectory)
            assert found_in(text) == secrets(seed, agent)
            assert found_in(json.dumps(trajectory.info)) <= secrets(seed, agent)
            if seed % PROGRAMS == 0:  # its files: none at first, then its own and no other
                own = secret("canary", seed, agent)
                assert "results []" in text
                assert f"results [('{own}', '{own}')]" in text
            everywhere.update(found_in(text))
            told = "".join(
                turn.observation.text + turn.action.text for turn in one.result.agents[agent].turns
            )
            assert found_in(told) <= secrets(seed, agent)
    assert set(everywhere.values()) == {1}
    for event in log:
        seen = {owners[one] for one in found_in(json.dumps(event.detail))}
        assert {seed for seed, _ in seen} <= {int(event.episode.split("-")[1][1:])}
        assert not event.agent or {agent for _, agent in seen} <= {event.agent}
    for prompt, said in speaker.spoken:
        assert len({owners[one] for one in found_in(prompt + said)}) == 1
    assert max(speaker.calls) > 1  # they were not played one after the other


@needs_sandbox
@pytest.mark.parametrize("concurrent", [False, True], ids=["one by one", "concurrent"])
def test_of_one_agent(concurrent: bool) -> None:
    made: list[Keeping] = []

    def make() -> Alone:
        made.append(Keeping())
        made[-1].concurrent = concurrent  # type: ignore[attr-defined]
        return Alone(made[-1], "keeping")

    protocol = CoordinationProtocol(
        policies={AGENT: "policy"}, order=TurnOrder.SEQUENTIAL, turn_s=PATIENCE_S, episode_s=PATIENCE_S
    )
    log, speaker = EventLog(), Speaker(say)
    table = speaking.table(make, protocol, PATIENCE_S, TOOLS)
    played = play_all(speaking.plays(EPISODES, VERSIONS), table, speaker, log)
    check_all(played, log, speaker, (AGENT,))
    assert check(log, protocol) == []
    for one in played:
        assert one.result.info == {"kept": secret("state", one.spec.environment_seed, AGENT)}
    for environment in made:
        assert found_in("".join(environment.heard)) == {secret("canary", environment.seed, AGENT)}


@needs_sandbox
def test_of_several_agents() -> None:
    made: list[Whispering] = []

    def make() -> Whispering:
        made.append(Whispering())
        return made[-1]

    protocol = CoordinationProtocol(
        policies=dict.fromkeys(AGENTS, "policy"),
        order=TurnOrder.SIMULTANEOUS,
        turn_s=PATIENCE_S,
        episode_s=PATIENCE_S,
    )
    log, speaker = EventLog(), Speaker(say)
    table = speaking.table(make, protocol, PATIENCE_S, TOOLS)
    played = play_all(speaking.plays(EPISODES, VERSIONS), table, speaker, log)
    check_all(played, log, speaker, AGENTS)
    assert check(log, protocol) == []
    for environment in made:
        for agent in AGENTS:
            heard = found_in("".join(environment.heard[agent]))
            assert heard == {secret("canary", environment.seed, agent)}
