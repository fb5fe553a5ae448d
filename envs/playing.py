"""Playing scripted episodes and writing them down, so that two plays can be compared.

`python -m envs.playing` does the same in a process of its own, for what it reads from stdin.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from envs.draws import stable_hash
from envs.protocol import Action, Demonstrates, Environment, Message, Observation, StepResult

TEXTS = (
    "7",
    "",
    "hello world",
    "<answer>1</answer>",
    "[[1, 2], [3, 4]]",
    "-0.5\nyes",
    "é 日本 🙂",
    '{"a": 1}',
)
"""What the scripted agent says: right once in a while, and everything else that models say."""
ROLES = ("system", "user", "assistant", "tool")


class Check(StrEnum):
    """What an environment is checked for."""

    PLAYS = "plays"
    """`reset` and `step` do not raise, whatever the agent says."""
    TYPES = "types"
    """Observations, results and demonstrations are the protocol's types, all the way down."""
    REWARDS = "rewards"
    """Rewards are finite."""
    INFO = "info"
    """`info` is JSON: text keys, no NaN."""
    ENDS = "ends"
    """Episodes end, or the class declares `unlimited = True`."""
    ORDER = "order"
    """`step` before `reset` and after the end raises RuntimeError."""
    SAME_INSTANCE = "same_instance"
    """The same seed gives the same episode on the same instance, whatever was played between."""
    FRESH_INSTANCE = "fresh_instance"
    """... on another instance."""
    NEW_PROCESS = "new_process"
    """... in another process with another PYTHONHASHSEED."""
    ISOLATION = "isolation"
    """Two instances that play at the same time do not disturb each other."""
    SPLITS = "splits"
    """No problem is in both splits."""
    DEMONSTRATION = "demonstration"
    """Demonstrations are right (nothing scores higher), and asking for one changes nothing."""
    GLOBAL_RANDOM = "global_random"
    """The process's global random generators are left alone."""


class BrokenError(Exception):
    """An environment broke a rule."""

    def __init__(self, check: Check, detail: str) -> None:
        super().__init__(f"{check}: {detail}")
        self.check = check
        self.detail = detail


@dataclass(frozen=True)
class Plan:
    """Which episodes are played: every seed with every script, for at most `max_turns`."""

    seeds: tuple[int, ...]
    max_turns: int


@dataclass(frozen=True)
class Event:
    """What the environment showed: after `reset` (no result), or after a step."""

    observation: Observation
    result: StepResult | None
    action: str = ""

    def written(self) -> str:
        """One line of JSON; values that JSON cannot hold are written as their type."""
        value: dict[str, Any] = {"observation": [asdict(one) for one in self.observation.messages]}
        if self.result is not None:
            result = self.result
            value |= {"reward": result.reward, "done": result.done, "info": result.info}
        return json.dumps(value, sort_keys=True, default=lambda odd: type(odd).__name__)


def scripts(environment: Environment) -> tuple[str, ...]:
    """The ways of playing: two kinds of talk, and demonstrations where there are any."""
    return ("talk", "more talk", *(("demonstrate",) if isinstance(environment, Demonstrates) else ()))


def turns(environment: Environment, seed: int, script: str, max_turns: int) -> Iterator[Event]:
    """Play one episode, an event at a time.

    Raises:
        BrokenError: a method raised, or returned something of the wrong type.
    """
    observation = call(f"reset({seed})", environment.reset, seed)
    require_observation(observation)
    yield Event(observation, None)
    for turn in range(max_turns):
        text = _text(environment, seed, script, turn)
        result = call(f"step({text!r:.60}) with seed {seed}", environment.step, Action(text))
        require_result(result)
        yield Event(result.observation, result, text)
        if result.done:
            return


def play(environment: Environment, plan: Plan) -> dict[str, list[Event]]:
    """Play all episodes of a plan on one instance; the keys are `seed script`."""
    return {
        f"{seed} {script}": list(turns(environment, seed, script, plan.max_turns))
        for seed in plan.seeds
        for script in scripts(environment)
    }


def written(episodes: dict[str, list[Event]]) -> dict[str, list[str]]:
    """Episodes as lines that can be compared."""
    return {name: [event.written() for event in events] for name, events in episodes.items()}


def play_elsewhere(requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Play in one new process with another PYTHONHASHSEED; a request has `id`, `args` and `plan`.

    Each answer is `{"episodes": ...}` or `{"violated": message}`.

    Raises:
        RuntimeError: the process failed.
    """
    environment = os.environ | {
        "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2",
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),  # noqa: PTH100
    }
    asked = json.dumps(
        [request | {"plan": [request["plan"].seeds, request["plan"].max_turns]} for request in requests]
    )
    command = [sys.executable, "-P", "-m", "envs.playing"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the process that plays again failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def call(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call the environment's code; what it raises is a violation."""
    try:
        return function(*args)
    except Exception as error:
        raise BrokenError(Check.PLAYS, f"{what} raised {type(error).__name__}: {error}") from error


def require_observation(value: object) -> None:
    """Raise `BrokenError` unless `value` is an observation of messages of texts."""
    if not isinstance(value, Observation):
        raise BrokenError(Check.TYPES, f"an observation is {type(value).__name__}, not Observation")
    for message in value.messages:
        if not isinstance(message, Message) or not isinstance(message.content, str):
            raise BrokenError(Check.TYPES, f"a message is {message!r:.80}, not a Message of text")
        if message.role not in ROLES:
            raise BrokenError(Check.TYPES, f"a role is {message.role!r:.40}; accepted: {', '.join(ROLES)}")


def require_result(value: object) -> None:
    """Raise `BrokenError` unless `value` is a step result with a number, a bool and a dict."""
    if not isinstance(value, StepResult):
        raise BrokenError(Check.TYPES, f"step returned {type(value).__name__}, not StepResult")
    require_observation(value.observation)
    if isinstance(value.reward, bool) or not isinstance(value.reward, int | float):
        raise BrokenError(Check.TYPES, f"a reward is {value.reward!r:.40}, not a number")
    if not isinstance(value.done, bool):
        raise BrokenError(Check.TYPES, f"done is {value.done!r:.40}, not a bool")
    if not isinstance(value.info, dict):
        raise BrokenError(Check.TYPES, f"info is {type(value.info).__name__}, not a dict")


def _text(environment: Environment, seed: int, script: str, turn: int) -> str:
    if script != "demonstrate":
        return TEXTS[stable_hash("text", seed, script, turn) % len(TEXTS)]
    assert isinstance(environment, Demonstrates)
    action = call("demonstration()", environment.demonstration)
    if not isinstance(action, Action) or not isinstance(action.text, str):
        raise BrokenError(Check.TYPES, f"a demonstration is {action!r:.60}, not an Action of text")
    return action.text


def _main() -> None:
    from envs.registry import make

    answers: list[dict[str, Any]] = []
    for request in json.load(sys.stdin):
        seeds, max_turns = request["plan"]
        try:
            played = play(make(request["id"], **request["args"]), Plan(tuple(seeds), max_turns))
            answers.append({"episodes": written(played)})
        except BrokenError as violated:
            answers.append({"violated": str(violated)})
    # environments may print: the answer must be alone on stdout
    json.dump(answers, _answers_to)


if __name__ == "__main__":
    _answers_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with _answers_to:
        _main()
