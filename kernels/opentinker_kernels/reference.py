"""The torch reference of the LoRA update `y += scaling * (x A^T) Bt` (Hu et al., arXiv:2106.09685)."""

import torch
from torch import Tensor


def shrink(x_TK: Tensor, A_RK: Tensor) -> Tensor:
    """Project rows to the rank space: `u_TR = x A^T`, in the dtype of the factors."""
    return torch.nn.functional.linear(x_TK.to(A_RK.dtype), A_RK)


def expand_add(y_TN: Tensor, u_TR: Tensor, Bt_RN: Tensor, scaling: float) -> Tensor:
    """Return `y + scaling * u Bt`, accumulated in the factors' dtype and rounded once to y's.

    In inference mode (no gradient recorded) y is updated in place where the dtypes allow it.
    """
    if y_TN.dtype != Bt_RN.dtype:
        return torch.addmm(y_TN.to(Bt_RN.dtype), u_TR, Bt_RN, alpha=scaling).to(y_TN.dtype)
    if torch.is_grad_enabled():
        return torch.addmm(y_TN, u_TR, Bt_RN, alpha=scaling)
    return y_TN.addmm_(u_TR, Bt_RN, alpha=scaling)
