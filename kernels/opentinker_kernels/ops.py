"""The three LoRA operations, by device: Triton kernels on GPUs (CUDA, ROCm), torch on the CPU.

One module-level function each, used by the autograd function of the trainer and by the sampler alike.
"""

from types import ModuleType

from torch import Tensor

from opentinker_kernels import cpu
from opentinker_kernels.plan import RoutingPlan


def shrink(x_TD: Tensor, W_SRD: Tensor, plan: RoutingPlan, slices: tuple[int, ...] = ()) -> Tensor:
    """See `reference.shrink`."""
    return _backend(x_TD).shrink(x_TD, W_SRD, plan, slices)


def expand_add(
    y_TD: Tensor, u_PR: Tensor, W_SRD: Tensor, plan: RoutingPlan, slices: tuple[int, ...] = ()
) -> None:
    """See `reference.expand_add`."""
    _backend(y_TD).expand_add(y_TD, u_PR, W_SRD, plan, slices)


def wgrad(u_PR: Tensor, x_TD: Tensor, plan: RoutingPlan, slices: tuple[int, ...] = ()) -> Tensor:
    """See `reference.wgrad`."""
    return _backend(x_TD).wgrad(u_PR, x_TD, plan, slices)


def _backend(tensor: Tensor) -> ModuleType:
    if tensor.device.type != "cuda":
        return cpu
    from opentinker_kernels import triton_ops  # imports triton

    return triton_ops
