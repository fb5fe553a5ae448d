"""LoRA adapters over a shared frozen base model.

Axes: R rank, K input features, N output features. Factors are rank-major (`A_RK`, `Bt_RN`), as
the kernels want them; PEFT's layout exists only in files.
"""
