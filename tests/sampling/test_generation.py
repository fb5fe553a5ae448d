"""Continuous batching: what a request gets depends on nothing but itself, and nothing is left behind."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.sampling.generation import CHUNK, Limits, Ticket
from opentinker_core.sampling.kv_cache import BLOCK
from opentinker_core.sampling.native import NativeSampler
from opentinker_core.sampling.protocol import BASE, SampledSequence, SampleRequest, SamplingParams
from tests.tiny import LORA, TinyEngine

Answer = list[tuple[list[int], list[float], str]]


@pytest.fixture
def engine(tiny_home: Path, tmp_path: Path) -> TinyEngine:
    engine = TinyEngine.open(tiny_home, tmp_path)
    engine.random_policy("p")
    engine.random_policy("q", 1, LoRAConfig(rank=16, alpha=8.0))
    engine.random_policy("r", 2, replace_targets(LORA, ("gate_proj", "o_proj")))
    return engine


def replace_targets(lora: LoRAConfig, targets: tuple[str, ...]) -> LoRAConfig:
    return lora.model_copy(update={"target_modules": targets})


def with_limits(engine: TinyEngine, limits: Limits) -> NativeSampler:
    """Another sampler that knows the same versions."""
    sampler = engine.sampler
    other = NativeSampler(
        sampler.generation._stepper._decoder,
        engine.pool,
        engine.tokenizer,
        lambda uri, _: Path(uri),
        engine.trainer.read_adapter,
        limits=limits,
    )
    other._digests, other._snapshots.uris = sampler._digests, sampler._snapshots.uris
    return other


def answer(sequences: Sequence[SampledSequence]) -> Answer:
    return [(s.tokens.tolist(), s.logprobs.tolist(), s.version) for s in sequences]


def outcome(ticket: Ticket) -> Answer:
    assert isinstance(ticket.outcome, list), ticket.outcome
    return answer(ticket.outcome)


def varied_requests(engine: TinyEngine, versions: Sequence[str]) -> list[SampleRequest]:
    shapes = [
        SamplingParams(14),
        SamplingParams(6, temperature=0.7, top_p=0.9),
        SamplingParams(9, temperature=1.3, top_k=5),
        SamplingParams(7, min_p=0.1),
        SamplingParams(4, temperature=0.0),
    ]
    prompts = ["1+1=", "12+34=", "7*8+9-1=", "1+2=3 " * 9, "0"]
    return [
        SampleRequest(engine.ids(prompts[i % 5]), shapes[(i + i // 5) % 5], version, (i, 7 * i)[: 1 + i % 2])
        for i, version in enumerate([*versions] * 4)
    ]


def run_staggered(sampler: NativeSampler, asked: Sequence[SampleRequest], rng: random.Random) -> list[Ticket]:
    """Hand requests in one after the other, with a few steps between."""
    tickets = []
    for request in asked:
        tickets.append(sampler.submit(request))
        for _ in range(rng.choice([0, 0, 1, 3])):
            sampler.step()
    while not sampler.is_idle:
        sampler.step()
    return tickets


def test_a_request_gets_the_same_bits_alone_and_in_200_mixes(engine: TinyEngine) -> None:
    versions = [BASE, *(engine.publish(policy) for policy in "pqr")]
    asked = varied_requests(engine, versions)
    alone = [answer(engine.sampler.sample([request])[0]) for request in asked]
    assert len({str(a) for a in alone}) == len(alone)
    rng = random.Random(0)
    for _ in range(200):
        chosen = [rng.randrange(len(asked)) for _ in range(rng.randint(1, 32))]
        tickets = run_staggered(engine.sampler, [asked[i] for i in chosen], rng)
        for index, ticket in zip(chosen, tickets, strict=True):
            assert outcome(ticket) == alone[index]


def test_groups_of_completions_get_the_same_bits_alone_and_while_others_of_them_end(
    engine: TinyEngine,
) -> None:
    """Completions of a version are multiplied together, in products that shrink as they end."""
    versions = [BASE, *(engine.publish(policy) for policy in "pqr")]
    prompts = ["1+1=", "12+34=", "7*8+9-1="]
    params = SamplingParams(30, temperature=1.5, stop_token_ids=(3, 4, 5, 6))
    asked = [
        SampleRequest(engine.ids(prompts[i % 3]), params, version, tuple(range(9 * i, 9 * i + count)))
        for i, (version, count) in enumerate(
            zip(versions * 3, [8, 9, 2, 16, 3, 8, 5, 1, 12, 4, 7, 8], strict=True)
        )
    ]
    alone = [answer(engine.sampler.sample([request])[0]) for request in asked]
    assert len({len(tokens) for own in alone for tokens, _, _ in own}) > 10
    assert [answer(own) for own in engine.sampler.sample(asked)] == alone
    rng = random.Random(1)
    for _ in range(20):
        chosen = [rng.randrange(len(asked)) for _ in range(rng.randint(2, 12))]
        tickets = run_staggered(engine.sampler, [asked[i] for i in chosen], rng)
        assert [outcome(ticket) for ticket in tickets] == [alone[i] for i in chosen]


def test_with_little_memory_they_take_turns_and_get_the_same(engine: TinyEngine) -> None:
    versions = [BASE, engine.publish("p")]
    long = SamplingParams(150, temperature=1.2)
    asked = [
        SampleRequest(engine.ids("1+1="), long, v, (i, i + 50, i + 99)) for i, v in enumerate(versions * 3)
    ]
    free = [answer(sequences) for sequences in engine.sampler.sample(asked)]
    token = engine.sampler.generation.cache.shape.bytes_per_token
    tight = with_limits(engine, Limits(kv_bytes=192 * 5 * token, prefix_bytes=0))
    assert [answer(sequences) for sequences in tight.sample(asked)] == free
    assert tight.counts.preemptions > 0
    assert tight.generation.cache.sequences == 0
    assert tight.generation.cache.bytes <= tight.generation.cache.budget
    with pytest.raises(UsageError, match=r"runtime\.kv_memory_gb"):
        tight.check(SampleRequest(engine.ids("1+1="), replace(long, max_tokens=500), BASE, (0,)))


def test_a_known_prefix_is_not_computed_again_and_changes_nothing(engine: TinyEngine) -> None:
    version = engine.publish("p")
    start = engine.ids("12+34=46 " * 8)
    asked = [
        SampleRequest(start[:n], SamplingParams(8), v, (n,))
        for v in (version, BASE)
        for n in (3, BLOCK, BLOCK + 1, 40, 40, len(start))
    ]
    forgetful = with_limits(engine, Limits(prefix_bytes=0))
    expected = [answer(forgetful.sample([request])[0]) for request in asked]
    assert forgetful.generation.prefixes.hits == 0
    assert [answer(engine.sampler.sample([request])[0]) for request in asked] == expected
    prefixes = engine.sampler.generation.prefixes
    computed = engine.sampler.counts.prefilled_tokens
    assert prefixes.hits > 0
    assert computed == prefixes.misses == sum(len(r.prompt_tokens) for r in asked) - prefixes.hits
    small = with_limits(
        engine, Limits(prefix_bytes=3 * BLOCK * engine.sampler.generation.cache.shape.bytes_per_token)
    )
    assert [answer(small.sample([request])[0]) for request in asked] == expected
    assert 0 < small.generation.prefixes.bytes <= small.generation.prefixes.budget


def test_long_prompts_are_prefilled_in_chunks_beside_what_decodes(engine: TinyEngine) -> None:
    version = engine.publish("q")
    rng = np.random.default_rng(0)
    long = tuple(rng.integers(3, 20, engine.sampler.max_context - 20).tolist())
    assert len(long) > CHUNK, "the tiny model's context is too short for this test"
    asked = [
        SampleRequest(long, SamplingParams(4), version, (1, 2)),
        SampleRequest((5, 6), SamplingParams(9), BASE, (3,)),
    ]
    alone = [answer(engine.sampler.sample([request])[0]) for request in asked]
    sampler = with_limits(engine, Limits(prefill_tokens=1, prefix_bytes=0))
    assert [answer(sequences) for sequences in sampler.sample(asked)] == alone


def test_versions_are_pinned_while_fifty_are_published(engine: TinyEngine) -> None:
    """16 long requests run all the time; each completion is what its version gives alone."""
    sampler = engine.sampler
    running: list[tuple[SampleRequest, Ticket, int]] = []
    done: list[tuple[SampleRequest, Ticket, int, int]] = []
    versions: list[str] = []
    for number in range(50):
        engine.random_policy("p", seed=number)
        versions.append(engine.publish("p"))
        while len(running) < 16:
            request = SampleRequest(
                engine.ids("1+1="), SamplingParams(40), versions[-1], (len(done) + len(running),)
            )
            running.append((request, sampler.submit(request), number))
        for _ in range(5):
            sampler.step()
        done += [(*one, number) for one in running if one[1].outcome is not None]
        running = [one for one in running if one[1].outcome is None]
        if number >= 3:
            sampler.release(versions[number - 3])  # requests that run go on
    while not sampler.is_idle:
        sampler.step()
    done += [(*one, 49) for one in running]
    assert len(done) > 80
    assert sampler.generation.cache.sequences == 0
    assert len(sampler._adapters.resident()) <= 50
    assert sampler._adapters.statistics().pinned_bytes == 0
    for request, ticket, begun, ended in done:
        assert request.version == versions[begun]
        assert begun <= ended
        [(_, _, version)] = outcome(ticket)
        assert version == request.version
    with pytest.raises(UsageError, match="is not served"):
        sampler.sample([done[0][0]])
    for request, ticket, _, _ in done[::7]:
        number = versions.index(request.version)
        sampler.refresh(request.version, str(engine.scratch / f"v{number + 1}"), f"digest-{number + 1}")
        assert answer(sampler.sample([request])[0]) == outcome(ticket)


def test_sixteen_samples_then_release_does_not_block(engine: TinyEngine) -> None:
    version = engine.publish("p")
    request = SampleRequest(engine.ids("1+1="), SamplingParams(12), version, tuple(range(16)))
    ticket = engine.sampler.submit(request)
    engine.sampler.step()
    engine.sampler.release(version)
    while not engine.sampler.is_idle:
        engine.sampler.step()
    assert len(outcome(ticket)) == 16


def test_a_cancelled_request_leaves_nothing_and_the_others_alone(engine: TinyEngine) -> None:
    version = engine.publish("p")
    asked = [SampleRequest(engine.ids("1+1="), SamplingParams(20), version, (i,)) for i in range(6)]
    alone = [answer(engine.sampler.sample([request])[0]) for request in asked]
    tickets = [engine.sampler.submit(request) for request in asked]
    for _ in range(4):
        engine.sampler.step()
    engine.sampler.cancel(tickets[2])
    while not engine.sampler.is_idle:
        engine.sampler.step()
    assert isinstance(tickets[2].outcome, OpenTinkerError)
    assert [outcome(t) for i, t in enumerate(tickets) if i != 2] == [a for i, a in enumerate(alone) if i != 2]
    assert engine.sampler.generation.cache.sequences == 0
    assert engine.sampler._adapters.statistics().pinned_bytes == 0


def test_a_distribution_that_is_not_finite_fails_its_request_alone(engine: TinyEngine) -> None:
    fine = SampleRequest(engine.ids("1+1="), SamplingParams(8), BASE, (0,))
    alone = answer(engine.sampler.sample([fine])[0])
    broken = SampleRequest(engine.ids("1+1="), SamplingParams(8, temperature=1e-44), BASE, (0, 1))
    tickets = [engine.sampler.submit(request) for request in (broken, fine, broken)]
    while not engine.sampler.is_idle:
        engine.sampler.step()
    assert outcome(tickets[1]) == alone
    for ticket in (tickets[0], tickets[2]):
        assert "not finite" in str(ticket.outcome)


def test_logprobs_of_prompts_and_of_the_likeliest_tokens(engine: TinyEngine) -> None:
    version = engine.publish("p")
    prompt = engine.ids("12+34=")
    request = SampleRequest(
        prompt,
        SamplingParams(6, temperature=0.5, top_k=3),
        version,
        (0, 1),
        prompt_logprobs=True,
        top_logprobs=4,
    )
    first, second = engine.sampler.sample([request])[0]
    plain = engine.sampler.sample([replace(request, prompt_logprobs=False, top_logprobs=0)])[0]
    assert [s.tokens.tolist() for s in plain] == [first.tokens.tolist(), second.tokens.tolist()]
    assert plain[0].prompt_logprobs is None
    assert plain[0].top_tokens is None
    assert first.prompt_logprobs is not None
    assert first.top_tokens is not None
    assert first.top_logprobs is not None
    tokens = [*prompt, *first.tokens.tolist()]
    scored = SampleRequest(tuple(tokens), SamplingParams(1), version, (0,), prompt_logprobs=True)
    expected = engine.sampler.sample([scored])[0][0].prompt_logprobs
    assert expected is not None
    assert first.model_logprobs is not None
    assert expected[0] == 0
    assert len(expected) == len(tokens)
    np.testing.assert_allclose(first.prompt_logprobs, expected[: len(prompt)], atol=1e-5)
    np.testing.assert_allclose(first.model_logprobs, expected[len(prompt) :], atol=1e-5)
    assert first.top_tokens.shape == first.top_logprobs.shape == (6, 4)
    assert (np.diff(first.top_logprobs, axis=1) <= 0).all()
    rank = (first.top_tokens == first.tokens[:, None]).argmax(1)
    assert (rank < 3).all()
    np.testing.assert_allclose(first.top_logprobs[np.arange(6), rank], first.model_logprobs, atol=1e-6)
