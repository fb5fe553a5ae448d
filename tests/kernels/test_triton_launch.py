"""What the Triton launchers refuse, how they choose tiles, and that Triton is only needed to launch."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opentinker_kernels import triton_ops
from opentinker_kernels.plan import RoutingPlan
from opentinker_kernels.triton_ops import launch
from opentinker_kernels.triton_ops.tiles import STAGE_BYTES, expand_tiles, shrink_tiles, wgrad_tiles

PLAN = RoutingPlan.of([0, 2, -1, 2])
X, Y, U, W = torch.zeros(4, 24), torch.zeros(4, 24), torch.zeros(3, 8), torch.zeros(3, 8, 24)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X[:3], W, PLAN), r"x_TD: \(3, 24\); accepted: \(4, D\)"),
        ((X.double(), W, PLAN), "x_TD: torch.float64; accepted: torch.float32"),
        ((X, W[:2], PLAN), "W_SRD: .*; accepted: .*at least 3 slots"),
        ((X, W[:, :, :20], PLAN), r"W_SRD: .*; accepted: \(slots, rank, 24\)"),
        ((X, W.mT.contiguous().mT, PLAN), r"W_SRD: .*; accepted: strides \(any, any, 1\)"),
        ((X, W.to("meta"), PLAN), "W_SRD: meta; accepted: cpu"),
        ((X, W, PLAN, (20, 5)), r"slices: \(20, 5\); accepted: widths that add up to 24"),
        ((X, W, PLAN, (24, 0)), "slices"),
        ((X.to("meta"), W.to("meta"), PLAN), "plan.rows: cpu; accepted: meta"),
    ],
)
def test_shrink_refuses_what_does_not_fit(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        triton_ops.shrink(*arguments)


def test_expand_and_wgrad_refuse_ranks_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"u_PR: \(3, 8\); accepted: \(3, 16\), for 2 slices"):
        triton_ops.expand_add(Y, U, W, PLAN, (12, 12))
    with pytest.raises(ValueError, match=r"u_PR: \(3, 8\); accepted: \(3, 6\), for 3 slices"):
        triton_ops.wgrad(U, X, PLAN, (8, 8, 8))
    with pytest.raises(ValueError, match=r"y_TD: .*; accepted: strides \(any, 1\)"):
        triton_ops.expand_add(Y.mT.contiguous().mT, U, W, PLAN)


@pytest.mark.skipif(not triton_ops.available(), reason="Triton is not installed")
def test_tensors_on_the_cpu_are_refused() -> None:
    with pytest.raises(ValueError, match="device: cpu; accepted: a CUDA or ROCm device"):
        triton_ops.shrink(X, W, PLAN)


def test_triton_is_imported_by_a_launch_alone() -> None:
    code = "import sys, opentinker_kernels.triton_ops; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_triton_a_launch_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(launch, "_kernels", launch._kernels.__wrapped__)
    assert not triton_ops.available()
    with pytest.raises(ModuleNotFoundError, match="pip install triton"):
        triton_ops.shrink(X, W, PLAN)


@given(st.integers(1, 100_000), st.integers(1, 200_000), st.integers(1, 512), st.sampled_from([2, 4]))
def test_tiles_fit(n_rows: int, width: int, rank: int, itemsize: int) -> None:
    tiles = shrink_tiles(n_rows, width, rank, itemsize)
    assert (tiles.rows + tiles.rank) * tiles.features * itemsize <= STAGE_BYTES
    assert tiles.split == 1 or width / tiles.split >= 512
    out, grad = expand_tiles(n_rows, rank, itemsize), wgrad_tiles(rank, itemsize)
    assert (out.rows + out.features) * out.rank * itemsize <= STAGE_BYTES
    assert (grad.rank + grad.features) * grad.rows * itemsize <= STAGE_BYTES
    for tile in (tiles, out, grad):  # powers of two, and what tensor cores take
        for side in (tile.rows, tile.rank, tile.features):
            assert side >= 16
            assert side & (side - 1) == 0
