"""What the benchmark calls ours is the whole forward and backward pass of a layer."""

import pytest
import torch

from benchmarks import kernel_cases, kernel_peers
from benchmarks.kernel_cases import Case, make_arguments


@pytest.mark.parametrize("invariant", [True, False])
def test_ours_equals_the_reference_and_the_loop(monkeypatch: pytest.MonkeyPatch, invariant: bool) -> None:
    monkeypatch.setitem(kernel_cases.LAYERS, "small", (32, (32, 16, 16)))
    case = Case("small", 24, 4, 0, "zipf", 0.25)
    ours, loop = (
        make_arguments(case, torch.device("cpu"), torch.float32, invariant=invariant) for _ in range(2)
    )
    kernel_peers.FORWARD["opentinker"](ours)()
    torch.testing.assert_close(ours.y_TN, ours.expected(), rtol=1e-5, atol=1e-5)
    kernel_peers.BACKWARD["opentinker"](ours)()
    kernel_peers.BACKWARD["torch_loop"](loop)()
    torch.testing.assert_close(ours.dx_TK, loop.dx_TK, rtol=1e-5, atol=1e-5)
