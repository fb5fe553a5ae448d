"""A sample request in vLLM's words, and its answer in ours.

Axes: T sampled tokens, K likeliest tokens a position.
"""

from typing import Any

import numpy as np

from opentinker_core.errors import UsageError
from opentinker_core.sampling.distribution import is_truncated
from opentinker_core.sampling.protocol import SampledSequence, SampleRequest
from opentinker_core.sampling.vllm.endpoint import EndpointError
from opentinker_core.seeds import derive_seed
from opentinker_core.trajectories.types import StopReason

_PREFIX = "token_id:"
_LEAST_TEMPERATURE = 0.01


def check_request(request: SampleRequest, max_context: int) -> None:
    """Refuse what cannot be sampled, or not rightly.

    Raises:
        UsageError: no prompt, no room in the context, or logprobs that vLLM does not give.
    """
    if not request.prompt_tokens:
        raise UsageError("prompt_tokens: empty; accepted: at least one token")
    length, room = len(request.prompt_tokens), max_context - len(request.prompt_tokens)
    if room < 1:
        raise UsageError(f"prompt: {length} tokens; accepted: fewer than the context of {max_context}")
    if request.params.max_tokens > room:
        raise UsageError(
            f"max_tokens: {request.params.max_tokens} after a prompt of {length} tokens; "
            f"accepted: at most {room}, so that both fit the context of {max_context}"
        )
    if 0 < request.params.temperature < _LEAST_TEMPERATURE:
        raise UsageError(
            f"temperature: {request.params.temperature}, of which vLLM would make {_LEAST_TEMPERATURE}; "
            f"accepted: 0, or at least {_LEAST_TEMPERATURE}"
        )
    if request.prompt_logprobs or request.about_prompt is not None:
        name = "prompt_logprobs" if request.prompt_logprobs else "about_prompt"
        raise UsageError(
            f"{name}: vLLM's engine dies of prompts' logprobs when adapters are on; "
            "accepted: none, the trainer's `forward` scores prompts, or runtime.sampler: native"
        )
    if request.scaled_logprobs and is_truncated(request.params) and request.params.temperature > 0:
        raise UsageError(
            "scaled_logprobs: vLLM gives logprobs of the distribution that is sampled from alone; "
            "accepted: False, requests without top_p, top_k and min_p, or runtime.sampler: native"
        )
    if request.top_logprobs and not _is_plain(request):
        raise UsageError(
            f"top_logprobs: {request.top_logprobs}, and vLLM gives them of the distribution that is sampled "
            "from; accepted: 0, or requests at temperature 1 (or greedy) without top_p, top_k and min_p, "
            "or runtime.sampler: native"
        )


def to_body(request: SampleRequest, model: str, seed: int) -> dict[str, Any]:
    """The body of `/v1/completions` for one completion; it leaves nothing to the server's defaults."""
    params = request.params
    greedy = params.temperature == 0
    return {
        "model": model,
        "prompt": list(request.prompt_tokens),
        "n": 1,
        # A torch generator takes 64 bits, its CPU kind uses 32 of them: hashed, none is worse than another.
        "seed": derive_seed(seed, "vllm"),
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": 1.0 if greedy else params.top_p,
        "top_k": 0 if greedy else params.top_k,
        "min_p": 0.0 if greedy else params.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(params.stop_token_ids),
        "stop": list(params.stop),
        "include_stop_str_in_output": True,
        "ignore_eos": True,  # a stop token is one that the request names
        "skip_special_tokens": True,
        "logprobs": request.top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def to_sequence(request: SampleRequest, choice: dict[str, Any]) -> SampledSequence:
    """The completion that a choice of vLLM's answer describes.

    Raises:
        EndpointError: it was broken off, or is not as vLLM answers.
    """
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise EndpointError(f"vLLM broke a completion off: {reason}")
    try:
        tokens_T = np.array(choice["token_ids"], np.int32)
        given = choice["logprobs"]
        logprobs_T = np.array(given["token_logprobs"], np.float32)
    except (KeyError, TypeError, ValueError) as error:
        raise EndpointError("vLLM's answer has no token ids or no logprobs") from error
    if tokens_T.ndim != 1 or not len(tokens_T) or logprobs_T.shape != tokens_T.shape:
        raise EndpointError(f"vLLM's answer has {tokens_T.shape} token ids and {logprobs_T.shape} logprobs")
    logprobs_T = logprobs_T.clip(max=0.0)
    greedy = request.params.temperature == 0
    top_tokens, top_logprobs = None, None
    if request.top_logprobs:
        top_tokens, top_logprobs = _likeliest(given["top_logprobs"], request.top_logprobs)
    return SampledSequence(
        tokens_T,
        np.zeros_like(logprobs_T) if greedy else logprobs_T,
        StopReason(reason),
        request.version,
        model_logprobs=logprobs_T if _is_plain(request) else None,
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
        scaled_logprobs=logprobs_T if request.scaled_logprobs else None,
    )


def _is_plain(request: SampleRequest) -> bool:
    """Whether vLLM's logprobs are of the model's own distribution, as those of greedy rows are."""
    params = request.params
    plain = params.temperature == 1.0 and params.top_p == 1.0 and params.top_k == 0 and params.min_p == 0.0
    return plain or params.temperature == 0


def _likeliest(positions: list[dict[str, float]], count: int) -> tuple[np.ndarray, np.ndarray]:
    """(T, K) tokens and logprobs; vLLM adds the sampled token where it is not among the likeliest."""
    tokens, logprobs = [], []
    for position in positions:
        ranked = sorted(position.items(), key=lambda item: -item[1])[:count]
        tokens.append([int(token.removeprefix(_PREFIX)) for token, _ in ranked])
        logprobs.append([logprob for _, logprob in ranked])
    return np.array(tokens, np.int32), np.array(logprobs, np.float32)
