"""LoRA kernels over rank-major factors, for rows of many adapters at once.

Three operations serve forward and backward: `shrink`, `expand_add`, `wgrad` (see `reference`); a
`RoutingPlan` says which rows use which adapter slot. This package imports torch, and triton on GPUs.
"""

from opentinker_kernels.plan import NO_SLOT, RoutingPlan, Segment

__all__ = ["NO_SLOT", "RoutingPlan", "Segment"]
