"""Checks of logprobs: of what was sampled, of the prompt, of the likeliest tokens."""

from typing import Any

import numpy as np

from opentinker_core.sampling.conformance.subject import (
    Completions,
    NotOfferedError,
    Subject,
    datum,
    near,
    offered,
    require,
    sample,
    serve,
)
from opentinker_core.sampling.protocol import BASE

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
    for version in (BASE, *serve(subject)):
        for shape in SHAPES:
            for prompt in subject.prompts:
                drawn = offered(subject, version, prompt, **shape) or []
                what = f"of {version} at {shape} are those of the reference"
                for one, truth in zip(drawn, _scored(subject, version, prompt, drawn, shape), strict=True):
                    near(one.logprobs, truth, subject.tolerance, f"logprobs {what}")
                for one, truth in zip(drawn, _scored(subject, version, prompt, drawn, {}), strict=True):
                    if one.model_logprobs is not None:
                        near(one.model_logprobs, truth, subject.tolerance, f"model_logprobs {what}")


def check_prompt_logprobs(subject: Subject) -> None:
    """The prompt's tokens are scored where that is asked for, and only there."""
    for version in (BASE, *serve(subject)):
        require(sample(subject, version)[0].prompt_logprobs is None, "prompts are scored only if asked for")
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
        require(sample(subject, version)[0].top_tokens is None, "top_tokens are given only if asked for")
        drawn = offered(subject, version, temperature=1.3, top_logprobs=3)
        if drawn is None:
            raise NotOfferedError("top_logprobs")
        (greedy,) = sample(subject, version, seeds=(1,), temperature=0.0)
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


def _scored(
    subject: Subject, version: str, prompt: tuple[int, ...], drawn: Completions, shape: dict[str, Any]
) -> list[np.ndarray]:
    """The reference's logprobs (T,) of each completion."""
    assert subject.score is not None
    datums = [datum(prompt, one.tokens.tolist(), shape) for one in drawn]
    logprobs = subject.score(version, datums) if datums else []
    return [own[one.mask_N] for own, one in zip(logprobs, datums, strict=True)]
