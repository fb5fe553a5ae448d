"""The ways of the CPU against the reference: equal results, untouched rows, invariance if asked for."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker_kernels import cpu, reference, tiles
from opentinker_kernels.plan import NO_SLOT, RoutingPlan, Segment

SLOTS = 6


def _draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


slots_of_rows = st.lists(st.integers(NO_SLOT, SLOTS - 1), min_size=1, max_size=257)
widths = st.sampled_from([(), (5, 28), (9, 16, 8)])


@settings(max_examples=60, deadline=None)
@given(slots_of_rows, st.booleans(), st.booleans(), st.integers(1, 24), widths)
def test_the_cpu_gives_what_the_reference_gives(
    slots: list[int], ordered: bool, invariant: bool, rank: int, slices: tuple[int, ...]
) -> None:
    if ordered:
        slots = sorted(slots, key=lambda slot: (slot == NO_SLOT, slot))
    plan = replace(RoutingPlan.of(slots), invariant=invariant)
    x_TD, W_SRD = _draw(0, len(slots), 33), _draw(1, SLOTS, rank, 33)
    for unused in set(range(SLOTS)) - set(slots):
        W_SRD[unused] = float("nan")
    u_PR = reference.shrink(x_TD, W_SRD, plan, slices)
    torch.testing.assert_close(cpu.shrink(x_TD, W_SRD, plan, slices), u_PR, atol=1e-4, rtol=1e-4)
    expected_TD, y_TD = _draw(2, len(slots), 33), _draw(2, len(slots), 33)
    reference.expand_add(expected_TD, u_PR, W_SRD, plan, slices)
    cpu.expand_add(y_TD, u_PR, W_SRD, plan, slices)
    torch.testing.assert_close(y_TD, expected_TD, atol=1e-4, rtol=1e-4)
    base = [row for row, slot in enumerate(slots) if slot == NO_SLOT]
    assert torch.equal(y_TD[base], _draw(2, len(slots), 33)[base])
    g_GRD = reference.wgrad(u_PR, x_TD, plan, slices)
    torch.testing.assert_close(cpu.wgrad(u_PR, x_TD, plan, slices), g_GRD, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_number_formats_are_kept(dtype: torch.dtype) -> None:
    plan = RoutingPlan.of([1, 1, 0, NO_SLOT])
    x_TD, W_SRD = _draw(0, 4, 16, dtype=dtype), _draw(1, 2, 8, 16, dtype=dtype)
    u_PR = cpu.shrink(x_TD, W_SRD, plan)
    assert u_PR.dtype == dtype
    y_TD = _draw(2, 4, 16, dtype=torch.float32)
    cpu.expand_add(y_TD, u_PR, W_SRD, plan)
    assert y_TD.dtype == torch.float32
    wanted = torch.float32 if dtype == torch.bfloat16 else torch.float64
    assert cpu.wgrad(u_PR, x_TD, plan).dtype == wanted


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.data())
def test_an_invariant_plan_gives_a_segment_the_same_bits_alone(
    eighths: list[int], data: st.DataObject
) -> None:
    lengths = [8 * n for n in eighths]
    which = data.draw(st.integers(0, len(lengths) - 1))
    slots = np.repeat(np.arange(len(lengths)), lengths)
    plan, alone = RoutingPlan.of(slots), RoutingPlan.of([which] * lengths[which])
    x_TD, W_SRD = _draw(0, len(slots), 64), _draw(1, SLOTS, 8, 64)
    own = slice(sum(lengths[:which]), sum(lengths[: which + 1]))
    u_PR = cpu.shrink(x_TD, W_SRD, plan)
    assert torch.equal(u_PR[own], cpu.shrink(x_TD[own], W_SRD, alone))
    assert torch.equal(cpu.wgrad(u_PR, x_TD, plan)[which], cpu.wgrad(u_PR[own], x_TD[own], alone)[0])
    y_TD, y_LD = _draw(2, len(slots), 64), _draw(2, len(slots), 64)[own].clone()
    cpu.expand_add(y_TD, u_PR, W_SRD, plan)
    cpu.expand_add(y_LD, u_PR[own], W_SRD, alone)
    assert torch.equal(y_TD[own], y_LD)


tiled_lengths = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(1, 20)), min_size=1, max_size=9)


@settings(max_examples=40, deadline=None)
@given(tiled_lengths, st.sampled_from([(33, 5), (64, 8), (256, 24)]))
def test_a_tiled_plan_gives_what_the_reference_gives(
    own: list[tuple[int, int]], shape: tuple[int, int]
) -> None:
    plan, count = _tiled(own), sum(length for _, length in own)
    x_TD, W_SRD = _draw(0, count + 3, shape[0]), _draw(1, SLOTS, shape[1], shape[0])
    u_PR = reference.shrink(x_TD, W_SRD, plan)
    torch.testing.assert_close(cpu.shrink(x_TD, W_SRD, plan), u_PR, atol=1e-4, rtol=1e-4)
    expected_TD, y_TD = _draw(2, count + 3, shape[0]), _draw(2, count + 3, shape[0])
    reference.expand_add(expected_TD, u_PR, W_SRD, plan)
    cpu.expand_add(y_TD, u_PR, W_SRD, plan)
    torch.testing.assert_close(y_TD, expected_TD, atol=1e-4, rtol=1e-4)
    assert torch.equal(y_TD[count:], _draw(2, count + 3, shape[0])[count:])


@settings(max_examples=40, deadline=None)
@given(tiled_lengths, st.sampled_from([(64, 8), (256, 24), (576, 16)]), st.data())
def test_a_row_of_a_tiled_plan_gets_the_same_bits_whatever_rows_there_are(
    own: list[tuple[int, int]], shape: tuple[int, int], data: st.DataObject
) -> None:
    if not tiles.are_invariant():
        pytest.skip(
            "the library's products depend on the other rows of a matrix; samplers make no tiles here"
        )
    slots = np.repeat([slot for slot, _ in own], [length for _, length in own])
    x_TD, y_TD = _draw(0, len(slots), shape[0]), _draw(2, len(slots), shape[0])
    W_SRD = _draw(1, SLOTS, shape[1], shape[0])
    row = data.draw(st.integers(0, len(slots) - 1))
    u_PR = cpu.shrink(x_TD, W_SRD, _tiled(own))
    cpu.expand_add(y_TD, u_PR, W_SRD, _tiled(own))
    alone, y_1D = _tiled([(int(slots[row]), 1)]), _draw(2, len(slots), shape[0])[row : row + 1].clone()
    u_1R = cpu.shrink(x_TD[row : row + 1], W_SRD, alone)
    cpu.expand_add(y_1D, u_1R, W_SRD, alone)
    assert torch.equal(u_PR[row], u_1R[0])
    assert torch.equal(y_TD[row], y_1D[0])


def _tiled(own: list[tuple[int, int]]) -> RoutingPlan:
    """A plan of segments (slot, length)."""
    segments, start = [], 0
    for slot, length in own:
        segments.append(Segment(slot, start, start + length))
        start += length
    return RoutingPlan(start, tuple(segments), tiled=True)


def test_a_tiled_plan_has_its_rows_in_order_and_no_slices() -> None:
    segments = (Segment(0, 0, 2),)
    with pytest.raises(ValueError, match="rows: of a tiled plan"):
        RoutingPlan(2, segments, rows=torch.tensor([1, 0]), tiled=True)
    with pytest.raises(ValueError, match="slices"):
        cpu.shrink(_draw(0, 2, 8), _draw(1, 1, 4, 8), RoutingPlan(2, segments, tiled=True), (4, 4))


def test_blocks_cover_the_segments_and_end_in_unused_ones() -> None:
    plan = RoutingPlan.of([2] * 5 + [0] * 3 + [NO_SLOT])
    blocks = plan.blocks(4, n_blocks=6)
    assert blocks.slot_B.tolist() == [0, 2, 2, NO_SLOT, NO_SLOT, NO_SLOT]
    assert blocks.start_B.tolist()[:3] == [0, 3, 7]
    assert blocks.length_B.tolist() == [3, 4, 1, 0, 0, 0]
    with pytest.raises(ValueError, match="at least 3"):
        plan.blocks(4, n_blocks=2)


def test_segments_with_holes_are_refused() -> None:
    plan = RoutingPlan.of([0, 1])
    with pytest.raises(ValueError, match="contiguous"):
        RoutingPlan(2, plan.segments[1:])
    with pytest.raises(ValueError, match="at most 1"):
        RoutingPlan(1, plan.segments)
