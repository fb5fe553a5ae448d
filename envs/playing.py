"""Playing scripted episodes and writing them down, so that two plays can be compared.

Here of one agent; of several in `envs.multi_playing`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from envs.draws import stable_hash
from envs.protocol import (
    Action,
    Call,
    Demonstrates,
    DemonstratesTools,
    Environment,
    Message,
    Observation,
    StepResult,
)

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
MAX_CALLS = 32
"""Of tools in a turn; a demonstration that needs more counts as one that does not end."""
Tools = Mapping[str, Callable[[Mapping[str, Any]], str]]
"""What demonstrations may call, by name: from arguments to the text of the result."""


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
    """Instances that play at the same time, turn by turn, do not disturb each other."""
    THREADS = "threads"
    """... nor when each plays in a thread of its own, and a thread may take over from another."""
    SPLITS = "splits"
    """No problem is in both splits."""
    DEMONSTRATION = "demonstration"
    """Demonstrations are right (nothing scores higher), and asking for one changes nothing."""
    GLOBAL_RANDOM = "global_random"
    """The process's global random generators are left alone."""
    TEARDOWN = "teardown"
    """`close` may come at any time and twice, disturbs no other instance, and nothing stays open after it."""
    ACTION_ORDER = "action_order"
    """Several agents: the order in which the actions of a step are given does not matter."""
    REFUSAL = "refusal"
    """Several agents: actions that are not asked for raise ValueError and change nothing."""
    LEAVING = "leaving"
    """Several agents: any agent may leave at any time, and is asked no more; without agents it is over."""
    RECOMPUTE = "recompute"
    """Several agents: `recompute` gives the rewards that were given, and disturbs nothing."""


class BrokenError(Exception):
    """An environment broke a rule."""

    def __init__(self, check: Check, detail: str) -> None:
        super().__init__(f"{check}: {detail}")
        self.check = check
        self.detail = detail


class MissingToolError(Exception):
    """A demonstration calls a tool that was not given: it cannot be played here."""


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

    @property
    def shown(self) -> str:
        """All that was shown."""
        return self.observation.text

    @property
    def rewards(self) -> tuple[float, ...]:
        """The reward, if there is one."""
        return () if self.result is None else (self.result.reward,)

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.result is not None and self.result.done

    @property
    def info(self) -> dict[str, Any]:
        """For the record."""
        return {} if self.result is None else self.result.info

    def written(self) -> str:
        """One line of JSON; values that JSON cannot hold are written as their type."""
        value: dict[str, Any] = {"observation": [asdict(one) for one in self.observation.messages]}
        if self.result is not None:
            result = self.result
            value |= {"reward": result.reward, "done": result.done, "info": result.info}
        return json.dumps(value, sort_keys=True, default=lambda odd: type(odd).__name__)


def scripts(environment: Environment, tools: Tools | None = None) -> tuple[str, ...]:
    """The ways of playing: two kinds of talk, and demonstrations where they can be played."""
    with_tools = isinstance(environment, DemonstratesTools) and tools is not None
    shows = with_tools or isinstance(environment, Demonstrates)
    return ("talk", "more talk", *(("demonstrate",) if shows else ()))


def turns(
    environment: Environment, seed: int, script: str, max_turns: int, tools: Tools | None = None
) -> Iterator[Event]:
    """Play one episode, an event at a time.

    Raises:
        BrokenError: a method raised, or returned something of the wrong type.
    """
    observation = call(f"reset({seed})", environment.reset, seed)
    require_observation(observation)
    if not observation.text:
        raise BrokenError(Check.TYPES, f"reset({seed}) gave an observation without text")
    yield Event(observation, None)
    for turn in range(max_turns):
        text = _text(environment, seed, script, turn, tools or {})
        result = call(f"step({text!r:.60}) with seed {seed}", environment.step, Action(text))
        require_result(result)
        yield Event(result.observation, result, text)
        if result.done:
            return


def play(environment: Environment, plan: Plan, tools: Tools | None = None) -> dict[str, list[Event]]:
    """Play all episodes of a plan on one instance; the keys are `seed script`."""
    return {
        f"{seed} {script}": list(turns(environment, seed, script, plan.max_turns, tools))
        for seed in plan.seeds
        for script in scripts(environment, tools)
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
    command = [sys.executable, "-P", "-m", "envs.playing_elsewhere"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the process that plays again failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def call(what: str, function: Callable[..., Any], *args: Any, check: Check = Check.PLAYS) -> Any:
    """Call the environment's code; what it raises is a violation of `check`."""
    try:
        return function(*args)
    except Exception as error:
        raise BrokenError(check, f"{what} raised {type(error).__name__}: {error}") from error


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
    require_number(value.reward)
    if not isinstance(value.done, bool):
        raise BrokenError(Check.TYPES, f"done is {value.done!r:.40}, not a bool")
    if not isinstance(value.info, dict):
        raise BrokenError(Check.TYPES, f"info is {type(value.info).__name__}, not a dict")


def require_number(value: object) -> None:
    """Raise `BrokenError` unless `value` is a number, as a reward must be."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BrokenError(Check.TYPES, f"a reward is {value!r:.40}, not a number")


def require_action(value: object) -> Action:
    """Raise `BrokenError` unless `value` is an action of text, as a demonstration must be."""
    if not isinstance(value, Action) or not isinstance(value.text, str):
        raise BrokenError(Check.TYPES, f"a demonstration is {value!r:.60}, not an Action of text")
    return value


def demonstrated(environment: Environment, tools: Tools) -> Action:
    """The demonstration for the current state, with the calls it makes.

    Raises:
        BrokenError: it raises, is of the wrong type, or never answers.
        MissingToolError: it calls what there is not.
    """
    if not isinstance(environment, DemonstratesTools):
        assert isinstance(environment, Demonstrates)
        return require_action(call("demonstration()", environment.demonstration))
    results: tuple[str, ...] = ()
    while len(results) <= MAX_CALLS:
        shown = calls_or_action(environment, results)
        if isinstance(shown, Action):
            return shown
        for one in shown:
            if one.name not in tools:
                raise MissingToolError(f"it calls {one.name!r:.60}, which was not given")
            results += (tools[one.name](one.arguments),)
    raise BrokenError(Check.DEMONSTRATION, f"it answers not even after {len(results)} calls")


def calls_or_action(environment: DemonstratesTools, results: tuple[str, ...]) -> Action | tuple[Call, ...]:
    """What is demonstrated after some results; raises `BrokenError` unless it is calls or an action."""
    shown = call(f"demonstration_after({results!r:.60})", environment.demonstration_after, results)
    if not isinstance(shown, tuple):
        return require_action(shown)
    if not shown or not all(isinstance(one, Call) for one in shown):
        raise BrokenError(Check.TYPES, f"a demonstration is {shown!r:.80}, not one or more calls")
    for one in shown:
        try:
            json.dumps(dict(one.arguments), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise BrokenError(Check.TYPES, f"the arguments of {one!r:.80}: {error}") from error
    return shown


def talk(*place: int | str) -> str:
    """What is said at a place by who does not know what to say."""
    return TEXTS[stable_hash("text", *place) % len(TEXTS)]


def _text(environment: Environment, seed: int, script: str, turn: int, tools: Tools) -> str:
    return demonstrated(environment, tools).text if script == "demonstrate" else talk(seed, script, turn)
