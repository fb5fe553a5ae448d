"""Samples on the wire: the SDK's JSON request to a `SampleRequest`, completions to the protobuf response.

Axes: P tokens of the prompt, T sampled tokens, K tokens a position.
"""

import secrets
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from tinker.proto import tinker_public_pb2 as proto
from tinker.types._pydantic_types.tensor_data import TensorData
from tinker.types.sample_request import SampleRequest as SampleBody
from tinker.types.sampling_params import SamplingParams as WireParams

from opentinker_core.errors import UsageError
from opentinker_core.runtime.engine import Engine
from opentinker_core.sampling.protocol import (
    BASE,
    PromptAnswer,
    PromptQuestion,
    SampledSequence,
    SampleRequest,
    SamplingParams,
)
from opentinker_core.service.sampling import check_temperature, ends_of, room_for, seeds_of
from opentinker_core.service.tinker.losses import LOSSES
from opentinker_core.trajectories.types import StopReason

MEDIA_TYPE = "application/x-protobuf"
MOST_SAMPLES = 2048
MOST_CELLS = 1 << 22
"""Logprobs beside those of the tokens themselves that one request may ask for."""
_LONGEST_STOP = 1024
_NO_LOGPROB = -99999.0
"""What the protocol has where a position has no likeliest tokens."""


@dataclass(frozen=True, eq=False)
class Targets:
    """The tokens whose logprobs at positions of the prompt are asked for, as the client laid them out."""

    shape: tuple[int, int]
    rows: tuple[tuple[int, ...], ...]
    """Of each row its listed tokens, filled up with -1."""
    counts: np.ndarray
    """How many each row lists."""
    csr: tuple[np.ndarray, np.ndarray] | None
    """Row pointers and columns, if the client sent a sparse tensor."""

    @classmethod
    def read(cls, tensor: TensorData, prompt_tokens: int) -> "Targets":
        """Read them.

        Raises:
            UsageError: they are not a tensor of int64, one row for each token of the prompt but the first.
        """
        name = "target_prompt_logprobs"
        shape = tensor.shape or []
        rows = prompt_tokens - 1
        if (
            tensor.dtype != "int64"
            or len(shape) != 2
            or not rows
            or shape[0] != rows
            or not 1 <= shape[1] < 2**31
        ):
            raise UsageError(f"{name}: {tensor.dtype} of shape {shape[:4]}; accepted: int64 [{rows}, K]")
        values = tensor.data
        if len(values) > MOST_CELLS or not all(isinstance(v, int) and -1 <= v < 2**31 for v in values):
            raise UsageError(f"{name}: accepted: up to {MOST_CELLS} token ids, or -1")
        counts, csr = _layout(tensor, (shape[0], shape[1]), len(values))
        if all(value == -1 for value in values):
            raise UsageError(f"{name}: names no token; accepted: at least one")
        width = int(counts.max())
        if width * shape[0] > MOST_CELLS:
            raise UsageError(f"{name}: up to {width} a row; accepted: {MOST_CELLS} cells in all")
        starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
        listed = [[int(value) for value in values[a:b]] for a, b in pairwise(starts)]
        filled = tuple((*row, *[-1] * (width - len(row))) for row in listed)
        return cls((shape[0], shape[1]), filled, counts, csr)

    def write(self, logprobs_PK: np.ndarray) -> "proto.Tensor":
        """Logprobs of the cells of `rows`, laid out as the client's tensor."""
        listed = np.arange(logprobs_PK.shape[1]) < self.counts[:, None]
        values = logprobs_PK[listed].astype("<f4").tobytes()
        tensor = proto.Tensor(dtype=proto.DTYPE_FLOAT32, shape=self.shape)
        if self.csr is None:
            tensor.dense = values
        else:
            rows, columns = (part.astype("<i8").tobytes() for part in self.csr)
            tensor.sparse_csr.CopyFrom(proto.SparseCsr(values=values, crow_indices=rows, col_indices=columns))
        return tensor


def _layout(
    tensor: TensorData, shape: tuple[int, int], values: int
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
    """How many cells each row lists, and the CSR indices of a sparse tensor."""
    if tensor.sparse_crow_indices is None or tensor.sparse_col_indices is None:
        if values != shape[0] * shape[1]:
            raise UsageError(f"target_prompt_logprobs: {values} values for shape {list(shape)}")
        return np.full(shape[0], shape[1]), None
    if max(map(abs, [*tensor.sparse_crow_indices, *tensor.sparse_col_indices]), default=0) >= 2**31:
        raise UsageError("target_prompt_logprobs: an index is too large; accepted: below 2**31")
    rows, columns = np.array(tensor.sparse_crow_indices), np.array(tensor.sparse_col_indices, np.int64)
    fits = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(columns) == values
    if not fits or (np.diff(rows) < 0).any() or (columns < 0).any() or (columns >= shape[1]).any():
        raise UsageError(f"target_prompt_logprobs: indices do not fit shape {list(shape)}; accepted: CSR")
    return np.diff(rows), (rows, columns)


@dataclass(frozen=True, eq=False)
class Sample:
    """A request of the SDK, ready to be sampled, and what is needed to answer it."""

    request: SampleRequest
    scored_from: int
    """The first position of the prompt whose logprobs are wanted."""
    targets: Targets | None

    @classmethod
    def read(cls, body: SampleBody, engine: Engine) -> "Sample":
        """Read a request for an engine.

        Raises:
            UsageError: it asks for what is not served.
        """
        prompt = _prompt(body)
        if not 1 <= body.num_samples <= MOST_SAMPLES:
            raise UsageError(f"num_samples: {body.num_samples}; accepted: 1 to {MOST_SAMPLES}")
        if body.record_stability_info:
            raise UsageError(
                "record_stability_info: not supported, nor is the loss stable_reinforce that needs it; "
                f"accepted: false, with another loss_fn: {', '.join(LOSSES)}"
            )
        params = _params(body.sampling_params, engine, len(prompt))
        _check_context(len(prompt), params.max_tokens, engine.max_context)
        seed = secrets.randbits(63) if body.sampling_params.seed is None else body.sampling_params.seed
        vocabulary = engine.vocabulary
        _check_cells(body, len(prompt), params.max_tokens)
        targets = None
        if body.target_prompt_logprobs is not None:
            targets = Targets.read(body.target_prompt_logprobs, len(prompt))
        question = PromptQuestion(
            likeliest=min(body.topk_prompt_logprobs, vocabulary),
            targets=targets.rows if targets else (),
            drawn=body.prompt_alt_tokens_k,
        )
        request = SampleRequest(
            prompt,
            params,
            BASE,
            seeds_of(seed, body.num_samples),
            prompt_logprobs=bool(body.prompt_logprobs),
            top_logprobs=min(body.topk_sample_logprobs, vocabulary),
            scaled_logprobs=True,
            about_prompt=None if question == PromptQuestion() else question,
        )
        return cls(request, _scored_from(body, len(prompt)), targets)

    def write(self, sequences: list[SampledSequence]) -> bytes:
        """The protobuf `SampleResponse`."""
        request, first = self.request, sequences[0]
        response = proto.SampleResponse(
            sequences=[_sequence(one, request.params.temperature) for one in sequences]
        )
        if first.prompt_logprobs is not None:
            logprobs_P = first.prompt_logprobs.astype("<f4")
            logprobs_P[: self.scored_from] = np.nan
            response.prompt_logprobs = logprobs_P.tobytes()
        if request.about_prompt is not None:
            self._answer(response, request.about_prompt, first.about_prompt or PromptAnswer())
        return response.SerializeToString()

    def _answer(
        self, response: "proto.SampleResponse", question: PromptQuestion, answer: PromptAnswer
    ) -> None:
        if question.likeliest:
            response.topk_prompt_logprobs.CopyFrom(self._likeliest(question.likeliest, answer))
        if self.targets is not None and answer.target_logprobs is not None:
            response.target_prompt_logprobs.CopyFrom(self.targets.write(answer.target_logprobs))
        if question.drawn:
            shape = (len(self.request.prompt_tokens) - 1, question.drawn)
            drawn = (answer.drawn_tokens, answer.drawn_logprobs)
            tokens, logprobs = (np.zeros(shape) if part is None else part for part in drawn)
            response.prompt_alt_tokens.CopyFrom(
                proto.PromptAltTokens(
                    tokens=_tensor(tokens, "<i8", proto.DTYPE_INT64),
                    logprobs=_tensor(logprobs, "<f4", proto.DTYPE_FLOAT32),
                )
            )

    def _likeliest(self, count: int, answer: PromptAnswer) -> "proto.TopkLogprobs":
        """One row for each token of the prompt; those that are not scored are empty."""
        length = len(self.request.prompt_tokens)
        tokens_PK = np.zeros((length, count), np.int32)
        logprobs_PK = np.full((length, count), _NO_LOGPROB, np.float32)
        if answer.likeliest_tokens is not None and answer.likeliest_logprobs is not None:
            tokens_PK[self.scored_from :] = answer.likeliest_tokens[self.scored_from - 1 :]
            logprobs_PK[self.scored_from :] = answer.likeliest_logprobs[self.scored_from - 1 :]
        return _topk(tokens_PK, logprobs_PK)


def _prompt(body: SampleBody) -> tuple[int, ...]:
    """The prompt's tokens, all chunks end to end."""
    tokens: list[int] = []
    for chunk in body.prompt.chunks:
        if chunk.type != "encoded_text":
            raise UsageError(f"prompt.chunks: type {chunk.type!r} is not supported; accepted: encoded_text")
        tokens += chunk.tokens
    if not tokens:
        raise UsageError("prompt: empty; accepted: at least one token")
    return tuple(tokens)


def _params(wire: WireParams, engine: Engine, prompt_tokens: int) -> SamplingParams:
    if wire.top_k < -1:
        raise UsageError(f"top_k: {wire.top_k}; accepted: -1 (no limit), or at least 1")
    ids, strings = _stops(wire, engine)
    return SamplingParams(
        max_tokens=room_for(engine, prompt_tokens) if wire.max_tokens is None else wire.max_tokens,
        temperature=check_temperature(wire.temperature),
        top_p=wire.top_p,
        top_k=max(0, wire.top_k),
        stop_token_ids=ids,
        stop=strings,
    )


def _stops(wire: WireParams, engine: Engine) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Token ids and strings that end a completion: the end of sequence too, unless the list is empty."""
    stop = [wire.stop] if isinstance(wire.stop, str) else wire.stop
    if stop is None:
        return ends_of(engine), ()
    if len(stop) > 64 or any(isinstance(one, str) and not 1 <= len(one) <= _LONGEST_STOP for one in stop):
        raise UsageError(
            f"stop: accepted: up to 64 token ids or strings, each of 1 to {_LONGEST_STOP} characters"
        )
    ids = [one for one in stop if isinstance(one, int)]
    strings = [one for one in stop if isinstance(one, str)]
    special = engine.tokenizer.get_added_vocab()  # no part of what a completion's text shows
    ids += [special[text] for text in strings if text in special]
    ends = ends_of(engine) if stop else ()
    return tuple(dict.fromkeys([*ids, *ends])), tuple(text for text in strings if text not in special)


def _check_context(prompt_tokens: int, max_tokens: int, context: int) -> None:
    """Refuse at once what does not fit, in words by which clients know that they may shorten the prompt."""
    if prompt_tokens + max_tokens > context:
        room = context - prompt_tokens
        accepted = f"max_tokens up to {room}" if room > 0 else f"a prompt of fewer than {context} tokens"
        raise UsageError(
            "max_tokens: prompt length plus max_tokens exceeds the model's context window: "
            f"{prompt_tokens} prompt tokens + {max_tokens} max_tokens > {context}; accepted: {accepted}"
        )


def _check_cells(body: SampleBody, prompt_tokens: int, max_tokens: int) -> None:
    for name, count, positions in (
        ("topk_prompt_logprobs", body.topk_prompt_logprobs, prompt_tokens),
        ("prompt_alt_tokens_k", body.prompt_alt_tokens_k, prompt_tokens),
        ("topk_sample_logprobs", body.topk_sample_logprobs, max_tokens * body.num_samples),
    ):
        if count < 0 or count * positions > MOST_CELLS:
            raise UsageError(
                f"{name}: {count} at up to {positions} positions; accepted: 0 to {MOST_CELLS // positions}"
            )


def _scored_from(body: SampleBody, prompt_tokens: int) -> int:
    last = body.prompt_logprobs_last_n
    if last is None:
        return 1
    if not body.prompt_logprobs or not 1 <= last < prompt_tokens:
        raise UsageError(
            f"prompt_logprobs_last_n: {last} with prompt_logprobs {body.prompt_logprobs}; accepted: with "
            f"prompt_logprobs, 1 to {prompt_tokens - 1}"
        )
    return prompt_tokens - last


def _sequence(sequence: SampledSequence, temperature: float) -> "proto.SampledSequence":
    """One completion, with logprobs at the request's temperature, without truncation."""
    stopped = sequence.stop_reason is StopReason.STOP
    own_T = sequence.logprobs if sequence.scaled_logprobs is None else sequence.scaled_logprobs
    message = proto.SampledSequence(
        stop_reason=proto.STOP_REASON_STOP if stopped else proto.STOP_REASON_LENGTH,
        tokens=sequence.tokens.astype("<i4").tobytes(),
        logprobs=own_T.astype("<f4").tobytes(),
    )
    if sequence.top_tokens is not None and sequence.top_logprobs is not None:
        top_TK = sequence.top_logprobs.astype(np.float64)
        if temperature not in (0, 1) and sequence.model_logprobs is not None:
            # Logprobs at a temperature are those at 1, divided by it, less what all tokens have in common.
            model_T1 = sequence.model_logprobs.astype(np.float64)[:, None]
            top_TK = np.minimum(0.0, (top_TK - model_T1) / temperature + own_T[:, None])
        message.topk_sampled_logprobs.CopyFrom(_topk(sequence.top_tokens, top_TK))
    return message


def _topk(tokens: np.ndarray, logprobs: np.ndarray) -> "proto.TopkLogprobs":
    return proto.TopkLogprobs(
        token_ids=tokens.astype("<i4").tobytes(),
        logprobs=logprobs.astype("<f4").tobytes(),
        k=tokens.shape[1],
        length=tokens.shape[0],
    )


def _tensor(values: np.ndarray, dtype: str, wire_dtype: "proto.DType.ValueType") -> "proto.Tensor":
    return proto.Tensor(dense=values.astype(dtype).tobytes(), dtype=wire_dtype, shape=values.shape)
