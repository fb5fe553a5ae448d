"""Triton LoRA kernels and their torch reference."""
