"""Mixed-adapter LoRA on one layer of an 8B model, on a GPU: our kernels against their peers.

Every way runs the frozen base layer and the LoRA update; what counts is the time over the base layer
alone. Calls over several copies of the tensors, larger than the L2 cache together, are captured in a CUDA
graph and replayed; medians. Achieved bandwidth is the bytes that the update must move (active adapters
at their own ranks, x, y twice, u twice) by that extra time; the roofline is the larger of bytes by the
bandwidth of a copy and operations by the speed of a large product, both measured here. Every way's
result is compared with the reference first, and ours with itself to the bit.

    python benchmarks/kernels.py [--json] [--full] [--backward] [--layers ...] [--rows ...] [--peers ...]

Without a CUDA or ROCm device it says so and stops.
"""

import argparse
import gc
import itertools
import json
from collections.abc import Sequence
from statistics import median

import torch

from benchmarks.kernel_cases import LAYERS, POPULARITIES, Arguments, Case, make_arguments
from benchmarks.kernel_peers import BACKWARD, FORWARD, Call, backward_base, base
from benchmarks.report import show

REPLAYS = 100
WARM_UP = 10
TOLERANCE = 0.03
"""Largest difference to float32 products that bfloat16 may make, relative to the largest value."""
EAGER = ("peft_adapter_names",)
"""Peers that copy indices from the host as they go, which a graph cannot."""
NOT_HERE = (ImportError, AttributeError, TypeError, ValueError, AssertionError, RuntimeError)
"""What a peer raises that is not installed, has another signature by now, or does not take the case."""


def measure(calls: Sequence[Call], *, captured: bool = True) -> float:
    """Median seconds of a call, each on tensors of its own, captured in a graph or made one by one."""

    def call_all() -> None:
        for call in calls:
            call()

    call_all()
    torch.cuda.synchronize()
    replay = call_all
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call_all()
        replay = graph.replay
    times = []
    for _ in range(WARM_UP + REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / len(calls))
    return median(times[WARM_UP:])


def peak_bandwidth() -> float:
    """Bytes a second of a copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / measure([lambda: target.copy_(source)])


def peak_flops() -> float:
    """Operations a second of a large product in bfloat16."""
    n = 8192
    left, right = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * n**3 / measure([lambda: torch.mm(left, right)])


def argument_sets(case: Case) -> list[Arguments]:
    """Copies of a case's tensors whose base weights alone are four times the L2 cache."""
    n_in, slices = LAYERS[case.layer]
    cache = torch.cuda.get_device_properties("cuda").L2_cache_size
    copies = max(2, -(-4 * cache // (2 * n_in * sum(slices))))
    return [make_arguments(case, torch.device("cuda")) for _ in range(copies)]


def check(name: str, call: Call, a: Arguments) -> None:
    """Raise AssertionError unless a forward call gives the reference's y; ours twice the same bits."""
    call()
    y_TN, expected_TN = a.y_TN.clone(), a.expected()
    error = (y_TN.float() - expected_TN).abs().max() / expected_TN.abs().max()
    if not error <= TOLERANCE:
        raise AssertionError(f"differs from the reference by {error:.2g}")
    call()
    if name == "opentinker" and not torch.equal(a.y_TN, y_TN):
        raise AssertionError("two runs differ")


class Report:
    """Rows and ratios as they come."""

    def __init__(self, peers: Sequence[str], *, backward: bool) -> None:
        self.peers, self.backward = peers, backward
        self.bandwidth, self.flops = peak_bandwidth(), peak_flops()
        self.rows = [
            ("copy", self.bandwidth / 1e9, "GB/s"),
            ("bfloat16 product", self.flops / 1e12, "TFLOP/s"),
        ]
        self.speedups: dict[str, list[float]] = {}
        self.compared = dict.fromkeys(peers, 0)
        self.failed: dict[str, str] = {}

    def measure(self, case: Case) -> None:
        """All peers on one case."""
        sets = argument_sets(case)
        base_s = measure([(backward_base if self.backward else base)(a) for a in sets])
        label = f"{case} backward" if self.backward else str(case)
        self.rows.append((f"{label} base", base_s * 1e6, "us"))
        seconds = {name: s for name in self.peers if (s := self._peer(name, sets)) is not None}
        for name, s in seconds.items():
            self.compared[name] += 1
            self.rows.append((f"{label} {name}", 100 * (s - base_s) / base_s, "% over base"))
            if name != "opentinker" and "opentinker" in seconds:
                self.speedups.setdefault(f"over_{name}", []).append(s / seconds["opentinker"])
        if "opentinker" in seconds and not self.backward:
            extra_s = max(seconds["opentinker"] - base_s, 1e-9)
            least_s = max(case.lora_bytes() / self.bandwidth, case.lora_flops() / self.flops)
            self.rows.append((f"{label} opentinker moves", case.lora_bytes() / extra_s / 1e9, "GB/s"))
            self.rows.append((f"{label} opentinker roofline", 100 * least_s / extra_s, "%"))

    def _peer(self, name: str, sets: list[Arguments]) -> float | None:
        """Seconds of a call, or None where it cannot be compared."""
        if name in self.failed:
            return None
        prepare = (BACKWARD if self.backward else FORWARD)[name]
        try:
            with torch.inference_mode():
                calls = [prepare(a) for a in sets]
                if not self.backward:
                    check(name, calls[0], sets[0])
                return measure(calls, captured=name not in EAGER)
        except NOT_HERE as error:
            if name == "opentinker":
                raise
            self.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            return None
        finally:
            gc.collect()
            torch.cuda.empty_cache()

    def show(self, *, as_json: bool) -> None:
        """Print everything, and for each peer how often it could be compared and why no more."""
        for name in self.peers:
            unit = f"cases, then {self.failed[name]}" if name in self.failed else "cases"
            self.rows.append((f"{name} compared in", self.compared[name], unit))
        show("kernels", self.rows, {k: median(v) for k, v in self.speedups.items()}, as_json=as_json)


def cases(arguments: argparse.Namespace) -> list[Case]:
    """The product of what was asked for; without --full, what decides: decoding, mixed batches, training."""
    axes = [arguments.layers, arguments.rows, arguments.adapters, arguments.ranks]
    axes += [arguments.popularity, arguments.base_fraction]
    return [Case(*point) for point in itertools.product(*axes)]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--full", action="store_true", help="all points of all axes: hours")
    parser.add_argument("--backward", action="store_true", help="gradients instead of the forward pass")
    parser.add_argument("--layers", nargs="+", choices=LAYERS)
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--adapters", nargs="+", type=int)
    parser.add_argument("--ranks", nargs="+", type=int, help="0: 8, 16 and 64 in turn")
    parser.add_argument("--popularity", nargs="+", choices=POPULARITIES)
    parser.add_argument("--base-fraction", nargs="+", type=float)
    parser.add_argument("--peers", nargs="+", choices=FORWARD)
    arguments = parser.parse_args()
    short = {
        "layers": ["qkv", "down"],
        "rows": [1, 32, 256, 1072, 8192],
        "adapters": [1, 16],
        "ranks": [16, 0],
        "popularity": ["uniform"],
        "base_fraction": [0.0],
    }
    full = {
        "layers": list(LAYERS),
        "rows": [1, 8, 32, 64, 256, 1072, 8192],
        "adapters": [1, 4, 16, 64],
        "ranks": [8, 16, 64, 0],
        "popularity": list(POPULARITIES),
        "base_fraction": [0.0, 0.5],
    }
    for axis, points in (full if arguments.full else short).items():
        if getattr(arguments, axis) is None:
            setattr(arguments, axis, points)
    return arguments


def main() -> None:
    """Measure, and print the table or the object."""
    arguments = parse()
    if not torch.cuda.is_available():
        reason = "no CUDA or ROCm device: the kernels are measured on a GPU"
        print(
            json.dumps({"benchmark": "kernels", "ratios": {}, "reason": reason}) if arguments.json else reason
        )
        return
    available = BACKWARD if arguments.backward else FORWARD
    peers = [name for name in arguments.peers or available if name in available]
    report = Report(peers, backward=arguments.backward)
    for case in cases(arguments):
        report.measure(case)
    report.show(as_json=arguments.json)


if __name__ == "__main__":
    main()
