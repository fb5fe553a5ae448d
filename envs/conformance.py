"""A check of environments, yours included: does it keep the promises of `envs.protocol`?

from envs.conformance import assert_conforms
assert_conforms("my_package.my_module:MyEnvironment")
"""

import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

from envs.draws import stable_hash
from envs.playing import (
    BrokenError,
    Check,
    Event,
    Plan,
    call,
    play,
    play_elsewhere,
    scripts,
    turns,
    written,
)
from envs.protocol import Action, Demonstrates, Environment
from envs.registry import make

Factory = Callable[..., Environment]


@dataclass(frozen=True)
class Violation:
    """One broken promise."""

    check: Check
    detail: str


@dataclass(frozen=True)
class Report:
    """What was checked, and what was found."""

    environment: str
    passed: tuple[Check, ...]
    violations: tuple[Violation, ...]
    skipped: dict[Check, str] = field(default_factory=dict)
    """Checks that could not be made, and why."""

    @property
    def ok(self) -> bool:
        """No promise was seen broken."""
        return not self.violations

    def __str__(self) -> str:
        lines = [f"{self.environment}: {'conforms' if self.ok else 'does not conform'}"]
        lines += [f"  {one.check}: {one.detail}" for one in self.violations]
        return "\n".join(lines + [f"  {check}: not checked: {why}" for check, why in self.skipped.items()])

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "environment": self.environment,
            "ok": self.ok,
            "passed": [str(check) for check in self.passed],
            "violations": [{"check": str(one.check), "detail": one.detail} for one in self.violations],
            "skipped": {str(check): why for check, why in self.skipped.items()},
        }


class NotCheckableError(Exception):
    """A check cannot be made here."""


def check_environment(
    environment: str | Factory,
    args: Mapping[str, Any] | None = None,
    *,
    seeds: int = 8,
    max_turns: int = 100,
    new_process: bool = True,
) -> Report:
    """Play scripted episodes and report every promise that is broken.

    Args:
        environment: an id that `envs.registry.make` knows, `module:ClassName` among them, or a
            class or function that takes `split` and `args` as keywords.
        args: its arguments.
        seeds: number of episodes a script; splits are compared on four times as many.
        max_turns: turns after which an episode counts as one that does not end.
        new_process: also play in a new process; needs an environment that can be imported.

    Raises:
        ValueError: the environment cannot be made at all.
    """
    subject = _Subject(environment, dict(args or {}), seeds, max_turns)
    with _global_random_kept():
        try:
            subject.episodes = play(subject.instance, subject.plan)
        except BrokenError as broken:
            return Report(subject.name, (), (Violation(broken.check, broken.detail),))
        return _run_checks(subject, new_process)


def _run_checks(subject: "_Subject", new_process: bool) -> Report:
    passed = [Check.PLAYS, Check.TYPES]
    violations: list[Violation] = []
    skipped: dict[Check, str] = {}
    for check, run in _CHECKS.items():
        if check is Check.NEW_PROCESS and not new_process:
            skipped[check] = "not asked for"
            continue
        try:
            run(subject)
            passed.append(check)
        except BrokenError as broken:
            # what a method raised or returned is named after the rule that was being checked
            violations.append(Violation(check, broken.detail))
        except NotCheckableError as reason:
            skipped[check] = str(reason)
    return Report(subject.name, tuple(passed), tuple(violations), skipped)


def assert_conforms(
    environment: str | Factory, args: Mapping[str, Any] | None = None, **options: Any
) -> None:
    """As `check_environment`, for tests.

    Raises:
        AssertionError: names every broken promise.
    """
    report = check_environment(environment, args, **options)
    if not report.ok:
        raise AssertionError(str(report))


class _Subject:
    """The environment under test, and the episodes that all other plays must repeat."""

    def __init__(self, environment: str | Factory, args: dict[str, Any], seeds: int, max_turns: int) -> None:
        self.args = args
        self.factory: Factory = partial(make, environment) if isinstance(environment, str) else environment
        self.id = environment if isinstance(environment, str) else _importable(environment)
        self.name = self.id or str(getattr(environment, "__qualname__", environment))
        chosen = (0, *(stable_hash("seed", index) >> 1 for index in range(1, max(2, seeds))))
        self.plan = Plan(chosen, max_turns)
        self.episodes: dict[str, list[Event]] = {}
        """The reference: the plan played on the first instance."""
        self.instance = self.new()

    def new(self, split: str = "train") -> Environment:
        """A fresh instance."""
        return self.factory(split=split, **self.args)

    def compare(self, name: str, lines: list[str]) -> None:
        """Raise `BrokenError` where `lines` differ from the reference episode of that name.

        The error is reported under the check that compared.
        """
        reference = [event.written() for event in self.episodes[name]]
        for turn, (before, now) in enumerate(zip_longest(reference, lines)):
            if before != now:
                raise BrokenError(
                    Check.SAME_INSTANCE, f"seed and script {name!r}, turn {turn}: {before} became {now}"
                )


def _rewards(subject: _Subject) -> None:
    for name, events in subject.episodes.items():
        for event in events:
            if event.result is not None and not math.isfinite(event.result.reward):
                raise BrokenError(
                    Check.REWARDS, f"seed and script {name!r}: a reward is {event.result.reward}"
                )


def _info(subject: _Subject) -> None:
    for name, events in subject.episodes.items():
        for event in events:
            if event.result is None:
                continue
            try:
                json.dumps(event.result.info, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise BrokenError(Check.INFO, f"seed and script {name!r}: {error}") from error
            if odd := [key for key in event.result.info if not isinstance(key, str)]:
                raise BrokenError(Check.INFO, f"seed and script {name!r}: the key {odd[0]!r} is not text")


def _ends(subject: _Subject) -> None:
    if getattr(subject.instance, "unlimited", False):
        raise NotCheckableError("declared unlimited")
    for name, events in subject.episodes.items():
        if (result := events[-1].result) is None or not result.done:
            raise BrokenError(
                Check.ENDS,
                f"seed and script {name!r}: not done after {subject.plan.max_turns} turns, "
                "and the class does not declare `unlimited = True`",
            )


def _order(subject: _Subject) -> None:
    environment = subject.new()
    _must_refuse(environment, "before reset")
    events = list(turns(environment, subject.plan.seeds[0], "talk", subject.plan.max_turns))
    if (result := events[-1].result) is not None and result.done:
        _must_refuse(environment, "after the end of the episode")


def _must_refuse(environment: Environment, when: str) -> None:
    try:
        environment.step(Action("7"))
    except RuntimeError:
        return
    except Exception as error:
        raise BrokenError(Check.ORDER, f"step {when} raised {error!r:.80}, not RuntimeError") from error
    raise BrokenError(Check.ORDER, f"step {when} did not raise RuntimeError")


def _same_instance(subject: _Subject) -> None:
    environment = subject.new()
    play(environment, subject.plan)
    abandoned = turns(environment, subject.plan.seeds[-1], "talk", 1)
    next(abandoned)
    for name, lines in written(play(environment, subject.plan)).items():
        subject.compare(name, lines)


def _fresh_instance(subject: _Subject) -> None:
    for name in reversed(subject.episodes):
        seed, _, script = name.partition(" ")
        events = turns(subject.new(), int(seed), script, subject.plan.max_turns)
        subject.compare(name, [event.written() for event in events])


def _new_process(subject: _Subject) -> None:
    if subject.id is None:
        raise NotCheckableError("it cannot be imported by name (a local or interactive class or function)")
    request = {"id": subject.id, "args": subject.args, "plan": subject.plan}
    try:
        (answer,) = play_elsewhere([request])
    except RuntimeError as error:
        raise BrokenError(Check.NEW_PROCESS, str(error)) from error
    compare_elsewhere(subject.episodes, answer)


def compare_elsewhere(episodes: dict[str, list[Event]], answer: dict[str, Any]) -> None:
    """Raise `BrokenError` unless another process played the same."""
    if "violated" in answer:
        raise BrokenError(Check.NEW_PROCESS, answer["violated"])
    for name, lines in written(episodes).items():
        if lines != answer["episodes"].get(name):
            raise BrokenError(
                Check.NEW_PROCESS, f"seed and script {name!r}: another process played another episode"
            )


def _isolation(subject: _Subject) -> None:
    first, second = subject.plan.seeds[:2]
    names = (f"{first} talk", f"{second} talk")
    plays = [turns(subject.new(), seed, "talk", subject.plan.max_turns) for seed in (first, second)]
    together = list(zip_longest(*plays))
    for name, events in zip(names, zip(*together, strict=True), strict=True):
        subject.compare(name, [event.written() for event in events if event is not None])


def _splits(subject: _Subject) -> None:
    shown: dict[str, dict[str, int]] = {}
    for split in ("train", "held_out"):
        environment = call(f"making the split {split!r}", subject.new, split)
        seeds = (stable_hash("split seed", index) >> 1 for index in range(4 * len(subject.plan.seeds)))
        shown[split] = {call("reset", environment.reset, seed).text: seed for seed in seeds}
    if len(shown["train"].keys() | shown["held_out"].keys()) == 1:
        raise NotCheckableError("all problems look the same at reset")
    if common := shown["train"].keys() & shown["held_out"].keys():
        text = min(common)
        seeds_of = f"train seed {shown['train'][text]}, held_out seed {shown['held_out'][text]}"
        raise BrokenError(
            Check.SPLITS, f"{len(common)} problems are in both, such as {text!r:.80} ({seeds_of})"
        )


def _demonstration(subject: _Subject) -> None:
    environment = subject.instance
    if not isinstance(environment, Demonstrates):
        raise NotCheckableError("it has none")
    for seed in subject.plan.seeds:
        totals = {script: _total(subject.episodes[f"{seed} {script}"]) for script in scripts(environment)}
        best = max(totals, key=lambda script: totals[script])
        if totals[best] > totals["demonstrate"]:
            raise BrokenError(
                Check.DEMONSTRATION,
                f"seed {seed}: demonstrations earn {totals['demonstrate']:g}, {best!r} {totals[best]:g}",
            )
        environment.reset(seed)
        if environment.demonstration() != environment.demonstration():
            raise BrokenError(Check.DEMONSTRATION, f"seed {seed}: asked twice, it gives two answers")


def _total(events: list[Event]) -> float:
    return sum(event.result.reward for event in events if event.result is not None)


def _global_random(subject: _Subject) -> None:
    numpy = sys.modules.get("numpy")
    with _global_random_kept():
        # a state that no environment arrives at, so that seeding is seen as well as drawing
        random.seed("conformance")
        if numpy:
            numpy.random.seed(20_240_229)
        before = _global_state()
        play(subject.new(), subject.plan)
        if _global_state() != before:
            raise BrokenError(Check.GLOBAL_RANDOM, "a global random generator was seeded or drawn from")


@contextmanager
def _global_random_kept() -> Iterator[None]:
    """Put the global generators back afterwards."""
    numpy = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(state)
        if numpy and numpy_state:
            numpy.random.set_state(numpy_state)


def _global_state() -> list[Any]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return [random.getstate()]
    _, key, position, *_ = numpy.random.get_state()
    return [random.getstate(), key.tolist(), position]


def _importable(factory: Factory) -> str | None:
    """`module:name` if that is how another process can find the factory."""
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", "")
    found = getattr(sys.modules.get(module or ""), name, None)
    return f"{module}:{name}" if found is factory and module != "__main__" else None


_CHECKS: dict[Check, Callable[[_Subject], None]] = {
    Check.REWARDS: _rewards,
    Check.INFO: _info,
    Check.ENDS: _ends,
    Check.ORDER: _order,
    Check.SAME_INSTANCE: _same_instance,
    Check.FRESH_INSTANCE: _fresh_instance,
    Check.NEW_PROCESS: _new_process,
    Check.ISOLATION: _isolation,
    Check.SPLITS: _splits,
    Check.DEMONSTRATION: _demonstration,
    Check.GLOBAL_RANDOM: _global_random,
}
