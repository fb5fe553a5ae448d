"""Tensors as clients send them, dense or sparse (CSR), as dense read-only numpy arrays of int64 or float32.

A few bytes of a sparse tensor can ask for any amount of memory, so a request has a `Budget`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opentinker_core.errors import UsageError

MAX_ELEMENTS = 2**24
"""Elements of all dense arrays of one request."""
MAX_ARRAYS = 2**20
"""Arrays of one request, chunks of tokens too: an empty one takes a few bytes of a body, but more here."""


@dataclass
class Budget:
    """How many arrays and elements of them a request may still ask for."""

    left: int = MAX_ELEMENTS
    arrays: int = MAX_ARRAYS

    def take(self, field: str, elements: int) -> None:
        """Raise UsageError if there is not another array left with as many elements."""
        if not self.arrays:
            raise UsageError(f"{field}: too many arrays and chunks; accepted: {MAX_ARRAYS} in a request")
        self.arrays -= 1
        if elements > self.left:
            raise UsageError(
                f"{field}: {elements} elements are not accepted; "
                f"accepted: {MAX_ELEMENTS} in all arrays of a request together"
            )
        self.left -= elements


def from_bytes(field: str, data: bytes, dtype: str) -> np.ndarray:
    """Little-endian bytes as a flat array: `int64`, `int32` (widened), `float32`, `bfloat16` (widened).

    Raises:
        UsageError: they are not a whole number of entries.
    """
    stored = np.dtype("<u2" if dtype == "bfloat16" else dtype).newbyteorder("<")
    if len(data) % stored.itemsize:
        raise UsageError(
            f"{field}: {len(data)} bytes are not accepted; accepted: a multiple of {stored.itemsize}, "
            f"the size of {dtype}"
        )
    flat = np.frombuffer(data, stored)
    if dtype == "bfloat16":
        return (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.astype(np.int64) if dtype == "int32" else flat


def dense(field: str, flat: np.ndarray, shape: Sequence[int], budget: Budget) -> np.ndarray:
    """`flat` in `shape`; an empty shape is that of the flat array.

    Raises:
        UsageError: the shape has another number of elements, or more than two dimensions.
    """
    budget.take(field, flat.size)
    if not shape:
        return _read_only(flat)
    _check_shape(field, shape)
    elements = 1
    for length in shape:
        elements *= length
    if elements != flat.size:
        raise UsageError(
            f"{field}.shape: {list(shape)} is not accepted; accepted: a shape of {flat.size} elements, "
            "as many as were sent"
        )
    _check_lengths(field, shape)
    return _read_only(flat.reshape(shape))


def from_csr(
    field: str,
    values: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    shape: Sequence[int],
    budget: Budget,
) -> np.ndarray:
    """The dense array of a sparse one; what is not listed is 0.

    Args:
        values: of the listed entries.
        rows: int64 (R + 1,): where each row's entries begin, and the end.
        columns: int64, of the listed entries; rising in each row.

    Raises:
        UsageError: indices do not fit each other or the shape, or the array is too large.
    """
    _check_shape(field, shape)
    if len(shape) != 2:
        raise UsageError(f"{field}.shape: {list(shape)} is not accepted; accepted: two dimensions, if sparse")
    height, width = shape
    if len(rows) != height + 1:
        raise UsageError(
            f"{field}.crow_indices: {len(rows)} entries are not accepted; "
            f"accepted: {height + 1}, one more than rows"
        )
    budget.take(field, height * width)
    _check_lengths(field, shape)
    if len(columns) != len(values):
        raise UsageError(
            f"{field}.col_indices: {len(columns)} entries are not accepted; "
            f"accepted: {len(values)}, one a value"
        )
    if rows[0] != 0 or rows[-1] != len(values) or (rows[1:] < rows[:-1]).any():
        raise UsageError(
            f"{field}.crow_indices: {_shown(rows)} is not accepted; "
            f"accepted: from 0 to {len(values)}, never falling"
        )
    if ((columns < 0) | (columns >= width)).any():
        raise UsageError(
            f"{field}.col_indices: {_shown(columns)} is not accepted; accepted: 0 to {width - 1}"
        )
    places = np.repeat(np.arange(height) * width, np.diff(rows)) + columns
    if (places[1:] <= places[:-1]).any():
        raise UsageError(
            f"{field}.col_indices: {_shown(columns)} is not accepted; accepted: rising in each row"
        )
    array = np.zeros(height * width, values.dtype)
    array[places] = values
    return _read_only(array.reshape(height, width))


def _check_shape(field: str, shape: Sequence[int]) -> None:
    if len(shape) > 2 or any(length < 0 for length in shape):
        raise UsageError(
            f"{field}.shape: {list(shape[:4])!r:.80} is not accepted; accepted: one or two lengths"
        )


def _check_lengths(field: str, shape: Sequence[int]) -> None:
    """Raise UsageError if numpy has no such array, though it were empty."""
    if any(length > MAX_ELEMENTS for length in shape):
        raise UsageError(f"{field}.shape: {list(shape)} is not accepted; accepted: up to {MAX_ELEMENTS} each")


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def _shown(indices: np.ndarray) -> str:
    return f"{indices[:6].tolist()}" + ("..." if len(indices) > 6 else "")
