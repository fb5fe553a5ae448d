"""The helper process in which reasoning-gym runs: `python -m envs.reasoning_gym_worker`.

It reads one JSON request a line and answers each with one line. Why another process: six tasks
draw from Python sets, so that their problems depend on PYTHONHASHSEED, which only the start of a
process can fix; others seed or use the global generators, print, or take for ever over a hostile
answer, which only a kill ends. Requests are self-contained, so a new process goes on where a
killed one stopped.
"""

import dataclasses
import enum
import importlib
import json
import os
import random
import sys
import types
import typing
import warnings
from collections import OrderedDict
from collections.abc import Callable
from datetime import date, time
from typing import Any

import numpy as np
import reasoning_gym
import sympy  # type: ignore[import-untyped]
from reasoning_gym.factory import DATASETS

from envs.draws import draws_needed, split_of, stable_hash
from envs.guards import guarded, literal

Request = dict[str, Any]

UPSTREAM_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RecursionError,
    SyntaxError, TypeError, ValueError,
)  # fmt: skip
"""What tasks raise over bad arguments, and scorers over answers that they cannot read."""

_EVALUATES = {
    "algorithmic": ("string_insertion", "spiral_matrix", "binary_matrix"),
    "games": ("n_queens",),
}
_PARSES = {
    "algebra": ("simple_integration", "intermediate_integration", "polynomial_multiplication"),
    "games": ("puzzle24", "countdown"),
}
_ANSWER_IN_METADATA: dict[str, Callable[[dict[str, Any]], str]] = {
    "graph_color": lambda metadata: json.dumps(metadata["possible_answer"]),
    "rubiks_cube": lambda metadata: str(metadata["example_correct_answer"]),
}
_COSTLY = frozenset(
    {"arc_agi", "codeio", "figlet_font", "group_anagrams", "rush_hour", "spell_backward", "word_ladder"}
)
"""Tasks that read files of data when made, which do not depend on the seed: made once."""


class _GuardedSympy:
    """sympy, but for `parse_expr`."""

    parse_expr = staticmethod(guarded(sympy.parse_expr))

    def __getattr__(self, name: str) -> Any:
        return getattr(sympy, name)


def disarm() -> None:
    """Put guarded readers where scorers would evaluate the model's answer."""
    for package, names in _EVALUATES.items():
        for name in names:
            vars(importlib.import_module(f"reasoning_gym.{package}.{name}"))["eval"] = literal
    for package, names in _PARSES.items():
        for name in names:
            module = vars(importlib.import_module(f"reasoning_gym.{package}.{name}"))
            for alias in ("sympy", "sp"):
                if alias in module:
                    module[alias] = _GuardedSympy()
            if "parse_expr" in module:
                module["parse_expr"] = _GuardedSympy.parse_expr


class Tasks:
    """Makes problems and scores answers; remembers the latest entries."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._datasets: OrderedDict[str, Any] = OrderedDict()

    def handle(self, request: Request) -> dict[str, Any]:
        """Answer one request; its `do` is `check`, `draw` or `score`."""
        match request["do"]:
            case "check":
                return self._check(request)
            case "draw":
                return self._draw(request)
            case "score":
                return self._score(request)
        raise KeyError(request["do"])

    def _check(self, request: Request) -> dict[str, Any]:
        try:
            make_dataset(request["task"], request["args"], 0)
        except UPSTREAM_ERRORS as error:
            return {"refused": str(error) or type(error).__name__}
        return {}

    def _draw(self, request: Request) -> dict[str, Any]:
        """Draw problems until one of the split comes; a problem is its question's text."""
        refused = ""
        for draw in range(draws_needed(request["split"], request["held_out"])):
            item_seed = stable_hash("reasoning_gym", request["seed"], draw) % 2**31
            try:
                entry = self._entry(request, item_seed)
            except UPSTREAM_ERRORS as error:
                refused = f"; the last one failed: {error}"
                continue
            if split_of(entry["question"], request["held_out"]) == request["split"]:
                return {"item": item_seed, "question": entry["question"], "answer": answer_of(entry)}
        return {"refused": f"no problem of the split {request['split']!r} came{refused}"}

    def _score(self, request: Request) -> dict[str, Any]:
        entry = self._entry(request, request["item"])
        if entry["metadata"]["source_dataset"] == "game_of_life_halting":
            # its own scorer compares bool("True") with bool("False"), so that any text is right
            return {"score": float(request["answer"].strip().lower() == entry["answer"].lower())}
        dataset = self._dataset(request, request["item"], any_seed=True)
        try:
            return {"score": float(dataset.score_answer(request["answer"], entry))}
        except UPSTREAM_ERRORS as error:
            return {"score": 0.0, "raised": type(error).__name__}

    def _entry(self, request: Request, item_seed: int) -> dict[str, Any]:
        key = json.dumps([request["task"], request["args"], item_seed], sort_keys=True)
        if key not in self._entries:
            random.seed(item_seed)
            np.random.seed(item_seed)
            entry = self._dataset(request, item_seed)[0]
            entry["metadata"].setdefault("source_dataset", request["task"])
            _remember(self._entries, key, entry, 1024)
        return self._entries[key]

    def _dataset(self, request: Request, item_seed: int, any_seed: bool = False) -> Any:
        """The dataset whose item 0 belongs to `item_seed`; any of the task's can score."""
        key = json.dumps([request["task"], request["args"]], sort_keys=True)
        if key in self._datasets and any_seed:
            return self._datasets[key]
        if key in self._datasets and request["task"] in _COSTLY:
            dataset = self._datasets[key]
            dataset.seed = item_seed
            if request["task"] == "codeio":
                type(dataset)._jsonl_data = dataset._jsonl_data
            return dataset
        dataset = make_dataset(request["task"], request["args"], item_seed)
        if request["task"] == "codeio":
            # it keeps what its arguments leave of the data at the class, where the next one puts its own
            dataset._jsonl_data = type(dataset)._jsonl_data
        _remember(self._datasets, key, dataset, 8)
        return dataset


def _remember(memory: OrderedDict[str, Any], key: str, value: Any, most: int) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > most:
        memory.popitem(last=False)


def make_dataset(task: str, args: dict[str, Any], item_seed: int) -> Any:
    """A dataset of the one problem that belongs to `item_seed`."""
    dataset_class, config_class = DATASETS[task]
    hints = typing.get_type_hints(config_class)
    values = {name: convert(value, hints[name]) for name, value in args.items()}
    config = config_class(seed=item_seed, size=1, **values)
    return dataset_class(config)


def convert(value: Any, hint: Any) -> Any:
    """Turn a JSON value into what a config field holds: enums, dates, tuples, nested configs."""
    inner = [item for item in typing.get_args(hint) if item is not Ellipsis]
    origin = typing.get_origin(hint) or hint
    if origin in (typing.Union, types.UnionType):
        return value if value is None else convert(value, inner[0])
    if isinstance(origin, type):
        if issubclass(origin, enum.Enum):
            return origin(value)
        if dataclasses.is_dataclass(origin):
            return origin(**value)
        if origin in (date, time):
            return origin.fromisoformat(value)
        if issubclass(origin, list | tuple):
            return origin(convert(item, inner[0]) if len(inner) == 1 else item for item in value)
    return value


def answer_of(entry: dict[str, Any]) -> str | None:
    """A right answer of an entry, where the task knows one."""
    if entry["answer"] is not None:
        return str(entry["answer"])
    find = _ANSWER_IN_METADATA.get(entry["metadata"]["source_dataset"])
    return find(entry["metadata"]) if find else None


def main() -> None:
    """Serve requests until the other side closes the pipe."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # tasks print
    warnings.simplefilter("ignore")
    _limit_memory()
    disarm()
    tasks = Tasks()
    for line in sys.stdin:
        replies.write(json.dumps(tasks.handle(json.loads(line))) + "\n")
        replies.flush()


def _limit_memory() -> None:
    """A scorer that builds a number of gigabytes shall fail itself, not the machine."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    assert reasoning_gym  # importing it is what registers the tasks
    main()
