"""The kernel benchmark compares equal work, counts its bytes, and needs a GPU only to measure."""

import json
import sys

import pytest
import torch

from benchmarks import kernel_cases, kernel_peers, kernels
from benchmarks.kernel_cases import POPULARITIES, Arguments, Case, make_arguments
from opentinker_kernels import reference


@pytest.fixture(params=[0.0, 0.5, 1.0], ids=lambda share: f"base={share}")
def arguments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Arguments:
    """A small layer with three slices and adapters of three ranks."""
    monkeypatch.setitem(kernel_cases.LAYERS, "small", (32, (32, 16, 16)))
    case = Case("small", 24, 4, 0, "uniform", request.param)
    return make_arguments(case, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("peer", ["torch_loop", "grouped_mm", "dense", "peft_adapter_names"])
def test_peers_compute_what_the_reference_does(peer: str, arguments: Arguments) -> None:
    with torch.inference_mode():
        call = kernel_peers.FORWARD[peer](arguments)
        for _ in range(2):  # a second call does not add to the first
            call()
    torch.testing.assert_close(arguments.y_TN, arguments.expected(), rtol=1e-5, atol=1e-5)


def test_the_loops_input_gradient_is_that_of_the_reference(arguments: Arguments) -> None:
    kernel_peers.BACKWARD["torch_loop"](arguments)()
    expected_TK = arguments.dy_TN @ arguments.base_NK
    for b in arguments.buckets:
        du_PR = reference.shrink(arguments.dy_TN, b.Bt_SRN, b.plan, arguments.slices)
        reference.expand_add(expected_TK, du_PR, b.A_SRK, b.plan)
    torch.testing.assert_close(arguments.dx_TK, expected_TK, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_rows_name_adapters_that_exist(popularity: str) -> None:
    adapters = Case("qkv", 100, 8, 16, popularity, 0.25).adapters_T()
    assert len(adapters) == 100
    assert set(adapters) <= set(range(-1, 8))
    assert 5 < adapters.count(-1) < 50


def test_bytes_are_those_of_the_adapters_in_use_at_their_own_rank() -> None:
    case = Case("qkv", 2, 2, 8, "identical", 0.0)
    factors, x, y, u = 8 * (3 * 4096 + 6144), 2 * 4096, 2 * 6144, 2 * 3 * 8
    assert case.lora_bytes() == 2 * (factors + x + 2 * y + 2 * u)
    assert case.lora_flops() == 2 * 2 * factors


@pytest.mark.parametrize("arguments", [0.0], indirect=True)
def test_the_report_says_what_was_compared_and_why_not(
    arguments: Arguments, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU, with a clock that gives each way its seconds."""
    seconds = iter([1.0, 1.5, 3.0, 1.0, 1.5, 3.0])
    monkeypatch.setitem(kernel_peers.FORWARD, "opentinker", kernel_peers.dense)
    monkeypatch.setattr(kernels, "measure", lambda calls, captured=True: next(seconds))
    monkeypatch.setattr(kernels, "argument_sets", lambda case: [arguments])
    monkeypatch.setattr(kernels, "peak_bandwidth", lambda: 1e9)
    monkeypatch.setattr(kernels, "peak_flops", lambda: 1e12)
    report = kernels.Report(["opentinker", "torch_loop", "vllm"], backward=False)
    for _ in range(2):
        report.measure(Case("small", 24, 4, 0, "uniform", 0.0))
    report.show(as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["ratios"] == {"over_torch_loop": 2.0}
    label = "small T=24 n=4 r=mixed uniform base=0.0"
    assert told["measured"][f"{label} opentinker"] == {"value": 50.0, "unit": "% over base"}
    assert told["measured"][f"{label} torch_loop"]["value"] == 200.0
    assert told["measured"]["torch_loop compared in"] == {"value": 2, "unit": "cases"}
    assert told["measured"]["vllm compared in"]["value"] == 0
    assert "No module named 'vllm'" in told["measured"]["vllm compared in"]["unit"]


@pytest.mark.parametrize("arguments", [0.0], indirect=True)
def test_a_peer_that_computes_something_else_is_not_compared(arguments: Arguments) -> None:
    with pytest.raises(AssertionError, match="differs from the reference"):
        kernels.check("base", kernel_peers.base(arguments), arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_stops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels.py"])
    kernels.main()
    assert capsys.readouterr().out.startswith("no CUDA or ROCm device")
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--json"])
    kernels.main()
    told = json.loads(capsys.readouterr().out)
    assert told["ratios"] == {}
    assert "no CUDA" in told["reason"]
