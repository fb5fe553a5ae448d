"""The LoRA operations in Triton, for NVIDIA and AMD GPUs: the same signatures as the reference.

Importing this package does not import Triton; calling one of its operations does.
"""

from opentinker_kernels.triton_ops.launch import available, expand_add, shrink, wgrad

__all__ = ["available", "expand_add", "shrink", "wgrad"]
