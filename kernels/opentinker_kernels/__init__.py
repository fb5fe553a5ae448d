"""LoRA kernels over rank-major factors `A_RK` (shrink) and `Bt_RN` (expand).

Axes: T rows (tokens), K input features, N output features, R rank. This package imports torch
only; the reference below is what every faster implementation is compared with.
"""

from opentinker_kernels.reference import expand_add, shrink

__all__ = ["expand_add", "shrink"]
