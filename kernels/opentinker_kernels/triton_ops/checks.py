"""What the launchers accept. The kernels do not look at bounds that hold here, and would write anywhere."""

import torch
from torch import Tensor

from opentinker_kernels.plan import RoutingPlan

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def checked_widths(name: str, x_TD: Tensor, plan: RoutingPlan, slices: tuple[int, ...]) -> tuple[int, ...]:
    """The widths of the slices of a layer's features `x_TD`: one of full width where none are given.

    Raises:
        ValueError: Features, plan and slices do not fit.
    """
    _check_tensor(name, x_TD, x_TD.device)
    _expect(
        x_TD.ndim == 2 and len(x_TD) == plan.n_rows,
        name,
        tuple(x_TD.shape),
        f"({plan.n_rows}, D), rows as planned",
    )
    widths = slices or (x_TD.shape[1],)
    _expect(
        min(widths) > 0 and sum(widths) == x_TD.shape[1],
        "slices",
        slices,
        f"widths that add up to {x_TD.shape[1]}",
    )
    if plan.rows is not None:
        _expect(plan.rows.device == x_TD.device, "plan.rows", plan.rows.device, str(x_TD.device))
    return widths


def check_factor(W_SRD: Tensor, x_TD: Tensor, plan: RoutingPlan) -> None:
    """Raise ValueError unless W holds rank-major factors of the features of x, for all slots of the plan."""
    _check_tensor("W_SRD", W_SRD, x_TD.device)
    n_slots, n_features = max(plan.slots, default=-1) + 1, x_TD.shape[1]
    fits = W_SRD.ndim == 3 and len(W_SRD) >= n_slots and W_SRD.shape[2] == n_features
    _expect(fits, "W_SRD", tuple(W_SRD.shape), f"(slots, rank, {n_features}), at least {n_slots} slots")
    _expect(W_SRD.stride(2) == 1, "W_SRD", W_SRD.stride(), "strides (any, any, 1)")


def check_ranks(u_PR: Tensor, x_TD: Tensor, plan: RoutingPlan, rank: int, n_slices: int) -> None:
    """Raise ValueError unless u has a row for each routed row, and `rank` columns a slice."""
    _check_tensor("u_PR", u_PR, x_TD.device)
    accepted = (plan.n_routed, n_slices * rank)
    _expect(u_PR.shape == accepted, "u_PR", tuple(u_PR.shape), f"{accepted}, for {n_slices} slices")


def check_output(y_TD: Tensor) -> None:
    """Raise ValueError unless y can be written row by row."""
    _expect(y_TD.stride(1) == 1, "y_TD", y_TD.stride(), "strides (any, 1)")


def _check_tensor(name: str, tensor: Tensor, device: torch.device) -> None:
    _expect(tensor.dtype in DTYPES, name, tensor.dtype, ", ".join(map(str, DTYPES)))
    _expect(tensor.device == device, name, tensor.device, str(device))


def _expect(fits: bool, name: str, value: object, accepted: str) -> None:
    if not fits:
        raise ValueError(f"{name}: {value}; accepted: {accepted}")
