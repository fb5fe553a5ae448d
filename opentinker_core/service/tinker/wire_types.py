"""A request for losses and gradients as numpy arrays, however it was encoded.

Axes: N positions of a datum.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from opentinker_core.errors import UsageError

MAX_DATUMS = 16_384
"""Of a request; the SDK cuts batches at 1,024."""


@dataclass(frozen=True, eq=False)
class WireDatum:
    """One sequence as a client sent it; arrays are dense and read-only."""

    tokens_N: np.ndarray
    """int64: all chunks of the model input, end to end. Not yet compared with a vocabulary."""
    inputs: Mapping[str, np.ndarray]
    """By name: int64 or float32, of one or two dimensions."""

    @property
    def nbytes(self) -> int:
        """What the arrays take."""
        return self.tokens_N.nbytes + sum(array.nbytes for array in self.inputs.values())


@dataclass(frozen=True, eq=False)
class ForwardBackwardBody:
    """A request for losses and gradients, or (`forward_only`) for losses alone."""

    model_id: str
    seq_id: int
    data: tuple[WireDatum, ...]
    loss_fn: str
    config: Mapping[str, float | str]
    forward_only: bool
    digest: str
    """SHA-256 of the content in a canonical form: the same for every retry, however it was encoded."""

    @property
    def nbytes(self) -> int:
        """What the arrays take."""
        return sum(datum.nbytes for datum in self.data)


class ContentError(UsageError):
    """A request that says whose it is, but whose content is not accepted: its number is used up."""

    def __init__(self, model_id: str, seq_id: int, message: str) -> None:
        super().__init__(message)
        self.model_id, self.seq_id = model_id, seq_id


def assembled(
    number: tuple[str, int],
    data: tuple[WireDatum, ...],
    loss_fn: str,
    config: Mapping[str, float | str],
    forward_only: bool,
) -> ForwardBackwardBody:
    """The request with its digest."""
    digest = hashlib.sha256()

    def add(*parts: object) -> None:
        digest.update(json.dumps(parts).encode() + b"\n")

    add(*number, loss_fn, forward_only, sorted(config.items()), len(data))
    for datum in data:
        arrays = {"": datum.tokens_N, **dict(sorted(datum.inputs.items()))}
        for name, array in arrays.items():
            add(name, array.dtype.str, array.shape, array.nbytes)
            digest.update(np.ascontiguousarray(array).data)
    return ForwardBackwardBody(*number, data, loss_fn, config, forward_only, digest.hexdigest())


def checked_number(model_id: str, seq_id: int) -> tuple[str, int]:
    """Which request of which model it is.

    Raises:
        UsageError: it does not say.
    """
    if not model_id:
        raise UsageError("model_id: '' is not accepted; accepted: the id of a model")
    if seq_id < 1:
        raise UsageError(f"seq_id: {seq_id} is not accepted; accepted: 1, 2, 3, ... by model")
    return model_id, seq_id


def check_count(datums: int) -> None:
    """Raise UsageError unless a request may have as many."""
    if not 1 <= datums <= MAX_DATUMS:
        raise UsageError(f"data: {datums} datums are not accepted; accepted: 1 to {MAX_DATUMS}")
