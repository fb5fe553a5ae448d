"""What the launchers accept. The kernels do not look at bounds that hold here, and would write anywhere."""

from typing import NoReturn

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
    if x_TD.ndim != 2 or len(x_TD) != plan.n_rows:
        _refuse(name, tuple(x_TD.shape), f"({plan.n_rows}, D), rows as planned")
    if plan.rows is not None and plan.rows.device != x_TD.device:
        _refuse("plan.rows", plan.rows.device, x_TD.device)
    widths = slices or (x_TD.shape[1],)
    if min(widths) < 1 or sum(widths) != x_TD.shape[1]:
        _refuse("slices", slices, f"widths that add up to {x_TD.shape[1]}")
    return widths


def check_factor(W_SRD: Tensor, x_TD: Tensor, plan: RoutingPlan) -> None:
    """Raise ValueError unless W holds rank-major factors of the features of x, for all slots of the plan."""
    _check_tensor("W_SRD", W_SRD, x_TD.device)
    n_slots, n_features = plan.cached("n_slots", lambda: max(plan.slots, default=-1) + 1), x_TD.shape[1]
    if W_SRD.ndim != 3 or len(W_SRD) < n_slots or W_SRD.shape[2] != n_features:
        _refuse("W_SRD", tuple(W_SRD.shape), f"(slots, rank, {n_features}), at least {n_slots} slots")
    if W_SRD.stride(2) != 1:
        _refuse("W_SRD", W_SRD.stride(), "strides (any, any, 1)")


def check_ranks(u_PR: Tensor, x_TD: Tensor, plan: RoutingPlan, rank: int, n_slices: int) -> None:
    """Raise ValueError unless u has a row for each routed row, and `rank` columns a slice."""
    _check_tensor("u_PR", u_PR, x_TD.device)
    accepted = (plan.n_routed, n_slices * rank)
    if u_PR.shape != accepted:
        _refuse("u_PR", tuple(u_PR.shape), f"{accepted}, for {n_slices} slices")


def check_output(y_TD: Tensor) -> None:
    """Raise ValueError unless y can be written row by row."""
    if y_TD.stride(1) != 1:
        _refuse("y_TD", y_TD.stride(), "strides (any, 1)")


def _check_tensor(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.dtype not in DTYPES:
        _refuse(name, tensor.dtype, ", ".join(map(str, DTYPES)))
    if tensor.device != device:
        _refuse(name, tensor.device, device)


def _refuse(name: str, value: object, accepted: object) -> NoReturn:
    raise ValueError(f"{name}: {value}; accepted: {accepted}")
