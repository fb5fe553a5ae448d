"""Checks of logprobs: of what was sampled, of the prompt, of the likeliest tokens."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from opentinker_core.sampling.conformance.subject import (
    LENGTH,
    NotOfferedError,
    Subject,
    answer,
    datum,
    near,
    offered,
    require,
    sample,
    serve,
)
from opentinker_core.sampling.protocol import (
    BASE,
    PromptAnswer,
    PromptQuestion,
    SampledSequence,
    SampleRequest,
    SamplingParams,
)

SHAPES: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.4},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.8},
)


def check_logprobs(subject: Subject) -> None:
    """Logprobs are of the distribution that was sampled, at every temperature and truncation."""
    if subject.score is None:
        raise NotOfferedError("score: no reference was given")
    versions = (BASE, *serve(subject))
    for version, drawn in _at_all_shapes(subject, versions, subject.prompts).items():
        for one, truth in zip(drawn, _scored(subject, version, drawn), strict=True):
            what = f"of {version} at {one.shape} are those of the reference"
            near(one.sequence.logprobs, truth, subject.tolerance, f"logprobs {what}")
        told = [one for one in drawn if one.sequence.model_logprobs is not None]
        plain = [replace(one, shape={}) for one in told]
        for one, truth in zip(told, _scored(subject, version, plain), strict=True):
            given = one.sequence.model_logprobs
            assert given is not None
            what = f"of {version} at {one.shape} are those of the reference"
            near(given, truth, subject.tolerance, f"model_logprobs {what}")


def check_prompt_logprobs(subject: Subject) -> None:
    """The prompt's tokens are scored where that is asked for, and only there."""
    for version in (BASE, *serve(subject)):
        unasked = sample(subject, version, max_tokens=1)[0].prompt_logprobs
        require(unasked is None, "prompts are scored only if asked for")
        for prompt in subject.prompts:
            drawn = offered(subject, version, prompt, prompt_logprobs=True)
            if drawn is None:
                raise NotOfferedError("prompt_logprobs")
            for one in drawn:
                given = np.array([]) if one.prompt_logprobs is None else one.prompt_logprobs
                require(given.shape == (len(prompt),), "prompt_logprobs are (P,) where asked for")
                require(given.dtype == np.float32 and given[0] == 0, "they are float32 and begin with 0")
                if subject.score is not None:
                    (truth,) = subject.score(version, [datum(prompt, (), {})])
                    near(given[1:], truth, subject.tolerance, "prompt_logprobs are those of the reference")


def check_top_logprobs(subject: Subject) -> None:
    """The likeliest tokens at each position, in order, at temperature 1 whatever the sampling."""
    for version in (BASE, *serve(subject)):
        unasked = sample(subject, version, max_tokens=1)[0].top_tokens
        require(unasked is None, "top_tokens are given only if asked for")
        drawn = offered(subject, version, temperature=1.3, top_logprobs=3)
        if drawn is None:
            raise NotOfferedError("top_logprobs")
        (greedy,) = sample(subject, version, seeds=(1,), temperature=0.0, max_tokens=1)
        for one in drawn:
            tokens, logprobs = one.top_tokens, one.top_logprobs
            shape = (len(one.tokens), 3)
            if tokens is None or logprobs is None or not tokens.shape == logprobs.shape == shape:
                require(False, "top_tokens and top_logprobs are (T, k) where asked for")
                return
            require(tokens.dtype == np.int32 and logprobs.dtype == np.float32, "they are int32 and float32")
            require(bool((np.diff(logprobs, axis=1) <= 0).all()), "the likeliest comes first")
            require(int(greedy.tokens[0]) == int(tokens[0, 0]), "the first of them is what greedy takes")
            if one.model_logprobs is not None:
                hit = tokens == one.tokens[:, None]
                expected = np.broadcast_to(one.model_logprobs[:, None], shape)[hit]
                near(logprobs[hit], expected, 1e-5, "a sampled token's top_logprob is its model_logprob")


def check_scaled_logprobs(subject: Subject) -> None:
    """Logprobs at the request's temperature without truncation, where that is asked for, and only there."""
    versions = (BASE, *serve(subject))
    for version in versions:
        unasked = sample(subject, version, max_tokens=1)[0].scaled_logprobs
        require(unasked is None, "they are given only if asked for")
        if offered(subject, version, max_tokens=1, scaled_logprobs=True) is None:
            raise NotOfferedError("scaled_logprobs")
    prompts = subject.prompts[:1]
    for version, drawn in _at_all_shapes(subject, versions, prompts, scaled_logprobs=True).items():
        scales = [{"temperature": one.shape.get("temperature", 1.0)} for one in drawn]
        truths = [one.sequence.logprobs for one in drawn]
        if subject.score is not None:
            scaled = [replace(one, shape=scale) for one, scale in zip(drawn, scales, strict=True)]
            truths = _scored(subject, version, scaled)
        for one, scale, truth in zip(drawn, scales, truths, strict=True):
            if subject.score is None and one.shape != scale:
                continue
            given = one.sequence.scaled_logprobs
            given = np.array([]) if given is None else given
            near(given, truth, subject.tolerance, f"scaled_logprobs at {one.shape} are the reference's")


def check_prompt_questions(subject: Subject) -> None:
    """What is asked about a prompt is answered by every completion, and changes nothing of them."""
    for version in (BASE, *serve(subject)):
        for prompt in subject.prompts:
            rows = len(prompt) - 1
            question = PromptQuestion(2, tuple((token, -1) for token in prompt[1:]), 3)
            drawn = offered(subject, version, prompt, about_prompt=question)
            if drawn is None:
                raise NotOfferedError("about_prompt")
            for one, other in zip(drawn, sample(subject, version, prompt), strict=True):
                require(np.array_equal(one.tokens, other.tokens), "questions do not change what is sampled")
                answer = one.about_prompt or PromptAnswer()
                shapes = {name: getattr(part, "shape", None) for name, part in vars(answer).items()}
                expected = {"likeliest": (rows, 2), "target": (rows, 2), "drawn": (rows, 3)}
                fits = all(shape == expected[name.partition("_")[0]] for name, shape in shapes.items())
                require(fits, f"answers are (P - 1, K), not {shapes}")
                _check_answer(subject, version, prompt, answer)


def _check_answer(subject: Subject, version: str, prompt: tuple[int, ...], answer: PromptAnswer) -> None:
    targets, likeliest = answer.target_logprobs, answer.likeliest_logprobs
    assert targets is not None
    assert likeliest is not None
    require(bool((targets[:, 1] == 0).all()), "where no target is asked, there is 0")
    require(bool((np.diff(likeliest, axis=1) <= 0).all()), "the likeliest comes first")
    require(bool((likeliest[:, 0] >= targets[:, 0] - 1e-6).all()), "nothing is likelier than the likeliest")
    if subject.score is not None:
        (truth,) = subject.score(version, [datum(prompt, (), {})])
        near(targets[:, 0], truth, subject.tolerance, "target_logprobs are those of the reference")


@dataclass(frozen=True)
class _Drawn:
    """A completion, and what it was drawn with."""

    prompt: tuple[int, ...]
    shape: dict[str, Any]
    sequence: SampledSequence


def _at_all_shapes(
    subject: Subject, versions: Sequence[str], prompts: Sequence[tuple[int, ...]], **options: Any
) -> dict[str, list[_Drawn]]:
    """Completions of all prompts in each of `SHAPES` that is offered, by their version; drawn all at once."""
    probe: dict[str, Any] = {"max_tokens": 1, "seeds": (1,), **options}
    shapes = [shape for shape in SHAPES if offered(subject, versions[0], **probe, **shape)]
    asked = [(version, shape, prompt) for version in versions for shape in shapes for prompt in prompts]
    requests = [
        SampleRequest(prompt, SamplingParams(LENGTH, **shape), version, (1, 2), **options)
        for version, shape, prompt in asked
    ]
    drawn: dict[str, list[_Drawn]] = {version: [] for version in versions}
    for (version, shape, prompt), completions in zip(asked, answer(subject, requests), strict=True):
        drawn[version] += [_Drawn(prompt, shape, one) for one in completions]
    return drawn


def _scored(subject: Subject, version: str, drawn: Sequence[_Drawn]) -> list[np.ndarray]:
    """The reference's logprobs (T,) of each completion, at the shape that stands beside it."""
    assert subject.score is not None
    rows = defaultdict(list)  # a reference takes those of one shape at a time
    for place, one in enumerate(drawn):
        rows[tuple(one.shape.items())].append((place, one))
    truths: dict[int, np.ndarray] = {}
    for shape, alike in rows.items():
        datums = [datum(one.prompt, one.sequence.tokens.tolist(), dict(shape)) for _, one in alike]
        for (place, _), own, row in zip(alike, subject.score(version, datums), datums, strict=True):
            truths[place] = own[row.mask_N]
    return [truths[place] for place in range(len(drawn))]
