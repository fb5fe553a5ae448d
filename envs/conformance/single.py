"""What environments of one agent are checked for beyond what is shared."""

from collections.abc import Callable, Sequence
from typing import Any

from envs.conformance.subject import Event, NotCheckableError, Subject
from envs.playing import BrokenError, Check, calls_or_action, demonstrated, scripts
from envs.protocol import DemonstratesTools


def _demonstration(subject: Subject) -> None:
    environment: Any = subject.instance
    if subject.unplayable or "demonstrate" not in scripts(environment, subject.tools):
        _look_at_calls(subject)
    tools = subject.tools or {}
    for seed in subject.plan.seeds:
        played = scripts(environment, tools)
        totals = {script: _total(subject.episodes[f"{seed} {script}"]) for script in played}
        best = max(totals, key=lambda script: totals[script])
        if totals[best] > totals["demonstrate"]:
            raise BrokenError(
                Check.DEMONSTRATION,
                f"seed {seed}: demonstrations earn {totals['demonstrate']:g}, {best!r} {totals[best]:g}",
            )
        environment.reset(seed)
        if demonstrated(environment, tools) != demonstrated(environment, tools):
            raise BrokenError(Check.DEMONSTRATION, f"seed {seed}: asked twice, it gives two answers")


def _look_at_calls(subject: Subject) -> None:
    """What can be said of demonstrations that cannot be played; raises in any case."""
    environment = subject.new()
    if not isinstance(environment, DemonstratesTools):
        raise NotCheckableError("it has none")
    for seed in subject.plan.seeds:
        next(subject.turns(environment, seed, "talk"))
        if calls_or_action(environment, ()) != calls_or_action(environment, ()):
            raise BrokenError(Check.DEMONSTRATION, f"seed {seed}: asked twice, it shows two ways")
    raise NotCheckableError(subject.unplayable or "it calls tools, and none were given")


def _total(events: Sequence[Event]) -> float:
    return sum(reward for event in events for reward in event.rewards)


CHECKS: dict[Check, Callable[[Subject], None]] = {Check.DEMONSTRATION: _demonstration}
