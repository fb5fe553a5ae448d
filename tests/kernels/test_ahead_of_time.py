"""What the launchers launch, compiled for GPUs that are not here: pipelined, on tensor cores, no spills.

The launchers run on tensors without memory, and Triton compiles what they would launch.
"""

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opentinker_kernels import triton_ops
from opentinker_kernels.plan import RoutingPlan
from opentinker_kernels.triton_ops import launch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402

from opentinker_kernels.triton_ops import kernels  # noqa: E402

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_MEMORY = {"cuda": 99 * 1024, "hip": 64 * 1024}
TENSOR_CORES = r"mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma"
PIPELINED_LOAD = {"cuda": r"cp\.async\.c[ag]", "hip": r"(global|buffer)_load_dwordx4"}
WIDE_LOAD = {"cuda": r"ld\.global[.\w]*\.v4", "hip": r"(global|buffer)_load_dwordx4"}
WIDE_STORE = {"cuda": r"st\.global[.\w]*\.v4", "hip": r"(global|buffer)_store_dwordx[24]"}
"""AMD's matrix results lie in rows of four, 8 bytes of bfloat16; on NVIDIA they are exchanged before."""


@pytest.fixture
def compiled(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[CompiledKernel]:
    """What the launchers launch during a test, as Triton compiles it for the target of that `name`."""
    everything: list[CompiledKernel] = []

    class Compiler:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: Any, **constants: Any) -> None:
                everything.append(self.kernel.run(*arguments, grid=grid, warmup=True, **constants))

            return launch

    names = ("shrink_kernel", "expand_kernel", "wgrad_kernel", "sum_planes_kernel", "sum_blocks_kernel")
    compilers = {name: Compiler(getattr(kernels, name)) for name in names}
    compiling = SimpleNamespace(INTERPRETED=True, DOT_DTYPES=kernels.DOT_DTYPES, **compilers)
    monkeypatch.setattr(launch, "_kernels", lambda: compiling)
    driver = SimpleNamespace(
        get_current_device=lambda: name,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: TARGETS[name],
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return everything


def tensors(
    n_rows: int, rank: int, width: int, dtype: torch.dtype, n_slices: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, RoutingPlan]:
    """Features, ranks, factors and plan of a layer for 8 slots, in no order and without memory."""
    plan = replace(
        RoutingPlan.of([(row * 5) % 9 - 1 for row in range(n_rows)], device="meta"), invariant=False
    )
    x = torch.empty(n_rows, width, dtype=dtype, device="meta")
    u = torch.empty(plan.n_routed, n_slices * rank, dtype=dtype, device="meta")
    return x, u, torch.empty(8, rank, width, dtype=dtype, device="meta"), plan


def check_resources(kernel: CompiledKernel, target: GPUTarget, directory: Path) -> None:
    """It fits in shared memory and registers."""
    assert kernel.metadata.shared <= SHARED_MEMORY[target.backend]
    if target.backend == "hip":
        spills = re.findall(r"\.[sv]gpr_spill_count: +(\d+)", kernel.asm["amdgcn"])
    else:
        binary = directory / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run(
            [tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
        )
        spills = re.findall(r"(?:STACK|LOCAL):(\d+)", usage.stdout)
    assert len(spills) == 2
    assert set(spills) == {"0"}, f"{spills} spilled"


def text(kernel: CompiledKernel) -> str:
    """The assembly."""
    return kernel.asm.get("ptx") or kernel.asm["amdgcn"]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(("n_rows", "rank"), [(32, 16), (4096, 128)], ids=["decode", "train"])
def test_shrink(name: str, n_rows: int, rank: int, compiled: list[CompiledKernel], tmp_path: Path) -> None:
    x, _, W, plan = tensors(n_rows, rank, 4096, torch.bfloat16)
    triton_ops.shrink(x, W, plan)
    target, kernel = TARGETS[name], compiled[0]
    assert re.search(TENSOR_CORES, text(kernel))
    assert re.search(PIPELINED_LOAD[target.backend], text(kernel))
    check_resources(kernel, target, tmp_path)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(("n_rows", "rank"), [(32, 16), (4096, 128)], ids=["decode", "train"])
def test_expand(name: str, n_rows: int, rank: int, compiled: list[CompiledKernel], tmp_path: Path) -> None:
    """The output, which is most of its traffic, moves 16 bytes at a time."""
    y, u, W, plan = tensors(n_rows, rank, 6144, torch.bfloat16, n_slices=3)
    triton_ops.expand_add(y, u, W, plan, (4096, 1024, 1024))
    target, kernel = TARGETS[name], compiled[0]
    assert re.search(TENSOR_CORES, text(kernel))
    assert re.search(WIDE_LOAD[target.backend], text(kernel))
    assert re.search(WIDE_STORE[target.backend], text(kernel))
    check_resources(kernel, target, tmp_path)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("rank", [16, 128])
def test_wgrad(name: str, rank: int, compiled: list[CompiledKernel], tmp_path: Path) -> None:
    x, u, _, plan = tensors(4096, rank, 4096, torch.bfloat16)
    triton_ops.wgrad(u, x, plan)
    target, kernel = TARGETS[name], compiled[0]
    assert re.search(TENSOR_CORES, text(kernel))
    assert re.search(PIPELINED_LOAD[target.backend], text(kernel))
    check_resources(kernel, target, tmp_path)


@pytest.mark.parametrize("name", ["sm_80", "gfx942"])
def test_float32_fits_too(name: str, compiled: list[CompiledKernel], tmp_path: Path) -> None:
    x, u, W, plan = tensors(4096, 128, 4096, torch.float32)
    triton_ops.shrink(x, W, plan)
    triton_ops.expand_add(x, u, W, plan)
    for kernel in compiled:
        check_resources(kernel, TARGETS[name], tmp_path)


@pytest.mark.parametrize("name", ["sm_90", "gfx942"])
def test_the_ordered_sums_compile(name: str, compiled: list[CompiledKernel], tmp_path: Path) -> None:
    x, u, W, plan = tensors(32, 16, 4096, torch.bfloat16)
    triton_ops.shrink(x, W, plan)
    x, u, _, plan = tensors(20_000, 16, 1024, torch.bfloat16)
    triton_ops.wgrad(u, x, plan)
    sums = [kernel for kernel in compiled if "sum" in kernel.metadata.name]
    assert len(sums) == 2
    for kernel in sums:
        assert "atom" not in text(kernel)
        check_resources(kernel, TARGETS[name], tmp_path)
