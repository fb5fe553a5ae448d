"""Every weighted position once, within the budget, the same every time, and seeing its own past only."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opentinker_core.lora.routing import routed
from opentinker_core.trajectories.datums import to_datum
from opentinker_core.trajectories.errors import TrajectoryError
from opentinker_core.trajectories.packing import MAX_SHARED_ROW, MicroBatch, micro_batches
from opentinker_core.trajectories.types import Datum
from tests.tiny import TinyEngine
from tests.trajectories.strategies import demonstration, trajectory_lists, two_turns

LAYOUTS = [
    {"share_prefix": share_prefix, "pack": pack} for share_prefix, pack in product([False, True], repeat=2)
]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
budgets = st.integers(1, 100)
datum_lists = trajectory_lists(max_size=8).map(
    # Some without their first turn, which then is a part of what members of a group may share.
    lambda items: [
        to_datum(item, advantages=place - 1.5, without=[0] if place % 2 and len(item.turns) > 1 else [])
        for place, item in enumerate(items)
    ]
)


def _datum(inputs: list[int], prompt: int = 1) -> Datum:
    """A datum that trains on everything after `prompt` tokens."""
    mask_N = np.arange(len(inputs)) >= prompt - 1
    tokens = np.array([*inputs, 0])
    return Datum(tokens[:-1], tokens[1:], mask_N, weights_N=mask_N.astype(np.float32))


def _attention(batch: MicroBatch) -> np.ndarray:
    if batch.attention_BTT is not None:
        return batch.attention_BTT
    rows, width = batch.tokens_BT.shape
    return np.broadcast_to(np.tri(width, dtype=bool), (rows, width, width))


def _places(batch: MicroBatch, datums: list[Datum]) -> Iterator[tuple[int, int, np.ndarray]]:
    """(datum, row, columns of its N positions); a datum's last position is weighted and sees all of them."""
    for index in np.unique(batch.datum_M):
        own = batch.datum_M == index
        last = np.flatnonzero(own & (batch.position_M == len(datums[index]) - 1))
        assert len(last) == len(np.unique(batch.row_M[own])) == 1
        row, column = batch.row_M[last[0]], batch.column_M[last[0]]
        columns = np.flatnonzero(_attention(batch)[row, column])
        assert batch.column_M[own].tolist() == columns[batch.position_M[own]].tolist()
        yield int(index), int(row), columns


def _real(batch: MicroBatch, datums: list[Datum]) -> np.ndarray:
    """bool (B, T): columns that belong to a datum."""
    real_BT = np.zeros(batch.tokens_BT.shape, bool)
    for _, row, columns in _places(batch, datums):
        real_BT[row, columns] = True
    return real_BT


@given(datums=datum_lists, budget=budgets)
def test_every_weighted_position_is_there_once(datums: list[Datum], budget: int) -> None:
    expected = [(d, n) for d, datum in enumerate(datums) for n in np.flatnonzero(datum.mask_N).tolist()]
    for layout in LAYOUTS:
        found: list[tuple[int, int]] = []
        for batch in micro_batches(datums, budget, **layout):
            found += zip(batch.datum_M.tolist(), batch.position_M.tolist(), strict=True)
            # Only the column that predicts the first weighted target can be that of several datums.
            places = set(zip(batch.row_M.tolist(), batch.column_M.tolist(), strict=True))
            shared = len(batch.row_M) - len(places)
            assert shared <= (len(np.unique(batch.datum_M)) - 1) * layout["share_prefix"]
        assert sorted(found) == expected


@given(datums=datum_lists, budget=budgets)
def test_batches_stay_within_the_budget_unless_one_datum_is_longer(datums: list[Datum], budget: int) -> None:
    for layout in LAYOUTS:
        for batch in micro_batches(datums, budget, **layout):
            assert batch.tokens_BT.size <= budget or len(np.unique(batch.datum_M)) == 1


@given(datums=datum_lists, budget=budgets)
def test_a_layout_repeats_itself(datums: list[Datum], budget: int) -> None:
    for layout in LAYOUTS:
        first, second = (list(micro_batches(datums, budget, **layout)) for _ in range(2))
        assert len(first) == len(second)
        for (a, b), name in product(zip(first, second, strict=True), MicroBatch.__dataclass_fields__):
            assert np.array_equal(getattr(a, name), getattr(b, name))


@given(datums=datum_lists, budget=budgets)
def test_rows_hold_their_datums_unchanged(datums: list[Datum], budget: int) -> None:
    for layout in LAYOUTS:
        seen = []
        for batch in micro_batches(datums, budget, **layout):
            targets_M = batch.gather([datum.target_tokens_N for datum in datums])
            for index, row, columns in _places(batch, datums):
                datum, own = datums[index], batch.datum_M == index
                assert batch.tokens_BT[row, columns].tolist() == datum.input_tokens_N.tolist()
                assert batch.positions_BT[row, columns].tolist() == list(range(len(datum)))
                assert targets_M[own].tolist() == datum.target_tokens_N[batch.position_M[own]].tolist()
                seen.append(index)
        assert sorted(seen) == list(range(len(datums)))


@given(datums=datum_lists, budget=budgets)
def test_tokens_see_their_own_past_and_nothing_else(datums: list[Datum], budget: int) -> None:
    for layout in LAYOUTS:
        for batch in micro_batches(datums, budget, **layout):
            attention_BTT = _attention(batch)
            for _, row, columns in _places(batch, datums):
                for position, column in enumerate(columns):
                    seen = np.flatnonzero(attention_BTT[row, column])
                    assert seen.tolist() == columns[: position + 1].tolist()


@given(datums=datum_lists, budget=budgets)
def test_padding_follows_the_rows_and_sees_itself(datums: list[Datum], budget: int) -> None:
    for layout in LAYOUTS:
        for batch in micro_batches(datums, budget, **layout):
            real_BT = _real(batch, datums)
            lengths_B = real_BT.sum(1)
            assert (real_BT == (np.arange(real_BT.shape[1]) < lengths_B[:, None])).all()
            assert lengths_B.max() == real_BT.shape[1]
            if not layout["share_prefix"]:
                assert lengths_B.sum() == sum(len(datums[i]) for i in np.unique(batch.datum_M))
            if batch.attention_BTT is not None:  # a causal row's padding sees the row, which is as finite
                for row, column in np.argwhere(~real_BT):
                    assert np.flatnonzero(batch.attention_BTT[row, column]).tolist() == [column]


def _row_members(datums: list[Datum], budget: int, **layout: bool) -> list[list[list[int]]]:
    """Datum indices of each row of each micro-batch."""
    return [
        [sorted(set(batch.datum_M[batch.row_M == row].tolist())) for row in range(len(batch.tokens_BT))]
        for batch in micro_batches(datums, budget, **layout)
    ]


@given(st.lists(st.integers(1, 60), max_size=40), budgets)
def test_packed_rows_keep_within_the_budget_and_waste_less_than_half(lengths: list[int], budget: int) -> None:
    datums = [_datum([1] * length) for length in lengths]
    batches = _row_members(datums, budget, share_prefix=False, pack=True)
    rows = [[lengths[index] for index in row] for batch in batches for row in batch]
    assert all(len(row) == 1 or sum(row) <= budget for row in rows)
    # First fit never leaves two rows that would fit into one.
    assert sum(sum(row) * 2 <= budget for row in rows) <= 1


def test_layouts_by_hand() -> None:
    datums = [_datum([1] * length) for length in (3, 9, 4, 6, 20)]
    plain = {"share_prefix": False, "pack": False}
    packed = {"share_prefix": False, "pack": True}
    assert _row_members(datums, 12, **plain) == [[[4]], [[1]], [[3], [2]], [[0]]]
    assert _row_members(datums, 10, **packed) == [[[4]], [[2, 3]], [[1]], [[0]]]
    # The first two share 1 2 3: the row is 3 + 1 + 2 tokens long, which is what a budget of 6 allows.
    shared = [_datum([1, 2, 3, 4], 3), _datum([1, 2, 3, 5, 6], 3), _datum([1, 2, 4], 3)]
    (first, second) = micro_batches(shared, 6)
    assert first.tokens_BT.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert first.positions_BT.tolist() == [[0, 1, 2, 3, 3, 4]]
    assert first.column_M.tolist() == [2, 3, 2, 4, 5]
    assert second.tokens_BT.tolist() == [[1, 2, 4]]
    assert second.attention_BTT is None
    assert _row_members(shared, 5) == [[[1]], [[0]], [[2]]]


@pytest.mark.parametrize(("share_prefix", "pack"), [(True, False), (False, True), (True, True)])
def test_a_dense_mask_never_gets_wider_than_its_limit(share_prefix: bool, pack: bool) -> None:
    datums = [_datum([1] * 400, 100) for _ in range(6)] + [_datum([2] * (MAX_SHARED_ROW + 1))]
    (alone, *others) = micro_batches(datums, 100_000, share_prefix=share_prefix, pack=pack)
    assert not others
    batches = list(micro_batches(datums[:-1], 100_000, share_prefix=share_prefix, pack=pack))
    assert max(batch.tokens_BT.shape[1] for batch in batches) <= MAX_SHARED_ROW
    assert all(batch.attention_BTT is not None for batch in batches)
    assert set(alone.datum_M[alone.column_M == MAX_SHARED_ROW].tolist()) == {6}


@pytest.mark.parametrize("budget", [0, -1])
def test_the_budget_must_be_positive(budget: int) -> None:
    for datums in ([], [to_datum(demonstration(), weights=1.0)]):
        with pytest.raises(TrajectoryError, match=f"budget: {budget} .* positive number of tokens"):
            micro_batches(datums, budget)


def test_no_datums_make_no_batches() -> None:
    assert list(micro_batches([], 10)) == []


def test_a_datum_without_a_weighted_position_does_not_exist() -> None:
    """The prefix ends at the first of them, which is therefore always there."""
    with pytest.raises(TrajectoryError, match=r"mask_N: 0 .* at least one trained target"):
        Datum(np.array([1, 2]), np.array([2, 3]), np.zeros(2, bool), weights_N=np.zeros(2, np.float32))
    nothing = np.array([], np.int64)
    with pytest.raises(TrajectoryError, match=r"mask_N: 0 .* at least one trained target"):
        Datum(nothing, nothing, nothing.astype(bool), weights_N=nothing.astype(np.float32))
    datum = to_datum(demonstration(), weights=1.0)
    with pytest.raises(ValueError, match="read-only"):
        datum.mask_N[:] = False


def test_padding_is_known_by_length_not_by_a_token() -> None:
    """0, which fills rows up, is a real token of both datums."""
    datums = [_datum([0, 1, 0, 0, 0]), _datum([0, 0])]
    (batch,) = micro_batches(datums, 100, share_prefix=False)
    assert batch.tokens_BT.tolist() == [[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert batch.row_M.tolist() == [0] * 5 + [1] * 2
    assert batch.column_M.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.attention_BTT is None
    two = [to_datum(two_turns(), weights=1.0), to_datum(demonstration(), weights=1.0)]
    (batch,) = micro_batches(two, 100)
    assert batch.column_M.tolist() == [1, 2, 4, 0, 1]


@pytest.fixture(scope="module")
def engine(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyEngine:
    return TinyEngine.open(tiny_home, tmp_path_factory.mktemp("packing"))


def _logits(engine: TinyEngine, batch: MicroBatch) -> np.ndarray:
    with torch.no_grad(), routed(None):
        return engine.model(
            input_ids=torch.from_numpy(batch.tokens_BT),
            attention_mask=torch.from_numpy(_attention(batch).copy())[:, None],
            position_ids=torch.from_numpy(batch.positions_BT),
            use_cache=False,
        ).logits.numpy()


@every_layout
def test_a_perturbed_segment_changes_no_other_s_logits(engine: TinyEngine, layout: dict[str, bool]) -> None:
    texts = ["12+34=46", "12+34=5", "7*8=56", "12+34=466+1", "3-1=2"]
    datums = [_datum(list(engine.ids(text)), prompt=text.index("=") + 1) for text in texts]
    (batch,) = micro_batches(datums, 1000, **layout)
    assert len(batch.tokens_BT) == {(0, 0): 5, (1, 0): 3}.get((layout["share_prefix"], layout["pack"]), 1)
    before = _logits(engine, batch)
    places = {index: (row, columns) for index, row, columns in _places(batch, datums)}
    real_BT = _real(batch, datums)
    for index, (row, columns) in places.items():
        first = int(np.argmax(datums[index].mask_N)) + 1  # from here on the columns are this datum's alone
        tokens_BT = batch.tokens_BT.copy()
        tokens_BT[row, columns[first:]] = engine.ids("9")[0]
        perturbed = replace(batch, tokens_BT=tokens_BT)
        after = _logits(engine, perturbed)
        assert np.abs(after - before)[row, columns[first:]].max(axis=-1).min() > 1e-3
        untouched = np.ones(tokens_BT.shape, bool)
        untouched[row, columns[first:]] = False
        untouched &= real_BT  # padding at the end of a causal row sees the row, and nobody reads it
        assert np.array_equal(after[untouched], before[untouched])


def test_the_mask_is_what_keeps_packed_segments_apart(engine: TinyEngine) -> None:
    """The same perturbation leaks under plain causal attention, so the test above can fail."""
    datums = [_datum(list(engine.ids(text))) for text in ("12+34=46", "7*8=56")]
    (batch,) = micro_batches(datums, 1000, pack=True)
    causal = replace(batch, attention_BTT=None)
    tokens_BT = batch.tokens_BT.copy()
    tokens_BT[0, 1:8] = engine.ids("9")[0]
    leak = np.abs(_logits(engine, replace(causal, tokens_BT=tokens_BT)) - _logits(engine, causal))
    assert leak[0, 8:].max() > 1e-3


@every_layout
def test_packed_logits_are_those_of_the_datum_alone(engine: TinyEngine, layout: dict[str, bool]) -> None:
    texts = ["12+34=46", "12+34=5", "7*8=56", "12+34=466+1", "3-1=2"]
    datums = [_datum(list(engine.ids(text)), prompt=text.index("=") + 1) for text in texts]
    (batch,) = micro_batches(datums, 1000, **layout)
    logits_BTV = _logits(engine, batch)
    for index, row, columns in _places(batch, datums):
        (alone,) = micro_batches([datums[index]], 1000)
        np.testing.assert_allclose(logits_BTV[row, columns], _logits(engine, alone)[0], atol=2e-5)
