"""Sampler and trainer agree about the probability of every sampled token."""

from pathlib import Path

import numpy as np
import pytest

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.sampling.protocol import BASE, SampleRequest, SamplingParams
from opentinker_core.trajectories.types import StopReason
from tests.tiny import TinyEngine, requests, rl_datums

_LIMIT = 40
SHAPES = [
    {"temperature": 0.6},
    {"temperature": 1.0},
    {"temperature": 1.3},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.5, "top_k": 7},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.3, "min_p": 0.02, "top_p": 0.9, "top_k": 20},
]


@pytest.fixture
def engine(tiny_home: Path, tmp_path: Path) -> TinyEngine:
    engine = TinyEngine.open(tiny_home, tmp_path)
    engine.random_policy("p")
    return engine


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("policy", ["p", None])
def test_logprobs_agree_to_1e_4(engine: TinyEngine, shape: dict[str, float], policy: str | None) -> None:
    version = engine.publish("p") if policy else BASE
    params = SamplingParams(max_tokens=24, stop_token_ids=(engine.tokenizer.eos_token_id,), **shape)
    asked = requests(engine, version, params, samples=8)
    datums = rl_datums(asked, engine.sampler.sample(asked))
    for datum, logprobs in zip(datums, engine.trainer.forward(policy, datums), strict=True):
        assert np.abs(logprobs - datum.sampler_logprobs_N).max() < 1e-4


@pytest.mark.parametrize(("top_k", "top_p", "allowed"), [(1, 1.0, 1), (3, 1.0, 3), (0, 1e-6, 1)])
def test_truncation_keeps_only_the_most_likely(
    engine: TinyEngine, top_k: int, top_p: float, allowed: int
) -> None:
    params = SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p)
    request = SampleRequest(engine.ids("1+1="), params, BASE, tuple(range(200)))
    sequences = engine.sampler.sample([request])[0]
    assert len({int(sequence.tokens[0]) for sequence in sequences}) <= allowed
    total = np.exp([sequence.logprobs[0] for sequence in {int(s.tokens[0]): s for s in sequences}.values()])
    assert total.sum() == pytest.approx(1.0, abs=1e-4)


def test_frequencies_follow_the_logprobs(engine: TinyEngine) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.7, top_k=4)
    request = SampleRequest(engine.ids("1+1="), params, engine.publish("p"), tuple(range(4000)))
    sequences = engine.sampler.sample([request])[0]
    drawn = np.array([sequence.tokens[0] for sequence in sequences])
    for token in set(drawn.tolist()):
        expected = float(np.exp(next(s.logprobs[0] for s in sequences if s.tokens[0] == token)))
        assert (drawn == token).mean() == pytest.approx(expected, abs=0.04)


def test_greedy_takes_the_most_likely_token_with_logprob_zero(engine: TinyEngine) -> None:
    greedy = SampleRequest(engine.ids("1+1="), SamplingParams(max_tokens=6, temperature=0), BASE, (1, 2))
    first, second = engine.sampler.sample([greedy])[0]
    narrow = SampleRequest(engine.ids("1+1="), SamplingParams(max_tokens=6, top_k=1), BASE, (3,))
    assert (
        first.tokens.tolist()
        == second.tokens.tolist()
        == engine.sampler.sample([narrow])[0][0].tokens.tolist()
    )
    assert not first.logprobs.any()


def test_the_same_seeds_give_the_same_tokens_whatever_the_neighbours_draw(engine: TinyEngine) -> None:
    version = engine.publish("p")
    params = SamplingParams(max_tokens=16, temperature=1.3)
    asked = requests(engine, version, params)
    together = engine.sampler.sample(asked)
    alone = [engine.sampler.sample([request])[0] for request in asked]
    for many, few in zip(together, alone, strict=True):
        for a, b in zip(many, few, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()


def test_stops_at_tokens_strings_and_the_limit(engine: TinyEngine) -> None:
    def stops(**kwargs: object) -> list[tuple[StopReason, str]]:
        params = SamplingParams(max_tokens=_LIMIT, temperature=1.3, **kwargs)  # type: ignore[arg-type]
        request = SampleRequest(engine.ids("1+1="), params, BASE, tuple(range(32)))
        sequences = engine.sampler.sample([request])[0]
        return [(sequence.stop_reason, engine.tokenizer.decode(sequence.tokens)) for sequence in sequences]

    five = engine.ids("5")[0]
    for reason, text in stops(stop_token_ids=(five,)):
        assert text.endswith("5") == (reason is StopReason.STOP)
        assert "5" not in text[:-1]
    for reason, text in stops(stop=("5", "xy")):
        assert (text.endswith("5") or text.endswith("xy")) == (reason is StopReason.STOP)


def test_a_version_keeps_its_weights_when_newer_ones_are_published(engine: TinyEngine) -> None:
    params = SamplingParams(max_tokens=12)
    first = engine.publish("p")
    before = engine.sampler.sample(requests(engine, first, params))
    engine.random_policy("p", seed=7)
    second = engine.publish("p")
    after = engine.sampler.sample(requests(engine, first, params))
    newer = engine.sampler.sample(requests(engine, second, params))

    def tokens(answers: list) -> list:  # type: ignore[type-arg]
        return [s.tokens.tolist() for sequences in answers for s in sequences]

    assert tokens(before) == tokens(after) != tokens(newer)
    assert {s.version for sequences in newer for s in sequences} == {second}


def test_a_snapshot_that_cannot_be_read_leaves_the_old_version_serving(engine: TinyEngine) -> None:
    version = engine.publish("p")
    with pytest.raises(OpenTinkerError, match="No such file"):
        engine.sampler.refresh("p@99", str(engine.scratch / "nothing"), "digest-99")
    params = SamplingParams(max_tokens=2)
    assert engine.sampler.sample(requests(engine, version, params))
    with pytest.raises(UsageError, match=r"'p@99' is not served.*p@1"):
        engine.sampler.sample(requests(engine, "p@99", params))


def test_requests_that_cannot_be_served_are_refused(engine: TinyEngine) -> None:
    with pytest.raises(UsageError, match="prompt_tokens: empty"):
        engine.sampler.sample([SampleRequest((), SamplingParams(max_tokens=1), BASE, (0,))])
    long = engine.ids("1" * 510)
    with pytest.raises(UsageError, match=r"max_tokens: 8 after a prompt of 510.*at most 2"):
        engine.sampler.sample([SampleRequest(long, SamplingParams(max_tokens=8), BASE, (0,))])
