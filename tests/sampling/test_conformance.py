"""The native sampler keeps every promise; a sampler that breaks one is found out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.models.decoder import Decoder
from opentinker_core.sampling.conformance import (
    CHECKS,
    ConformanceError,
    NotOfferedError,
    Subject,
    check_sampler,
)
from opentinker_core.sampling.native import NativeSampler
from opentinker_core.sampling.protocol import BASE, SampledSequence, SampleRequest
from opentinker_core.snapshots.protocol import SnapshotStore
from tests.sampling.subjects import subject_with
from tests.tiny import LORA, TinyEngine

Answers = list[list[SampledSequence]]


@pytest.fixture(scope="module")
def subject(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("conformance")
    engine = TinyEngine.open(tiny_home, folder)

    def native(store: SnapshotStore) -> NativeSampler:
        decoder = Decoder.of(engine.model)
        return NativeSampler(decoder, engine.pool, engine.tokenizer, store.fetch, engine.trainer.read_adapter)

    context = engine.sampler.max_context
    return subject_with(
        native, engine.trainer, engine.tokenizer, folder, lora=LORA, spread=0.2, context=context
    )


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_native_sampler_conforms(subject: Subject, check: Callable[[Subject], None]) -> None:
    check(subject)


class Delegating:
    """A sampler that does what a good one does; the broken ones below change one thing."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.names: list[str] = []

    def refresh(self, version: str, snapshot_uri: str, digest: str) -> None:
        self.inner.refresh(version, snapshot_uri, digest)
        self.names.append(version)

    def release(self, version: str) -> None:
        self.inner.release(version)

    def sample(self, requests: Sequence[SampleRequest]) -> Answers:
        return self.inner.sample(requests)  # type: ignore[no-any-return]

    def changed(self, requests: Sequence[SampleRequest], change: Callable[[SampledSequence], Any]) -> Answers:
        return [[change(one) for one in answer] for answer in self.inner.sample(requests)]


class DrawsByPlaceInTheBatch(Delegating):
    def sample(self, requests: Sequence[SampleRequest]) -> Answers:
        moved = [replace(r, seeds=tuple(seed + i for seed in r.seeds)) for i, r in enumerate(requests)]
        return self.inner.sample(moved)  # type: ignore[no-any-return]


class DrawsByPlaceInTheGroup(Delegating):
    def sample(self, requests: Sequence[SampleRequest]) -> Answers:
        moved = [replace(r, seeds=tuple(r.seeds[0] + i for i in range(len(r.seeds)))) for r in requests]
        return self.inner.sample(moved)  # type: ignore[no-any-return]


class GivesBaseRowsTheLastAdapter(Delegating):
    """What vLLM does on a CPU when its last slot is taken."""

    def sample(self, requests: Sequence[SampleRequest]) -> Answers:
        others = [request.version for request in requests if request.version != BASE]
        served = [replace(r, version=others[-1]) if others and r.version == BASE else r for r in requests]
        answers = self.inner.sample(served)
        return [
            [replace(one, version=request.version) for one in answer]
            for request, answer in zip(requests, answers, strict=True)
        ]


class ServesTheNewestVersionOnly(Delegating):
    def sample(self, requests: Sequence[SampleRequest]) -> Answers:
        served = [r if r.version == BASE else replace(r, version=self.names[-1]) for r in requests]
        answers = self.inner.sample(served)
        return [
            [replace(one, version=request.version) for one in answer]
            for request, answer in zip(requests, answers, strict=True)
        ]


class IgnoresTemperature(Delegating):
    def sample(self, requests: Sequence[SampleRequest]) -> Answers:
        hot = [
            replace(r, params=replace(r.params, temperature=1.0 if r.params.temperature else 0))
            for r in requests
        ]
        return self.inner.sample(hot)  # type: ignore[no-any-return]


class GivesLogprobsOfTheModel(Delegating):
    """Before temperature and truncation, as engines do by default."""

    def sample(self, requests: Sequence[SampleRequest]) -> Answers:
        return self.changed(requests, lambda one: replace(one, logprobs=one.model_logprobs))


class GivesTruncatedLogprobsAsScaled(Delegating):
    def sample(self, requests: Sequence[SampleRequest]) -> Answers:
        asked = any(request.scaled_logprobs for request in requests)
        return self.changed(
            requests, lambda one: replace(one, scaled_logprobs=one.logprobs) if asked else one
        )


class AnswersAboutThePromptBackwards(Delegating):
    def sample(self, requests: Sequence[SampleRequest]) -> Answers:
        return self.changed(requests, self._backwards)

    def _backwards(self, one: SampledSequence) -> SampledSequence:
        if one.about_prompt is None:
            return one
        turned = {name: values[::-1] for name, values in vars(one.about_prompt).items()}
        return replace(one, about_prompt=replace(one.about_prompt, **turned))


class DrawsTooHot(Delegating):
    """Draws at another temperature than it says; its logprobs are right for what it says."""

    def sample(self, requests: Sequence[SampleRequest]) -> Answers:
        hot = [
            replace(r, params=replace(r.params, temperature=1.6)) if r.params.temperature == 1 else r
            for r in requests
        ]
        answers: Answers = self.inner.sample(hot)
        return [
            [replace(one, logprobs=one.model_logprobs) if h is not r else one for one in answer]
            for r, h, answer in zip(requests, hot, answers, strict=True)
        ]


class DropsTheStopToken(Delegating):
    def sample(self, requests: Sequence[SampleRequest]) -> Answers:
        def drop(one: SampledSequence) -> SampledSequence:
            if one.stop_reason != "stop":
                return one
            return replace(one, tokens=one.tokens[:-1], logprobs=one.logprobs[:-1])

        return self.changed(requests, drop)


class IgnoresTopP(Delegating):
    def sample(self, requests: Sequence[SampleRequest]) -> Answers:
        return self.inner.sample([replace(r, params=replace(r.params, top_p=1.0)) for r in requests])  # type: ignore[no-any-return]


class KeepsQuietAboutBrokenSnapshots(Delegating):
    def refresh(self, version: str, snapshot_uri: str, digest: str) -> None:
        try:
            self.inner.refresh(version, snapshot_uri, digest)
        except OpenTinkerError:
            self.names.append(version)


class NeverLetsGo(Delegating):
    def release(self, version: str) -> None:
        pass


class ReleasesAll(Delegating):
    def release(self, version: str) -> None:
        for name in self.names:
            self.inner.release(name)


class ServesTheBaseForAnUnknownVersion(Delegating):
    def sample(self, requests: Sequence[SampleRequest]) -> Answers:
        return self.inner.sample(  # type: ignore[no-any-return]
            [r if r.version in self.names else replace(r, version=BASE) for r in requests]
        )


class GivesDoubles(Delegating):
    def sample(self, requests: Sequence[SampleRequest]) -> Answers:
        return self.changed(requests, lambda one: replace(one, logprobs=one.logprobs.astype(np.float64)))


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (DrawsByPlaceInTheBatch, "check_company"),
        (DrawsByPlaceInTheGroup, "check_seeds"),
        (GivesBaseRowsTheLastAdapter, "check_company"),
        (ServesTheNewestVersionOnly, "check_versions_are_told_apart"),
        (IgnoresTemperature, "check_logprobs"),
        (GivesLogprobsOfTheModel, "check_logprobs"),
        (DrawsTooHot, "check_frequencies"),
        (DropsTheStopToken, "check_stop_tokens"),
        (IgnoresTopP, "check_truncation"),
        (KeepsQuietAboutBrokenSnapshots, "check_broken_snapshots"),
        (GivesTruncatedLogprobsAsScaled, "check_scaled_logprobs"),
        (AnswersAboutThePromptBackwards, "check_prompt_questions"),
        (NeverLetsGo, "check_release"),
        (ReleasesAll, "check_refresh_again"),
        (ServesTheBaseForAnUnknownVersion, "check_refuses"),
        (GivesDoubles, "check_shapes"),
    ],
)
def test_the_suite_finds_a_broken_sampler(subject: Subject, broken: type[Delegating], check: str) -> None:
    wrong = replace(subject, sampler=broken(subject.sampler))
    with pytest.raises(ConformanceError, match="broken promise"):
        next(one for one in CHECKS if one.__name__ == check)(wrong)


class Plain(Delegating):
    """Declares what it lacks."""

    def sample(self, requests: Sequence[SampleRequest]) -> Answers:
        for request in requests:
            for name in ("prompt_logprobs", "top_logprobs"):
                if getattr(request, name):
                    raise UsageError(f"{name}: not offered by this sampler; accepted: 0")
            if request.params.min_p:
                raise UsageError(f"min_p: {request.params.min_p} is not offered; accepted: 0")
        return self.changed(requests, lambda one: replace(one, model_logprobs=None))


def test_the_whole_suite_runs_as_a_third_party_would_call_it(subject: Subject) -> None:
    report = check_sampler(replace(subject, sampler=Plain(subject.sampler), score=None, broken=()))
    assert set(report.skipped) == {
        "check_truncation",
        "check_logprobs",
        "check_prompt_logprobs",
        "check_top_logprobs",
        "check_broken_snapshots",
    }
    assert report.skipped["check_truncation"] == "min_p"
    assert len(report.passed) + len(report.skipped) == len(CHECKS)


def test_what_is_not_optional_may_not_be_refused(subject: Subject) -> None:
    class NoTemperature(Delegating):
        def sample(self, requests: Sequence[SampleRequest]) -> Answers:
            if any(request.params.temperature != 1 for request in requests):
                raise UsageError("temperature: not offered; accepted: 1")
            return self.inner.sample(requests)  # type: ignore[no-any-return]

    with pytest.raises(ConformanceError, match="refused: temperature"):
        check_sampler(replace(subject, sampler=NoTemperature(subject.sampler)))
    with pytest.raises(NotOfferedError, match="score"):
        next(one for one in CHECKS if one.__name__ == "check_logprobs")(replace(subject, score=None))
    with pytest.raises(ValueError, match="1 versions"):
        replace(subject, versions=subject.versions[:1])
