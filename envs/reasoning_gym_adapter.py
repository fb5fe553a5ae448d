"""`reasoning_gym/<task>`: every task of reasoning-gym as an environment of one question and one answer."""

import json
import re
from datetime import date, time
from functools import lru_cache
from typing import Any, Literal

from envs.arguments import fits, unknown
from envs.protocol import Action, Environment, Observation, Split, StepResult
from envs.reasoning_gym_catalog import Task, tasks
from envs.reasoning_gym_process import ask

PREFIX = "reasoning_gym/"
Extract = Literal["auto", "tag", "last_line", "whole"]

WITHOUT_ANSWER = frozenset({"boxnet", "propositional_logic", "rush_hour"})
"""Tasks that can score answers but know no right one: they have no demonstrations."""

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ASK_FOR_TAG = "Give the final answer between <answer> and </answer>.\n"
_MAX_ANSWER = 20_000
_DRAW_SECONDS = 300.0
_SCORE_SECONDS = 20.0
_KINDS: dict[str, Any] = {
    "int": int, "float": float, "bool": bool, "str": str,
    "tuple": tuple, "list[str]": list[str], "tuple[str]": list[str], "tuple[str, ...]": list[str],
    "Sequence[str]": list[str], "list[float]": list[float], "Optional[list[str]]": list[str] | None,
    "Optional[int]": int | None, "Optional[str]": str | None,
}  # fmt: skip
"""Kinds of arguments that are checked at once; the others by the task itself."""


class ReasoningGym:
    """One question; the reward is the task's own score of the answer, clipped to [0, 1].

    Args:
        task: name of the reasoning-gym dataset.
        split: a problem is its question's text; which split it is in is decided by its hash.
        args: arguments of the dataset.
        extract: which part of the action is the answer. `auto`: what stands in the last
            `<answer>...</answer>`, else the whole text; `tag`: only what stands there, and the
            question asks for it; `last_line`: the last line that is not empty; `whole`.
        partial: keep scores between 0 and 1 (many tasks give some for a wrong answer); without
            it they are 0.
        held_out: share of the problems that is held out.
    """

    def __init__(
        self,
        task: str,
        split: Split = "train",
        args: dict[str, Any] | None = None,
        *,
        extract: Extract = "auto",
        partial: bool = True,
        held_out: float = 0.5,
    ) -> None:
        if not 0 <= held_out < 1:
            raise ValueError(f"held_out: {held_out!r} is not accepted; accepted: at least 0, less than 1")
        self._source = {"task": task, "args": args or {}}
        self._split = {"split": split, "held_out": held_out}
        self._extract = extract
        self._partial = partial
        self._item: dict[str, Any] | None = None

    def reset(self, seed: int) -> Observation:
        """Start the episode of `seed`.

        Raises:
            ValueError: the task, with these arguments, has no problem in this split.
        """
        item = ask({"do": "draw", "seed": seed} | self._split | self._source, _DRAW_SECONDS)
        if "refused" in item:
            raise ValueError(f"{PREFIX}{self._source['task']}: {item['refused']}")
        self._item = item
        question = item["question"].rstrip("\n") + "\n"
        return Observation.user(question + _ASK_FOR_TAG if self._extract == "tag" else question)

    def step(self, action: Action) -> StepResult:
        """Score the answer. One that the task's scorer cannot read, or not in time, is worth 0.

        Raises:
            RuntimeError: no episode is running.
        """
        item, self._item = self._running(), None
        given = extract_answer(action.text, self._extract)
        score, trouble = self._score(item["item"], given)
        if not self._partial and score < 1:
            score = 0.0
        info = {"problem": item["item"], "answer": item["answer"], "given": given, "correct": score == 1}
        return StepResult(Observation(()), score, True, info | trouble)

    def _score(self, item: int, given: str | None) -> tuple[float, dict[str, str]]:
        if not given or len(given) > _MAX_ANSWER:
            return 0.0, {}
        try:
            reply = ask({"do": "score", "item": item, "answer": given} | self._source, _SCORE_SECONDS)
        except TimeoutError:
            return 0.0, {"scorer": "timeout"}
        trouble = {"scorer": reply["raised"]} if "raised" in reply else {}
        # the comparisons send NaN to 0
        return (min(1.0, reply["score"]) if reply["score"] > 0 else 0.0), trouble

    def _running(self) -> dict[str, Any]:
        if self._item is None:
            raise RuntimeError("no episode is running: call reset first")
        return self._item


class DemonstratingReasoningGym(ReasoningGym):
    """A task that knows a right answer to each of its questions."""

    def demonstration(self) -> Action:
        """The answer, in the form that `extract` looks for."""
        answer = self._running()["answer"]
        return Action(f"<answer>{answer}</answer>" if self._extract == "tag" else answer)


def extract_answer(text: str, extract: Extract) -> str | None:
    """The part of an action that is its answer, without white space around it; None: there is none."""
    if extract == "last_line":
        return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)
    tagged = _TAG.findall(text) if extract in ("auto", "tag") else []
    if tagged:
        return str(tagged[-1]).strip()
    return None if extract == "tag" else text.strip()


def make_task(name: str, split: Split, args: dict[str, Any], options: dict[str, Any]) -> Environment:
    """Make the environment of a task from arguments of the dataset and options of the adapter.

    Raises:
        ValueError: there is no such task, or it refuses an argument.
    """
    if name not in tasks():
        raise unknown("environment", PREFIX + name, [PREFIX + task for task in tasks()])
    _check(tasks()[name], args)
    plain = {key: _plain(value) for key, value in args.items()}
    if args or name == "composite":
        _check_by_task(name, json.dumps(plain, sort_keys=True))
    names = {part["name"] for part in args["datasets"]} if name == "composite" else {name}
    silent = names & WITHOUT_ANSWER
    return (ReasoningGym if silent else DemonstratingReasoningGym)(name, split, plain, **options)


def _check(task: Task, args: dict[str, Any]) -> None:
    accepted = {argument.name: argument for argument in task.arguments}
    for name, value in args.items():
        if name not in accepted:
            raise unknown(f"{PREFIX}{task.name}: argument", name, accepted)
        kind = accepted[name].kind
        if not fits(value, _KINDS.get(kind, Any)):
            raise ValueError(f"{PREFIX}{task.name}: {name}: {value!r:.80} is not accepted; accepted: {kind}")


@lru_cache(maxsize=256)
def _check_by_task(name: str, args: str) -> None:
    """Let the task's own config say what it thinks of its arguments; once, as episodes are many."""
    reply = ask({"do": "check", "task": name, "args": json.loads(args)}, _DRAW_SECONDS)
    if "refused" in reply:
        raise ValueError(f"{PREFIX}{name}: {args:.200} is not accepted: {reply['refused']}")


def _plain(value: Any) -> Any:
    """YAML reads dates; JSON has none."""
    return value.isoformat() if isinstance(value, date | time) else value
