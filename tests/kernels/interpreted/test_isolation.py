"""A row's result depends on that row and its adapter, to the bit; nothing else is read or written."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from opentinker_kernels import triton_ops
from opentinker_kernels.plan import Blocks, RoutingPlan, Segment
from tests.kernels.problems import Problem, bits, make_problem, watched

SLOTS = [0, 3, -1, 1, 3, 3, 0, -1, 4, 1] * 4


def forward(p: Problem, plan: RoutingPlan | None = None) -> Tensor:
    """The new y of all rows."""
    plan, (y_TN, _) = plan or p.plan, watched(p.y_TN)
    triton_ops.expand_add(y_TN, triton_ops.shrink(p.x_TK, p.A_SRK, plan), p.Bt_SRN, plan, p.slices)
    return y_TN


def gradients(p: Problem) -> dict[int, tuple[Tensor, Tensor]]:
    """dA and dBt of each slot."""
    u_PR = triton_ops.shrink(p.x_TK, p.A_SRK, p.plan)
    du_PR = triton_ops.shrink(p.dy_TN, p.Bt_SRN, p.plan, p.slices)
    dA, dBt = triton_ops.wgrad(du_PR, p.x_TK, p.plan), triton_ops.wgrad(u_PR, p.dy_TN, p.plan, p.slices)
    return {slot: (dA[j], dBt[j]) for j, slot in enumerate(p.plan.slots)}


def of_rows(p: Problem, rows: Tensor, slots: list[int]) -> Problem:
    """The same problem with those rows alone, of those slots."""
    return Problem(
        tuple(slots),
        RoutingPlan.of(slots),
        p.slices,
        p.x_TK[rows],
        p.y_TN[rows],
        p.A_SRK,
        p.Bt_SRN,
        p.dy_TN[rows],
    )


@settings(max_examples=5, deadline=None, database=None, phases=[Phase.generate])
@given(st.permutations(range(len(SLOTS))))
def test_shuffled_rows_give_shuffled_results(order: list[int]) -> None:
    p = make_problem(SLOTS, n_in=130, slices=(40, 30), dtype=torch.float16)
    shuffled = of_rows(p, torch.tensor(order), [SLOTS[row] for row in order])
    assert torch.equal(bits(forward(shuffled)), bits(forward(p)[order]))


@pytest.mark.parametrize("n_in", [100, 1030])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_adapter_alone_gives_the_bits_it_gives_in_company(n_in: int, dtype: torch.dtype) -> None:
    p = make_problem(SLOTS * 7, n_in=n_in, slices=(70, 40), dtype=dtype)
    together, gradients_together = forward(p), gradients(p)
    for slot in (0, 4):
        rows = torch.tensor(p.slots) == slot
        alone = of_rows(p, rows, [slot] * int(rows.sum()))
        assert torch.equal(bits(forward(alone)), bits(together[rows]))
        for found, expected in zip(gradients(alone)[slot], gradients_together[slot], strict=True):
            assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("invariant", [True, False])
def test_another_adapters_data_changes_nothing_even_as_nan(invariant: bool) -> None:
    p = make_problem(SLOTS[:20], n_in=70, slices=(1030,), invariant=invariant)
    before, gradients_before = forward(p), gradients(p)
    others = torch.tensor(p.slots) != 3
    for tensor in (p.x_TK, p.dy_TN):
        tensor[others] = torch.nan
    for factor in (p.A_SRK, p.Bt_SRN):
        factor[[0, 1, 2, 4]] = torch.nan
    after = forward(p)
    assert torch.equal(bits(after[~others]), bits(before[~others]))
    for found, expected in zip(gradients(p)[3], gradients_before[3], strict=True):
        assert torch.equal(bits(found), bits(expected))


def test_two_runs_agree_to_the_bit() -> None:
    p = make_problem(SLOTS[:10], n_in=1030, invariant=False)
    assert torch.equal(bits(forward(p)), bits(forward(p)))


def test_one_slot_in_two_segments_has_two_gradients() -> None:
    p = make_problem([2] * 40)
    halves = RoutingPlan(40, (Segment(2, 0, 25), Segment(2, 25, 40)))
    u_PR = triton_ops.shrink(p.x_TK, p.A_SRK, halves)
    g_GRD = triton_ops.wgrad(u_PR, p.x_TK, halves)
    whole_GRD = triton_ops.wgrad(u_PR, p.x_TK, p.plan)
    assert len(g_GRD) == 2
    torch.testing.assert_close(g_GRD.sum(0), whole_GRD[0], rtol=1e-5, atol=1e-5)


class Padded(RoutingPlan):
    """A plan whose block tables end in blocks that are not used, as when a captured graph is replayed."""

    def blocks(
        self, block_rows: int, n_blocks: int | None = None, device: torch.device | str = "cpu"
    ) -> Blocks:
        n_needed = len(super().blocks(block_rows, device=device).slot_B)
        return super().blocks(block_rows, n_needed + 4, device)


def test_blocks_that_are_not_used_do_nothing() -> None:
    p = make_problem(SLOTS)
    padded = Padded(p.plan.n_rows, p.plan.segments, p.plan.rows)
    assert torch.equal(bits(forward(p, padded)), bits(forward(p)))
    u_PR = triton_ops.shrink(p.x_TK, p.A_SRK, p.plan)
    assert torch.equal(triton_ops.wgrad(u_PR, p.x_TK, padded), triton_ops.wgrad(u_PR, p.x_TK, p.plan))


@pytest.mark.parametrize("slots", [[-1] * 20, []], ids=["no row has an adapter", "no rows"])
def test_nothing_routed_changes_nothing(slots: list[int]) -> None:
    p = make_problem(slots, slices=(30, 10))
    assert torch.equal(bits(forward(p)), bits(p.y_TN))
    assert triton_ops.shrink(p.x_TK, p.A_SRK, p.plan).shape == (0, 32)
    assert triton_ops.wgrad(torch.empty(0, 32), p.dy_TN, p.plan, p.slices).shape == (0, 16, 40)


def _segment(slot: int, start: int, stop: int):
    from opentinker_kernels.plan import Segment

    return Segment(slot, start, stop)
