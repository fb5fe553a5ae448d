"""A check of environments, yours included: does it keep the promises of `envs.protocol` and `envs.multi`?

from envs.conformance import assert_conforms
assert_conforms("my_package.my_module:MyEnvironment")
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envs.conformance import multi, shared, single
from envs.conformance.shared import compare_elsewhere as compare_elsewhere
from envs.conformance.subject import Factory, NotCheckableError, Subject, global_random_kept
from envs.playing import BrokenError, Check, Tools


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


def check_environment(
    environment: str | Factory,
    args: Mapping[str, Any] | None = None,
    *,
    seeds: int = 8,
    max_turns: int = 100,
    new_process: bool = True,
    tools: Tools | None = None,
) -> Report:
    """Play scripted episodes and report every promise that is broken, of one agent or of several.

    Args:
        environment: an id that `envs.registry.make_any` knows, `module:ClassName` among them, or a
            class or function that takes `split` and `args` as keywords.
        args: its arguments.
        seeds: number of episodes a script; splits are compared on four times as many.
        max_turns: turns after which an episode counts as one that does not end.
        new_process: also play in a new process; needs an environment that can be imported.
        tools: what demonstrations may call; without them, those that call are looked at, not played.

    Raises:
        ValueError: the environment cannot be made at all.
    """
    with Subject(environment, dict(args or {}), seeds, max_turns, tools) as subject, global_random_kept():
        try:
            subject.episodes = subject.play(subject.instance)
        except BrokenError as broken:
            return Report(subject.name, (), (Violation(broken.check, broken.detail),))
        return _run_checks(subject, new_process)


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


def _run_checks(subject: Subject, new_process: bool) -> Report:
    passed = [Check.PLAYS, Check.TYPES]
    violations: list[Violation] = []
    skipped: dict[Check, str] = {}
    checks: dict[Check, Callable[[Subject], None]] = shared.CHECKS | (
        multi.CHECKS if subject.several else single.CHECKS
    )
    for check, run in checks.items():
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
