"""What every sampler must do, as checks to run on your own.

    from opentinker_core.sampling.conformance import Published, Subject, check_sampler

    report = check_sampler(Subject(
        MySampler(...),
        versions=(Published("p@1", uri, digest), Published("q@1", other_uri, other_digest)),
        prompts=((3, 1, 4), (2, 7, 1, 8, 2)),
    ))

A check raises `ConformanceError`, which says what the sampler did wrong, or `NotOfferedError` where it
declares that it lacks something that is optional (`OPTIONAL`), by a `UsageError` that names the field.
Checks need no order and leave the sampler as it was, so that one that is slow to start serves for all;
with pytest, parametrize over `CHECKS`. docs/samplers.md lists the promises.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from opentinker_core.sampling.conformance import drawing, scoring, serving
from opentinker_core.sampling.conformance.subject import OPTIONAL as OPTIONAL
from opentinker_core.sampling.conformance.subject import ConformanceError as ConformanceError
from opentinker_core.sampling.conformance.subject import NotOfferedError as NotOfferedError
from opentinker_core.sampling.conformance.subject import Published as Published
from opentinker_core.sampling.conformance.subject import Subject as Subject

Check = Callable[[Subject], None]

CHECKS: tuple[Check, ...] = (
    drawing.check_shapes,
    drawing.check_seeds,
    drawing.check_company,
    drawing.check_frequencies,
    drawing.check_greedy,
    drawing.check_truncation,
    drawing.check_max_tokens,
    drawing.check_stop_tokens,
    drawing.check_stop_strings,
    scoring.check_logprobs,
    scoring.check_prompt_logprobs,
    scoring.check_top_logprobs,
    scoring.check_scaled_logprobs,
    scoring.check_prompt_questions,
    serving.check_versions_are_told_apart,
    serving.check_refuses,
    serving.check_refresh_again,
    serving.check_broken_snapshots,
    serving.check_release,
)


@dataclass(frozen=True)
class Report:
    """What was checked: names of the checks that passed, and why others could not be made."""

    passed: tuple[str, ...]
    skipped: dict[str, str] = field(default_factory=dict)


def check_sampler(subject: Subject) -> Report:
    """Run every check.

    Raises:
        ConformanceError: the first promise that the sampler broke.
    """
    passed: list[str] = []
    skipped: dict[str, str] = {}
    for check in CHECKS:
        try:
            check(subject)
            passed.append(check.__name__)
        except NotOfferedError as reason:
            skipped[check.__name__] = str(reason)
    return Report(tuple(passed), skipped)
