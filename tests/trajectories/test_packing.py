"""Every row exactly once, within the budget, the same every time; padding known by length alone."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_core.trajectories.datums import to_datum
from opentinker_core.trajectories.errors import TrajectoryError
from opentinker_core.trajectories.packing import PADDING, arrange, micro_batches, pack, pad
from opentinker_core.trajectories.types import Datum, Trajectory
from tests.trajectories.strategies import demonstration, trajectory_lists, two_turns

Splitter = Callable[[list[int], int], list[list[int]]]
lengths = st.lists(st.integers(1, 60), max_size=40)
budgets = st.integers(1, 100)


@pytest.mark.parametrize("split", [micro_batches, pack])
@given(lengths=lengths, budget=budgets)
def test_a_split_holds_every_row_once_and_repeats_itself(
    split: Splitter, lengths: list[int], budget: int
) -> None:
    parts = split(lengths, budget)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(parts)
    assert split(list(lengths), budget) == parts


@given(lengths=lengths, budget=budgets)
def test_micro_batches_keep_padded_tokens_within_the_budget(lengths: list[int], budget: int) -> None:
    for part in micro_batches(lengths, budget):
        assert len(part) == 1 or len(part) * max(lengths[index] for index in part) <= budget


@given(lengths=lengths, budget=budgets)
def test_packed_rows_keep_within_the_budget_and_waste_less_than_half(lengths: list[int], budget: int) -> None:
    rows = [[lengths[index] for index in row] for row in pack(lengths, budget)]
    assert all(len(row) == 1 or sum(row) <= budget for row in rows)
    # First fit never leaves two rows that would fit into one.
    assert sum(sum(row) * 2 <= budget for row in rows) <= 1


def test_packing_by_hand() -> None:
    assert pack([3, 9, 4, 6, 20], 10) == [[4], [1], [3, 2], [0]]
    assert micro_batches([3, 9, 4, 6, 20], 12) == [[4], [1], [3, 2], [0]]


@pytest.mark.parametrize(("lengths", "budget"), [([1], 0), ([0], 5), ([3, -1], 5)])
def test_sizes_must_be_positive(lengths: list[int], budget: int) -> None:
    for split in (micro_batches, pack):
        with pytest.raises(TrajectoryError, match="positive number of tokens"):
            split(lengths, budget)


def _datums(trajectories: list[Trajectory]) -> list[Datum]:
    return [to_datum(trajectory, advantages=index - 1.5) for index, trajectory in enumerate(trajectories)]


@given(trajectory_lists(), st.integers(5, 60))
def test_rows_hold_their_datums_unchanged(trajectories: list[Trajectory], budget: int) -> None:
    datums = _datums(trajectories)
    scales = [np.where(datum.mask_N, np.float32(0.5), np.float32(0)) for datum in datums]
    for rows in ([[index] for index in range(len(datums))], pack([len(datum) for datum in datums], budget)):
        batch = arrange(datums, rows, scales)
        assert batch.attention.sum() == sum(len(datum) for datum in datums) == batch.lengths_B.sum()
        assert batch.mask_BN.sum() == sum(datum.mask_N.sum() for datum in datums)
        for index, datum in enumerate(datums):
            here = batch.datum_BN == index
            assert batch.input_tokens_BN[here].tolist() == datum.input_tokens_N.tolist()
            assert batch.target_tokens_BN[here].tolist() == datum.target_tokens_N.tolist()
            assert batch.signal_BN[here].tolist() == datum.signal.tolist()
            assert batch.token_scales_BN[here].tolist() == scales[index].tolist()
            assert batch.position_BN[here].tolist() == list(range(len(datum)))


@given(trajectory_lists(min_size=2), st.integers(5, 60))
def test_packed_positions_see_their_own_past_and_nothing_else(
    trajectories: list[Trajectory], budget: int
) -> None:
    datums = _datums(trajectories)
    batch = arrange(datums, pack([len(datum) for datum in datums], budget))
    matrix_BNN = batch.attention_matrix()
    for b, i in np.argwhere(batch.attention):
        seen = np.flatnonzero(matrix_BNN[b, i])
        assert (batch.datum_BN[b, seen] == batch.datum_BN[b, i]).all()
        assert batch.position_BN[b, seen].tolist() == list(range(batch.position_BN[b, i] + 1))
    for b, i in np.argwhere(~batch.attention):
        assert np.flatnonzero(matrix_BNN[b, i]).tolist() == [i]


def test_a_pad_id_that_is_a_real_token_is_harmless() -> None:
    datums = [to_datum(two_turns(), weights=1.0), to_datum(demonstration(), weights=1.0)]
    eos = 21  # the last token of the demonstration, and one within the first trajectory
    batch = pad(datums, pad_id=eos)
    assert batch.lengths_B.tolist() == [5, 2]
    assert batch.attention.tolist() == [[True] * 5, [True, True, False, False, False]]
    assert batch.mask_BN[1].tolist() == [True, True, False, False, False]
    assert batch.datum_BN[1].tolist() == [1, 1, PADDING, PADDING, PADDING]
    assert batch.supervised
    assert not batch.packed


def test_batches_refuse_what_does_not_fit_together() -> None:
    supervised = to_datum(demonstration(), weights=1.0)
    sampled = to_datum(two_turns(), advantages=1.0)
    with pytest.raises(TrajectoryError, match="one kind of signal"):
        pad([supervised, sampled])
    with pytest.raises(TrajectoryError, match="exactly once"):
        arrange([supervised, supervised], [[0], [0]])
    with pytest.raises(TrajectoryError, match="at least one datum"):
        pad([])
    with pytest.raises(TrajectoryError, match="token_scales"):
        pad([supervised], [np.ones(3, np.float32)])
