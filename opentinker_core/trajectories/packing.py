"""Which sequences go through the model together, and the arrays of such a batch.

Axes: B rows, N positions of the longest row, D datums of the batch. Padding is known by length alone,
never by a token id, so a pad id that equals a real token is harmless.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opentinker_core.trajectories.errors import TrajectoryError
from opentinker_core.trajectories.types import Datum

PADDING = -1
"""The segment id and the datum index of positions that belong to no datum."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one or more datums each, side by side; arrays are (B, N), indexed by target like a datum's."""

    input_tokens_BN: np.ndarray
    """int64; the pad id after a row's end."""
    target_tokens_BN: np.ndarray
    mask_BN: np.ndarray
    """bool: positions whose target carries the signal."""
    signal_BN: np.ndarray
    """float32: weights if `supervised`, else advantages."""
    sampler_logprobs_BN: np.ndarray
    """float32; 0 if `supervised`."""
    token_scales_BN: np.ndarray
    """float32: the normalizer's factor of each trained token (1 if none was given)."""
    datum_BN: np.ndarray
    """int64: index of the datum a position belongs to, `PADDING` after a row's end."""
    segment_BN: np.ndarray
    """int64: 0, 1, ... within a row; `PADDING` after its end."""
    position_BN: np.ndarray
    """int64: position within the segment; 0 after a row's end."""
    lengths_B: np.ndarray
    temperature_D: np.ndarray
    top_p_D: np.ndarray
    top_k_D: np.ndarray
    supervised: bool

    @property
    def attention(self) -> np.ndarray:
        """bool (B, N): real positions; what a padded batch passes as the attention mask."""
        return self.segment_BN != PADDING

    @property
    def packed(self) -> bool:
        """Whether a row holds several datums, so that attention must be block-diagonal."""
        return bool((self.segment_BN > 0).any())

    def attention_matrix(self) -> np.ndarray:
        """bool (B, N, N): block-diagonal and causal, true where position i may see position j <= i.

        Padding sees itself alone: a row without any visible key would make softmax return NaN.
        """
        same_BNN = self.segment_BN[:, :, None] == self.segment_BN[:, None, :]
        causal_NN = np.tri(self.segment_BN.shape[1], dtype=bool)
        real_BN1 = self.attention[:, :, None]
        return same_BNN & causal_NN & real_BN1 | np.eye(len(causal_NN), dtype=bool)


def micro_batches(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Split rows so that rows x longest row <= `budget_tokens`; a single longer row stands alone.

    Deterministic: rows are taken from long to short, equal lengths in the order given.

    Raises:
        TrajectoryError: a length or the budget is not positive.
    """
    groups: list[list[int]] = []
    for index in _longest_first(lengths, budget_tokens):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= budget_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def pack(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """First-fit decreasing: rows of indices whose lengths sum to <= `budget_tokens`.

    A single longer sequence has a row of its own. Deterministic like `micro_batches`.

    Raises:
        TrajectoryError: a length or the budget is not positive.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for index in _longest_first(lengths, budget_tokens):
        fitting = next((row for row, room in enumerate(free) if lengths[index] <= room), None)
        if fitting is None:
            rows.append([index])
            free.append(budget_tokens - lengths[index])
        else:
            rows[fitting].append(index)
            free[fitting] -= lengths[index]
    return rows


def pad(
    datums: Sequence[Datum], token_scales: Sequence[np.ndarray] | None = None, *, pad_id: int = 0
) -> Batch:
    """A batch of one datum a row.

    `token_scales`: one (N,) array a datum, from `objectives.normalizers.token_scales`.
    """
    return arrange(datums, [[index] for index in range(len(datums))], token_scales, pad_id=pad_id)


def arrange(
    datums: Sequence[Datum],
    rows: Sequence[Sequence[int]],
    token_scales: Sequence[np.ndarray] | None = None,
    *,
    pad_id: int = 0,
) -> Batch:
    """A batch whose row b holds the datums `rows[b]`, one after another (see `pack`).

    Raises:
        TrajectoryError: a datum is in no row or in several, supervised and RL datums are mixed, or
            `token_scales` does not fit.
    """
    _check_arrangement(datums, rows, token_scales)
    lengths_B = np.array([sum(len(datums[index]) for index in row) for row in rows], dtype=np.int64)
    shape = (len(rows), int(lengths_B.max()))
    batch = Batch(
        input_tokens_BN=np.full(shape, pad_id, dtype=np.int64),
        target_tokens_BN=np.full(shape, pad_id, dtype=np.int64),
        mask_BN=np.zeros(shape, dtype=bool),
        signal_BN=np.zeros(shape, dtype=np.float32),
        sampler_logprobs_BN=np.zeros(shape, dtype=np.float32),
        token_scales_BN=np.zeros(shape, dtype=np.float32),
        datum_BN=np.full(shape, PADDING, dtype=np.int64),
        segment_BN=np.full(shape, PADDING, dtype=np.int64),
        position_BN=np.zeros(shape, dtype=np.int64),
        lengths_B=lengths_B,
        temperature_D=np.array([datum.temperature for datum in datums], dtype=np.float64),
        top_p_D=np.array([datum.top_p for datum in datums], dtype=np.float64),
        top_k_D=np.array([datum.top_k for datum in datums], dtype=np.int64),
        supervised=datums[0].weights_N is not None,
    )
    for b, row in enumerate(rows):
        start = 0
        for segment, index in enumerate(row):
            scales = token_scales[index] if token_scales is not None else None
            place = (b, slice(start, start + len(datums[index])))
            _place(batch, place, datums[index], scales)
            batch.datum_BN[place] = index
            batch.segment_BN[place] = segment
            start += len(datums[index])
    return batch


def _place(batch: Batch, place: tuple[int, slice], datum: Datum, scales_N: np.ndarray | None) -> None:
    batch.input_tokens_BN[place] = datum.input_tokens_N
    batch.target_tokens_BN[place] = datum.target_tokens_N
    batch.mask_BN[place] = datum.mask_N
    batch.signal_BN[place] = datum.signal
    if datum.sampler_logprobs_N is not None:
        batch.sampler_logprobs_BN[place] = datum.sampler_logprobs_N
    batch.token_scales_BN[place] = datum.mask_N if scales_N is None else scales_N
    batch.position_BN[place] = np.arange(len(datum))


def _longest_first(lengths: Sequence[int], budget_tokens: int) -> list[int]:
    if budget_tokens < 1:
        raise TrajectoryError("budget_tokens", budget_tokens, "a positive number of tokens")
    for index, length in enumerate(lengths):
        if length < 1:
            raise TrajectoryError(f"lengths[{index}]", length, "a positive number of tokens")
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def _check_arrangement(
    datums: Sequence[Datum], rows: Sequence[Sequence[int]], token_scales: Sequence[np.ndarray] | None
) -> None:
    if not datums:
        raise TrajectoryError("datums", [], "at least one datum")
    if not all(rows) or sorted(index for row in rows for index in row) != list(range(len(datums))):
        raise TrajectoryError(
            "rows", [list(row) for row in rows], f"each of {len(datums)} datums exactly once"
        )
    if len({datum.weights_N is None for datum in datums}) > 1:
        raise TrajectoryError("datums", "weights and advantages mixed", "one kind of signal a batch")
    if token_scales is not None and [len(scales) for scales in token_scales] != [
        len(datum) for datum in datums
    ]:
        raise TrajectoryError(
            "token_scales", [len(scales) for scales in token_scales], "one (N,) array a datum"
        )
