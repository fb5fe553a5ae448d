"""Checks of what is drawn: completions, seeds, company, limits and stops."""

from typing import Any

import numpy as np

from opentinker_core.sampling.conformance.subject import (
    LENGTH,
    Comparison,
    NotOfferedError,
    Subject,
    answer,
    cut,
    near,
    offered,
    require,
    sample,
    sample_each,
    serve,
)
from opentinker_core.sampling.protocol import BASE, SampleRequest, SamplingParams
from opentinker_core.trajectories.types import StopReason


def check_shapes(subject: Subject) -> None:
    """A completion a seed, in order; types, lengths, finite logprobs of at most 0, the version asked for."""
    versions = (BASE, *serve(subject))
    single = sample_each(subject, versions, seeds=(7,))
    several = sample_each(subject, versions, seeds=(1, 2, 3, 4))
    for version in versions:
        for one in (*single[version], *several[version]):
            n = len(one.tokens)
            require(one.tokens.dtype == np.int32 and one.tokens.shape == (n,), "tokens are int32 (T,)")
            require(one.logprobs.dtype == np.float32, "logprobs are float32")
            require(one.logprobs.shape == (n,), "there is a logprob a token")
            require(bool(np.isfinite(one.logprobs).all()), "logprobs are finite")
            require(bool((one.logprobs <= 0).all()), "logprobs are at most 0")
            require(one.version == version, "a completion names the version that was asked for")
            require(
                n == LENGTH and one.stop_reason is StopReason.LENGTH, "without stops max_tokens are sampled"
            )
            if one.model_logprobs is not None:
                near(one.model_logprobs, one.logprobs, 1e-5, "plain sampling is from the model itself")
    require(subject.sampler.sample([]) == [], "no requests have no answers")


def check_seeds(subject: Subject) -> None:
    """A seed gives the same completion again, whatever seeds are asked for beside it; others give others."""
    same, seeds, versions = Comparison(subject).same, (5, 6, 7, 8), (BASE, *serve(subject))
    first, again, backwards = (
        sample_each(subject, versions, seeds=order) for order in (seeds, seeds, seeds[::-1])
    )
    requests = [
        SampleRequest(subject.prompts[0], SamplingParams(LENGTH), version, (seed,))
        for version in versions
        for seed in seeds
    ]
    single = iter(answer(subject, requests))
    for version in versions:
        same(first[version], again[version], "equal requests have equal answers")
        same(first[version], backwards[version][::-1], "the order of seeds does not matter")
        apart = [next(single)[0] for _ in seeds]
        same(first[version], apart, "a seed in a request of its own gives what it gives among others")
        alone = sample(subject, version, seeds=seeds[-1:])
        same(first[version][-1:], alone, "a seed alone gives what it gives among others")
        different = {tuple(one.tokens.tolist()) for one in first[version]}
        require(len(different) > 1, "different seeds draw differently")


def check_company(subject: Subject) -> None:
    """Completions do not depend on what is sampled beside them: versions, the base, lengths, parameters."""
    generator, same = np.random.default_rng(0), Comparison(subject).same
    kinds = [
        (version, prompt, 2 + 3 * place, 0.7 + 0.3 * place)
        for version in (BASE, *serve(subject))
        for place, prompt in enumerate(subject.prompts)
    ]
    requests = [
        SampleRequest(prompt, SamplingParams(tokens, temperature), version, (seed, seed + 1))
        for seed, (version, prompt, tokens, temperature) in enumerate(kinds)
    ]
    alone = [answer(subject, [request])[0] for request in requests]
    for size in (len(requests), *generator.integers(2, len(requests) + 1, 4)):
        chosen = generator.permutation(len(requests))[:size]
        together = answer(subject, [requests[i] for i in chosen])
        for index, completions in zip(chosen, together, strict=True):
            promise = f"a request of {requests[index].version} is answered as if it were alone"
            same(alone[index], completions, promise)


def check_frequencies(subject: Subject) -> None:
    """Tokens are drawn as often as their logprobs say."""
    count, version = 400, serve(subject)[0]
    for temperature in (1.0, 0.7):
        drawn = sample(subject, version, seeds=tuple(range(count)), max_tokens=1, temperature=temperature)
        tokens = np.array([one.tokens[0] for one in drawn])
        for token in np.unique(tokens):
            p = float(np.exp(next(one.logprobs[0] for one in drawn if one.tokens[0] == token)))
            deviation = np.sqrt(max(p * (1 - p), 1 / count) / count)
            off = abs(float((tokens == token).mean()) - p) / deviation
            require(
                off < 5, f"at temperature {temperature} token {token} is drawn with its probability, {p:.3f}"
            )


def check_greedy(subject: Subject) -> None:
    """Temperature 0 takes the likeliest tokens whatever the seed, with logprobs of 0."""
    same = Comparison(subject).same
    for version in (BASE, *serve(subject)):
        one, other = sample(subject, version, seeds=(1, 2), temperature=0.0)
        same([one], [other], "greedy completions do not depend on the seed")
        require(not one.logprobs.any(), "greedy tokens have logprob 0")
        if narrow := offered(subject, version, seeds=(3,), top_k=1):
            require(np.array_equal(narrow[0].tokens, one.tokens), "greedy is sampling with top_k 1")


def check_truncation(subject: Subject) -> None:
    """top_k, top_p and min_p leave only the likeliest tokens."""
    version, lacking = serve(subject)[0], list[str]()
    for name, value, allowed in (("top_k", 2, 2), ("top_p", 1e-6, 1), ("min_p", 1.0, 1)):
        options: dict[str, Any] = {name: value, "temperature": 1.5, "max_tokens": 1}
        drawn = offered(subject, version, seeds=tuple(range(40)), **options)
        if drawn is None:
            lacking.append(name)
            continue
        different = {int(one.tokens[0]): float(one.logprobs[0]) for one in drawn}
        require(len(different) <= allowed, f"{name} {value:g} leaves {allowed} tokens at most")
        total = float(np.exp(list(different.values())).sum())
        complete = len(different) < allowed or abs(total - 1) < 1e-3
        require(complete, f"with {name} the probabilities of what is left add up to 1")
    if lacking:
        raise NotOfferedError(", ".join(lacking))


def check_max_tokens(subject: Subject) -> None:
    """A shorter limit gives the beginning of what a longer one gives."""
    same, versions = Comparison(subject).same, (BASE, *serve(subject))
    long = sample_each(subject, versions, max_tokens=6)
    for tokens in (1, 4):
        short = sample_each(subject, versions, max_tokens=tokens)
        for version in versions:
            begun = [cut(one, tokens) for one in long[version]]
            same(begun, short[version], "a limit cuts, and changes nothing else")


def check_stop_tokens(subject: Subject) -> None:
    """Generation ends with the first of the stop tokens, which belongs to the completion."""
    same, version, seeds = Comparison(subject).same, serve(subject)[0], tuple(range(6))
    free = sample(subject, version, seeds=seeds, max_tokens=12)
    stops = (int(free[0].tokens[3]), int(free[1].tokens[0]))
    stopped = sample(subject, version, seeds=seeds, max_tokens=12, stop_token_ids=stops)
    for one, other in zip(free, stopped, strict=True):
        hits = np.flatnonzero(np.isin(one.tokens, stops))
        length = int(hits[0]) + 1 if len(hits) else len(one.tokens)
        same([cut(one, length)], [other], "a stop token ends the completion and belongs to it")
        reason = StopReason.STOP if len(hits) else StopReason.LENGTH
        require(other.stop_reason is reason, f"a completion that ends so has the stop reason {reason}")


def check_stop_strings(subject: Subject) -> None:
    """Generation ends with the token that makes the text contain a stop string; no token is cut."""
    if subject.decode is None:
        raise NotOfferedError("decode: none was given")
    same, version, seeds = Comparison(subject).same, serve(subject)[0], tuple(range(6))
    free = sample(subject, version, seeds=seeds, max_tokens=12)
    texts = [[subject.decode(one.tokens[:n].tolist()) for n in range(1, 13)] for one in free]
    stop = next((text[3][len(text[1]) :] for text in texts if text[3][len(text[1]) :].strip()), None)
    if stop is None:
        raise NotOfferedError("stop: nothing with a text was sampled")
    stopped = offered(subject, version, seeds=seeds, max_tokens=12, stop=(stop,))
    if stopped is None:
        raise NotOfferedError("stop")
    for one, text, other in zip(free, texts, stopped, strict=True):
        length = next((n for n, so_far in enumerate(text, start=1) if stop in so_far), None)
        begun = [cut(one, length or 12)]
        same(begun, [other], f"the token that completes the stop string {stop!r} ends the completion")
        reason = StopReason.LENGTH if length is None else StopReason.STOP
        require(other.stop_reason is reason, f"a completion that ends so has the stop reason {reason}")
