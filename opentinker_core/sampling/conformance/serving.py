"""Checks of who is served: versions one after the other, what is refused, what is released."""

import numpy as np

from opentinker_core.errors import UsageError
from opentinker_core.sampling.conformance.subject import (
    Comparison,
    NotOfferedError,
    Published,
    Subject,
    answer,
    refresh,
    refused,
    require,
    sample,
    sample_each,
    serve,
)
from opentinker_core.sampling.protocol import BASE, SampledSequence, SampleRequest, SamplingParams
from opentinker_core.snapshots.protocol import SnapshotError


def check_versions_are_told_apart(subject: Subject) -> None:
    """Versions and the base differ, and each is what it was when others have come after it."""
    same, seeds = Comparison(subject).same, tuple(range(4))
    seen = {BASE: sample(subject, BASE, seeds=seeds)}
    for published in subject.versions:
        refresh(subject, published)
        now = sample(subject, published.version, seeds=seeds)
        after = sample_each(subject, list(seen), seeds=seeds)
        for name, before in seen.items():
            require(not _equal(before, now), f"{published.version} and {name} are told apart")
            same(before, after[name], f"{name} stays what it was when others come")
        seen[published.version] = now


def check_refuses(subject: Subject) -> None:
    """What cannot be sampled is refused by name, and what stands beside it can be asked for again."""
    same, version, prompt = Comparison(subject).same, serve(subject)[0], subject.prompts[0]
    good = SampleRequest(prompt, SamplingParams(3), version, (1,))
    before = answer(subject, [good])[0]
    unknown = "never-published@1"
    wrong = [
        ("an empty prompt", "prompt", SampleRequest((), SamplingParams(3), version, (1,))),
        ("an unknown version", unknown, SampleRequest(prompt, SamplingParams(3), unknown, (1,))),
    ]
    if subject.context is not None:
        long = tuple(np.resize(prompt, subject.context - 2).tolist())
        more = SampleRequest(long, SamplingParams(3), version, (1,))
        wrong.append(("more tokens than the context holds", "max_tokens", more))
        full = tuple(np.resize(prompt, subject.context).tolist())
        none = SampleRequest(full, SamplingParams(1), version, (1,))
        wrong.append(("a prompt that leaves no room", "prompt", none))
    for what, named, request in wrong:
        refused(UsageError, named, what, subject.sampler.sample, [good, request])
        same(before, answer(subject, [good])[0], f"{what} leaves the sampler as it was")


def check_refresh_again(subject: Subject) -> None:
    """Refreshing twice is refreshing once; a snapshot under two names is the same weights."""
    same, first = Comparison(subject).same, subject.versions[0]
    refresh(subject, first)
    before = sample(subject, first.version)
    refresh(subject, first)
    same(before, sample(subject, first.version), "refreshing twice changes nothing")
    twin = Published("conformance-twin@1", first.uri, first.digest)
    refresh(subject, twin)
    same(before, sample(subject, twin.version), "one snapshot under two names is served alike")
    subject.sampler.release(twin.version)
    same(before, sample(subject, first.version), "releasing one of two names leaves the other")


def check_broken_snapshots(subject: Subject) -> None:
    """A snapshot that is missing or corrupt is refused, and what was served before goes on."""
    if not subject.broken:
        raise NotOfferedError("broken: no such snapshots were given")
    same, names = Comparison(subject).same, serve(subject)
    before = sample_each(subject, names)
    for published in subject.broken:
        refused(SnapshotError, "", f"refreshing with {published.uri}", refresh, subject, published)
        request = SampleRequest(subject.prompts[0], SamplingParams(1), published.version, (1,))
        what = "a version whose snapshot is broken"
        refused(UsageError, published.version, what, subject.sampler.sample, [request])
        after = sample_each(subject, names)
        for name in names:
            same(before[name], after[name], f"{name} goes on after a broken snapshot")


def check_release(subject: Subject) -> None:
    """A released version is refused, the others are not; refreshed again, it is what it was."""
    same, (first, second) = Comparison(subject).same, subject.versions[:2]
    serve(subject)
    before, others = sample(subject, first.version), sample(subject, second.version)
    for name in (first.version, first.version, "never-published@1"):
        subject.sampler.release(name)
    request = SampleRequest(subject.prompts[0], SamplingParams(1), first.version, (1,))
    refused(UsageError, first.version, "a released version", subject.sampler.sample, [request])
    same(others, sample(subject, second.version), "releasing a version leaves the others")
    refresh(subject, first)
    same(before, sample(subject, first.version), "a version comes back as it was")


def _equal(left: list[SampledSequence], right: list[SampledSequence]) -> bool:
    """Whether tokens and logprobs are the same, as they are of one version only."""
    return all(
        np.array_equal(a.tokens, b.tokens) and np.allclose(a.logprobs, b.logprobs, atol=1e-3)
        for a, b in zip(left, right, strict=True)
    )
