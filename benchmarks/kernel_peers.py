"""Ways to run one layer with the adapters of a mixed batch; each is prepared once, then called.

A call does the base layer and the LoRA update, so that caches are as they are in a model and the base
alone is what everyone is compared with. What builds its own index tensors does so when prepared.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from benchmarks.kernel_cases import Arguments
from opentinker_kernels import triton_ops
from opentinker_kernels.plan import NO_SLOT

Call = Callable[[], None]


def base(a: Arguments) -> Call:
    """The base layer alone."""
    return a.base


def opentinker(a: Arguments) -> Call:
    """Ours: shrink and expand, for each rank bucket."""

    def call() -> None:
        a.base()
        for bucket in a.buckets:
            u_PR = triton_ops.shrink(a.x_TK, bucket.A_SRK, bucket.plan)
            triton_ops.expand_add(a.y_TN, u_PR, bucket.Bt_SRN, bucket.plan, a.slices)

    return call


def torch_loop(a: Arguments) -> Call:
    """Two products for each adapter and slice, on its rows."""
    members = _members(a)

    def call() -> None:
        a.base()
        for adapter, rows in members:
            x_LK, B_parts = a.x_TK[rows], a.Bt[adapter].split(a.slices, dim=1)
            y_parts = [x_LK @ A_RK.T @ Bt_RN for A_RK, Bt_RN in zip(a.A[adapter], B_parts, strict=True)]
            a.y_TN.index_add_(0, rows, torch.cat(y_parts, dim=1))

    return call


def grouped_mm(a: Arguments) -> Call:
    """`torch.nn.functional.grouped_mm` on sorted rows, at the largest rank."""
    A_nsRK, Bt_nRN = a.padded()
    n_slices, rank = A_nsRK.shape[1:3]
    A_nKR = A_nsRK.flatten(1, 2).transpose(1, 2)
    Bt_parts = [part.contiguous() for part in Bt_nRN.split(a.slices, dim=2)]
    members = _members(a)
    rows = torch.cat([rows for _, rows in members]) if members else None
    lengths = {adapter: len(rows) for adapter, rows in members}
    counts = torch.tensor([lengths.get(adapter, 0) for adapter in range(len(a.A))])
    ends = counts.cumsum(0).to(a.x_TK.device, torch.int32)

    def call() -> None:
        a.base()
        if rows is None:
            return
        u_PR = torch.nn.functional.grouped_mm(a.x_TK[rows], A_nKR, offs=ends)
        u_parts = [part.contiguous() for part in u_PR.split([rank] * n_slices, dim=1)]
        y_parts = [
            torch.nn.functional.grouped_mm(u, Bt, offs=ends) for u, Bt in zip(u_parts, Bt_parts, strict=True)
        ]
        a.y_TN.index_add_(0, rows, torch.cat(y_parts, dim=1))

    return call


def dense(a: Arguments) -> Call:
    """All rows times all adapters, what is not a row's own masked out."""
    A_nsRK, Bt_nRN = a.padded()
    n, n_slices, rank, _ = A_nsRK.shape
    A_sCK, Bt_CN = A_nsRK.transpose(0, 1).flatten(1, 2), Bt_nRN.flatten(0, 1)
    Bt_parts = [part.contiguous() for part in Bt_CN.split(a.slices, dim=1)]
    y_parts = a.y_TN.split(a.slices, dim=1)
    adapters_T = torch.tensor(a.adapters_T, device=a.x_TK.device)
    column_adapters = torch.arange(n, device=a.x_TK.device).repeat_interleave(rank)
    others_TC = adapters_T[:, None] != column_adapters

    def call() -> None:
        a.base()
        for j in range(n_slices):
            u_TC = (a.x_TK @ A_sCK[j].T).masked_fill(others_TC, 0)
            y_parts[j].addmm_(u_TC, Bt_parts[j])

    return call


def peft_adapter_names(a: Arguments) -> Call:
    """PEFT's mixed batch: `adapter_names`, one for each row, in inference mode."""
    from peft import LoraConfig, get_peft_model

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = torch.nn.ModuleList()
            for base_nK in a.base_NK.split(a.slices):
                linear = torch.nn.Linear(base_nK.shape[1], base_nK.shape[0], bias=False, device="meta")
                linear.weight = torch.nn.Parameter(base_nK, requires_grad=False)
                self.linears.append(linear)

        def forward(self, x_T1K: Tensor) -> Tensor:
            return torch.cat([linear(x_T1K) for linear in self.linears], dim=2)

    names = [f"adapter{i}" for i in range(len(a.A))]
    targets = [f"linears.{j}" for j in range(len(a.slices))]
    configs = [LoraConfig(r=Bt.shape[0], lora_alpha=Bt.shape[0], target_modules=targets) for Bt in a.Bt]
    model = get_peft_model(Layers(), configs[0], adapter_name=names[0], autocast_adapter_dtype=False)
    for name, config in zip(names[1:], configs[1:], strict=True):
        model.add_adapter(name, config, autocast_adapter_dtype=False)
    model = model.to(a.x_TK.device, a.x_TK.dtype).eval()
    for i, name in enumerate(names):
        for j, Bt_RN in enumerate(a.Bt[i].split(a.slices, dim=1)):
            layer = model.base_model.model.linears[j]
            layer.lora_A[name].weight.data.copy_(a.A[i][j])
            layer.lora_B[name].weight.data.copy_(Bt_RN.T)
    row_names = ["__base__" if i == NO_SLOT else names[i] for i in a.adapters_T]

    def call() -> None:
        a.y_TN.copy_(model(a.x_TK[:, None], adapter_names=row_names)[:, 0])

    return call


def vllm(a: Arguments) -> Call:
    """vLLM's `lora_shrink` and `lora_expand`, at the largest rank."""
    from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink, utils

    for strides_by_address in (utils._LORA_A_PTR_DICT, utils._LORA_B_PTR_DICT):
        strides_by_address.clear()  # addresses come again, with other shapes
    A_nsRK, Bt_nRN = a.padded()
    n, n_slices, rank, _ = A_nsRK.shape
    As = [A_nsRK[:, j].contiguous() for j in range(n_slices)]
    Bs = [part.transpose(1, 2).contiguous() for part in Bt_nRN.split(a.slices, dim=2)]
    n_rows, device = len(a.x_TK), a.x_TK.device
    meta = LoRAKernelMeta.make(n, n_rows, device=device)
    meta.prepare_tensors(torch.tensor(a.adapters_T, dtype=torch.int32, device=device))
    later = "specialize_active_lora" in inspect.signature(meta.meta_args).parameters
    arguments = meta.meta_args(n_rows, *([False] if later else []))
    u_sTR = torch.zeros(n_slices, n_rows, rank, dtype=torch.float32, device=device)

    def call() -> None:
        a.base()
        lora_shrink(a.x_TK, As, u_sTR, *arguments, 1.0)
        lora_expand(u_sTR, Bs, a.y_TN, *arguments, offset_start=0, add_inputs=True)

    return call


def sglang(a: Arguments) -> Call:
    """SGLang's chunked shrink and expand, at the largest rank, in chunks of 16 rows."""
    from sglang.srt.lora.triton_ops import (
        chunked_sgmv_lora_expand_forward,
        chunked_sgmv_lora_shrink_forward,
    )
    from sglang.srt.lora.utils import LoRABatchInfo

    chunk, device = 16, a.x_TK.device
    A_nsRK, Bt_nRN = a.padded()
    n, n_slices, rank, _ = A_nsRK.shape
    A_nCK, B_nNR = A_nsRK.flatten(1, 2).contiguous(), Bt_nRN.transpose(1, 2).contiguous()
    chunks = [(adapter, part) for adapter, rows in _members(a) for part in rows.split(chunk)]
    lengths = torch.tensor([len(part) for _, part in chunks], dtype=torch.int32)
    offsets = torch.tensor([0, *a.slices]).cumsum(0).to(device, torch.int32)
    every_field = {
        "use_cuda_graph": False,
        "bs": len(chunks),
        "num_segments": len(chunks),
        "max_len": chunk,
        "seg_lens": lengths.to(device),
        "seg_indptr": torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(device, torch.int32),
        "weight_indices": torch.tensor([i for i, _ in chunks], dtype=torch.int32, device=device),
        "lora_ranks": torch.full((n,), rank, dtype=torch.int64, device=device),
        "scalings": torch.ones(n, device=device),
        "permutation": torch.cat([part for _, part in chunks]).to(device, torch.int32),
    }
    known = {field.name for field in fields(LoRABatchInfo)}
    batch = LoRABatchInfo(**{name: value for name, value in every_field.items() if name in known})

    def call() -> None:
        a.base()
        u_TC = chunked_sgmv_lora_shrink_forward(a.x_TK, A_nCK, batch, n_slices)
        chunked_sgmv_lora_expand_forward(u_TC, B_nNR, batch, offsets, max(a.slices), a.y_TN)

    return call


def backward_base(a: Arguments) -> Call:
    """The gradient of the base layer's input alone."""
    return a.base_backward


def backward_opentinker(a: Arguments) -> Call:
    """Ours: dU and dX, dA and dBt; U is computed again, as with gradient checkpointing."""

    def call() -> None:
        a.base_backward()
        for b in a.buckets:
            u_PR = triton_ops.shrink(a.x_TK, b.A_SRK, b.plan)
            du_PR = triton_ops.shrink(a.dy_TN, b.Bt_SRN, b.plan, a.slices)
            triton_ops.expand_add(a.dx_TK, du_PR, b.A_SRK, b.plan)
            triton_ops.wgrad(du_PR, a.x_TK, b.plan)
            triton_ops.wgrad(u_PR, a.dy_TN, b.plan, a.slices)

    return call


def backward_torch_loop(a: Arguments) -> Call:
    """The same products, adapter by adapter."""
    members = _members(a)

    def call() -> None:
        a.base_backward()
        for adapter, rows in members:
            x_LK, dy_parts = a.x_TK[rows], a.dy_TN[rows].split(a.slices, dim=1)
            for A_RK, Bt_RN, dy in zip(
                a.A[adapter], a.Bt[adapter].split(a.slices, dim=1), dy_parts, strict=True
            ):
                du_LR = dy @ Bt_RN.T
                a.dx_TK.index_add_(0, rows, du_LR @ A_RK)
                (du_LR.T @ x_LK).float()
                ((x_LK @ A_RK.T).T @ dy).float()

    return call


FORWARD = {
    peer.__name__: peer
    for peer in (opentinker, torch_loop, grouped_mm, dense, peft_adapter_names, vllm, sglang)
}
BACKWARD = {"opentinker": backward_opentinker, "torch_loop": backward_torch_loop}


def _members(a: Arguments) -> list[tuple[int, Tensor]]:
    """(adapter, its rows) of each adapter that has any."""
    adapters_T = torch.tensor(a.adapters_T)
    return [
        (adapter, (adapters_T == adapter).nonzero()[:, 0].to(a.x_TK.device))
        for adapter in range(len(a.A))
        if (adapters_T == adapter).any()
    ]
