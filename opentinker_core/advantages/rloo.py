"""RLOO (arXiv:2402.14740): each reward against the mean of the others of its group."""

from collections.abc import Sequence

from opentinker_core.advantages.dr_grpo import dr_grpo


def rloo(rewards_G: Sequence[float]) -> list[float]:
    """`A_i = R_i - mean(R without R_i) = G / (G - 1) * (R_i - mean(R))`; G > 1."""
    factor = len(rewards_G) / (len(rewards_G) - 1)
    return [factor * value for value in dr_grpo(rewards_G)]
