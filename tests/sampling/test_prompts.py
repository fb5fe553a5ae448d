"""Questions about prompts, logprobs without truncation, and tokens that are told as they are drawn."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opentinker_core.errors import UsageError
from opentinker_core.sampling.generation import CHUNK, Limits
from opentinker_core.sampling.native import NativeSampler
from opentinker_core.sampling.protocol import (
    BASE,
    DrawnToken,
    PromptAnswer,
    PromptQuestion,
    SampleRequest,
    SamplingParams,
)
from tests.tiny import TinyEngine

LONG = tuple(4 + (7 * at) % 90 for at in range(CHUNK + 37))


@pytest.fixture
def engine(tiny_home: Path, tmp_path: Path) -> TinyEngine:
    engine = TinyEngine.open(tiny_home, tmp_path)
    engine.random_policy("p")
    return engine


def question(prompt: tuple[int, ...]) -> PromptQuestion:
    targets = tuple((at % 90, -1, (3 * at) % 90) for at in range(len(prompt) - 1))
    return PromptQuestion(likeliest=3, targets=targets, drawn=4)


def request(prompt: tuple[int, ...], version: str = BASE, seeds: tuple[int, ...] = (5, 6)) -> SampleRequest:
    params = SamplingParams(6, temperature=0.7)
    return SampleRequest(prompt, params, version, seeds, prompt_logprobs=True, about_prompt=question(prompt))


def same(one: PromptAnswer | None, other: PromptAnswer | None) -> None:
    assert one is not None
    assert other is not None
    for name, values in vars(one).items():
        assert np.array_equal(values, getattr(other, name)), name


def test_answers_do_not_depend_on_what_runs_beside(engine: TinyEngine) -> None:
    version = engine.publish("p")
    asked = [request(LONG, version), request(LONG[:20]), request(LONG[5:70], version, (9,))]
    alone = [engine.sampler.sample([one])[0] for one in asked]
    together = engine.sampler.sample([*asked, request(LONG[:9]), *asked])
    for given, expected in zip([*together[:3], *together[4:]], [*alone, *alone], strict=True):
        for one, other in zip(given, expected, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.prompt_logprobs is not None
            assert np.array_equal(one.prompt_logprobs, other.prompt_logprobs)
            same(one.about_prompt, other.about_prompt)


def test_asking_changes_nothing_of_what_is_sampled(engine: TinyEngine) -> None:
    asked = request(LONG)
    plain = replace(asked, prompt_logprobs=False, about_prompt=None)
    for one, other in zip(*engine.sampler.sample([asked, plain]), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert np.array_equal(one.logprobs, other.logprobs)


def test_answers_agree_with_prompt_logprobs_and_with_each_other(engine: TinyEngine) -> None:
    own = PromptQuestion(likeliest=99, targets=tuple((token,) for token in LONG[1:]))
    asked = replace(request(LONG), about_prompt=own, seeds=(1,))
    (sequence,) = engine.sampler.sample([asked])[0]
    answer = sequence.about_prompt
    assert answer is not None
    assert answer.likeliest_tokens is not None
    assert answer.likeliest_logprobs is not None
    assert answer.target_logprobs is not None
    assert sequence.prompt_logprobs is not None
    np.testing.assert_allclose(answer.target_logprobs[:, 0], sequence.prompt_logprobs[1:], atol=1e-6)
    where = answer.likeliest_tokens == np.array(LONG[1:])[:, None]
    rows, columns = np.nonzero(where)
    np.testing.assert_allclose(
        answer.likeliest_logprobs[rows, columns], answer.target_logprobs[rows, 0], atol=1e-6
    )
    assert answer.drawn_tokens is None


def test_logprobs_without_truncation_are_those_of_the_temperature(engine: TinyEngine) -> None:
    plain = SamplingParams(8, temperature=0.6)
    shapes = [plain, replace(plain, top_p=0.5), replace(plain, top_k=2), replace(plain, temperature=0.0)]
    asked = [SampleRequest(LONG[:9], shape, BASE, (3,), scaled_logprobs=True) for shape in shapes]
    given = [sequences[0] for sequences in engine.sampler.sample(asked)]
    for shape, sequence in zip(shapes, given, strict=True):
        scored = replace(
            request((*LONG[:9], *sequence.tokens.tolist())),
            about_prompt=PromptQuestion(likeliest=99),
            seeds=(1,),
        )
        answer = engine.sampler.sample([scored])[0][0].about_prompt
        assert answer is not None
        assert answer.likeliest_logprobs is not None
        scaled_TV = answer.likeliest_logprobs[8:] / (shape.temperature or 1.0)
        scaled_TV = scaled_TV - np.log(np.exp(scaled_TV).sum(-1, keepdims=True))
        own = np.nonzero(answer.likeliest_tokens[8:] == sequence.tokens[:, None])
        np.testing.assert_allclose(sequence.scaled_logprobs, scaled_TV[own], atol=1e-5)


def test_a_listener_is_told_what_the_completions_are(engine: TinyEngine) -> None:
    told: list[DrawnToken] = []
    asked = replace(request(LONG[:9]), listener=told.append, top_logprobs=2, seeds=(1, 2, 3))
    sequences = engine.sampler.sample([asked, request(LONG)])[0]
    for index, sequence in enumerate(sequences):
        assert [token for token in told if token.index == index] == sequence.drawn(index)
    assert sequences[0].drawn(0)[-1].stop_reason is sequences[0].stop_reason


def test_a_listener_is_told_nothing_twice_when_a_completion_starts_over(engine: TinyEngine) -> None:
    token = engine.sampler.generation.cache.shape.bytes_per_token
    small = NativeSampler(
        engine.sampler.generation._stepper._decoder,
        engine.pool,
        engine.tokenizer,
        lambda uri, _: Path(uri),
        engine.trainer.read_adapter,
        limits=Limits(kv_bytes=192 * 5 * token, prefix_bytes=0),
    )
    told: list[DrawnToken] = []
    params = SamplingParams(150)
    asked = SampleRequest(LONG[:9], params, BASE, tuple(range(8)), listener=told.append)
    sequences = small.sample([asked])[0]
    assert small.counts.preemptions > 0
    for index, sequence in enumerate(sequences):
        assert [token for token in told if token.index == index] == sequence.drawn(index)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt_tokens": (5, 2098)}, "prompt_tokens"),
        ({"prompt_tokens": (5, -1)}, "prompt_tokens"),
        ({"about_prompt": PromptQuestion(targets=((1,), (2,)))}, "targets: 2 rows"),
        ({"about_prompt": PromptQuestion(targets=((5000,),))}, "targets: 5000"),
        ({"top_logprobs": 5000}, "top_logprobs"),
    ],
)
def test_what_would_break_the_shared_step_is_refused(
    engine: TinyEngine, changed: dict[str, object], message: str
) -> None:
    asked = SampleRequest((5, 6), SamplingParams(2), BASE, (1,))
    with pytest.raises(UsageError, match=message):
        engine.sampler.sample([replace(asked, **changed)])  # type: ignore[arg-type]


def test_released_versions_leave_nothing_behind_once_their_requests_are_done(engine: TinyEngine) -> None:
    version = engine.publish("p")
    asked = SampleRequest(LONG[:9], SamplingParams(4), version, (1, 2))
    expected = engine.sampler.sample([asked])[0]
    ticket = engine.sampler.submit(asked)
    engine.sampler.release(version)
    while ticket.outcome is None:
        engine.sampler.step()
    assert isinstance(ticket.outcome, list)
    assert [one.tokens.tolist() for one in ticket.outcome] == [one.tokens.tolist() for one in expected]
    again = engine.publish("p")
    engine.sampler.release(again)
    assert f"digest-{engine.published}" not in engine.sampler._snapshots.uris
