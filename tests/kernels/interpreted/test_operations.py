"""Shrink, expand and wgrad equal the torch reference in float64, whatever the shapes and the routing."""

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from opentinker_kernels import reference, triton_ops
from opentinker_kernels.plan import RoutingPlan
from opentinker_kernels.triton_ops.tiles import shrink_tiles, wgrad_chunk
from tests.kernels.problems import N_SLOTS, Problem, bits, make_problem, watched

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NO_SHRINKING = (Phase.explicit, Phase.generate)
"""Shrinking would take many minutes here."""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within a few roundings of `dtype`, relative to the largest value."""
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[dtype] * scale)


def check_forward(p: Problem) -> Tensor:
    """Check u and y; return u."""
    exact, dtype = p.in_double(), p.x_TK.dtype
    u_PR = triton_ops.shrink(p.x_TK, p.A_SRK, p.plan)
    assert u_PR.dtype == dtype
    assert_near(u_PR, reference.shrink(exact.x_TK, exact.A_SRK, p.plan), dtype)

    y_TN, memory = watched(p.y_TN)
    triton_ops.expand_add(y_TN, u_PR, p.Bt_SRN, p.plan, p.slices)
    reference.expand_add(exact.y_TN, u_PR.double(), exact.Bt_SRN, p.plan, p.slices)
    assert_near(y_TN[p.routed], exact.y_TN[p.routed], dtype)
    y_TN[p.routed] = p.y_TN[p.routed]
    assert torch.equal(bits(memory), bits(p.y_TN._base))  # nothing else was written
    return u_PR


def check_backward(p: Problem, u_PR: Tensor) -> None:
    """Check dU, dX, dA and dBt."""
    exact, dtype = p.in_double(), p.x_TK.dtype
    du_PR = triton_ops.shrink(p.dy_TN, p.Bt_SRN, p.plan, p.slices)
    assert_near(du_PR, reference.shrink(exact.dy_TN, exact.Bt_SRN, p.plan, p.slices), dtype)

    dx_TK, expected_TK = torch.zeros_like(p.x_TK), torch.zeros_like(exact.x_TK)
    triton_ops.expand_add(dx_TK, du_PR, p.A_SRK, p.plan)
    reference.expand_add(expected_TK, du_PR.double(), exact.A_SRK, p.plan)
    assert_near(dx_TK, expected_TK, dtype)

    dA_GRK = triton_ops.wgrad(du_PR, p.x_TK, p.plan)
    assert_near(dA_GRK, reference.wgrad(du_PR.double(), exact.x_TK, p.plan).double(), torch.float32)
    dBt_GRN = triton_ops.wgrad(u_PR, p.dy_TN, p.plan, p.slices)
    assert_near(
        dBt_GRN, reference.wgrad(u_PR.double(), exact.dy_TN, p.plan, p.slices).double(), torch.float32
    )
    assert dA_GRK.dtype == dBt_GRN.dtype == torch.float32


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rank = draw(st.sampled_from([1, 2, 3, 8, 16, 17, 24, 64, 100, 128]), label="rank")
    n_rows = draw(st.sampled_from([1, 2, 15, 16, 17, 33, 64, 65, 128, 255, 257]), label="rows")
    chosen = draw(st.lists(st.integers(-1, N_SLOTS - 1), min_size=1, max_size=12), label="slots")
    length = draw(st.sampled_from([1, 5, 40]), label="rows in a run")
    return make_problem(
        [chosen[(row // length) % len(chosen)] for row in range(n_rows)],
        rank=rank,
        n_in=draw(st.sampled_from([1, 8, 100, 128, 129, 200]), label="inputs"),
        slices=draw(
            st.sampled_from([(80,), (1,), (129,), (96, 32, 32), (130, 50, 50), (70, 70)]), label="slices"
        ),
        dtype=draw(st.sampled_from([torch.float32, torch.float16]), label="dtype"),
        ranks=[draw(st.integers(1, rank)) for _ in range(N_SLOTS)],
        invariant=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=12, deadline=None, database=None, phases=NO_SHRINKING)
@given(problems())
@example(make_problem([-1]))
@example(make_problem([0], rank=1, n_in=1, slices=(1,)))
def test_forward_and_backward_equal_the_reference(problem: Problem) -> None:
    check_backward(problem, check_forward(problem))


@DTYPES
@pytest.mark.parametrize("n_rows", [1, 257])
def test_any_number_of_rows_of_mixed_slots(n_rows: int, dtype: torch.dtype) -> None:
    problem = make_problem([(row * 7) % 6 - 1 for row in range(n_rows)], dtype=dtype, slices=(64, 24, 24))
    check_backward(problem, check_forward(problem))


@DTYPES
def test_a_split_sum_over_many_features_equals_the_reference(dtype: torch.dtype) -> None:
    assert shrink_tiles(3, 1100, 4, dtype.itemsize).split > 1
    wide_in = make_problem([2, -1, 0], rank=4, n_in=1100, dtype=dtype, invariant=False)
    check_forward(wide_in)
    wide_out = make_problem([2, -1, 0], rank=4, slices=(1100, 30), dtype=dtype)
    check_backward(wide_out, check_forward(wide_out))


def test_a_long_segment_is_added_up_in_chunks() -> None:
    slots = [0] * (2 * wgrad_chunk(1) + 3) + [1] * 5 + [-1] + [3] * (wgrad_chunk(1) + 1)
    p = make_problem(slots, n_in=40, rank=4, dtype=torch.float16)
    u_PR = torch.randn(p.plan.n_routed, 4).half()
    expected_GRK = reference.wgrad(u_PR.double(), p.x_TK.double(), p.plan).double()
    assert_near(triton_ops.wgrad(u_PR, p.x_TK, p.plan), expected_GRK, torch.float32)


def test_adapters_of_ranks_1_to_128_and_rows_without_any_share_a_batch() -> None:
    """Each rank bucket has factors and a plan of its own; together they give every row its own update."""
    ranks, buckets = [1, 3, 8, 16, 40, 64, 128], [8, 16, 64, 128]
    policies = torch.randint(-1, len(ranks), (200,), generator=torch.Generator().manual_seed(1)).tolist()
    x_TK = torch.randn(200, 60)
    y_TN = torch.randn(200, 70)
    A, Bt = [torch.randn(r, 60) / 8 for r in ranks], [torch.randn(r, 70) / r for r in ranks]
    expected_TN = y_TN.double()
    for row, policy in enumerate(policies):
        if policy >= 0:
            expected_TN[row] += x_TK[row].double() @ A[policy].double().T @ Bt[policy].double()
    for low, bucket in zip([0, *buckets], buckets, strict=False):
        members = [policy for policy, rank in enumerate(ranks) if low < rank <= bucket]
        plan = RoutingPlan.of([members.index(policy) if policy in members else -1 for policy in policies])
        A_SRK, Bt_SRN = torch.zeros(len(members), bucket, 60), torch.zeros(len(members), bucket, 70)
        for slot, policy in enumerate(members):
            A_SRK[slot, : ranks[policy]], Bt_SRN[slot, : ranks[policy]] = A[policy], Bt[policy]
        triton_ops.expand_add(y_TN, triton_ops.shrink(x_TK, A_SRK, plan), Bt_SRN, plan)
    assert_near(y_TN, expected_TN, torch.float32)


def test_gradients_equal_those_of_autograd() -> None:
    slots, rank, slices = [1, -1, 0, 1, 2, 0, -1, 1] * 5, 6, (33, 17)
    p = make_problem(slots, rank=rank, n_in=21, slices=slices)
    x_TK, A_SRK, Bt_SRN = (t.double().requires_grad_() for t in (p.x_TK, p.A_SRK, p.Bt_SRN))
    loss = torch.zeros((), dtype=torch.float64)
    for row, slot in enumerate(slots):
        if slot >= 0:
            u_per_slice = (A_SRK[slot] @ x_TK[row]).split(rank)
            Bt_per_slice = Bt_SRN[slot].split(slices, dim=1)
            y_N = torch.cat([u @ Bt for u, Bt in zip(u_per_slice, Bt_per_slice, strict=True)])
            loss = loss + (y_N * p.dy_TN[row]).sum()
    loss.backward()
    assert x_TK.grad is not None
    assert A_SRK.grad is not None
    assert Bt_SRN.grad is not None

    du_PR = triton_ops.shrink(p.dy_TN, p.Bt_SRN, p.plan, slices)
    dx_TK = torch.zeros(x_TK.shape)
    triton_ops.expand_add(dx_TK, du_PR, p.A_SRK, p.plan)
    assert_near(dx_TK, x_TK.grad, torch.float32)
    u_PR = triton_ops.shrink(p.x_TK, p.A_SRK, p.plan)
    assert_near(triton_ops.wgrad(du_PR, p.x_TK, p.plan), A_SRK.grad[:3], torch.float32)
    assert_near(triton_ops.wgrad(u_PR, p.dy_TN, p.plan, slices), Bt_SRN.grad[:3], torch.float32)
