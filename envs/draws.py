"""Random draws and splits that depend on nothing but their arguments: the same in every process."""

import hashlib

from envs.protocol import Split

_SALT = 2653
"""Chosen so that of the one-digit problems of each arithmetic operation really a fifth is held out."""


def stable_hash(*parts: int | str) -> int:
    """Hash `parts` to an integer in [0, 2**64)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split_of(problem: str, held_out: float) -> Split:
    """The split a problem belongs to, by its hash alone; a share `held_out` of all problems is held out."""
    return "held_out" if stable_hash("split", _SALT, problem) < held_out * 2**64 else "train"


def draws_needed(split: Split, held_out: float) -> int:
    """Draws after which a split that exists was missed with a probability of less than 1e-12."""
    share = held_out if split == "held_out" else 1 - held_out
    return max(1, round(28 / share)) if share > 0 else 0
