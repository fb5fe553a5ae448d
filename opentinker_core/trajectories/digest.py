"""Fingerprints of what was sampled: equal runs give equal token ids, hence equal digests."""

import hashlib
from collections.abc import Iterable

from opentinker_core.trajectories.types import Trajectory


def token_ids_digest(trajectories: Iterable[Trajectory]) -> str:
    """Hex SHA-256 over the tokens and masks of `trajectories`, in order, and over nothing else."""
    digest = hashlib.sha256()
    for trajectory in trajectories:
        digest.update(len(trajectory.tokens_T).to_bytes(8, "little"))
        digest.update(trajectory.tokens_T.astype("<i4").tobytes())
        digest.update(trajectory.mask_T.tobytes())
    return digest.hexdigest()


def combine_digests(digests: Iterable[str]) -> str:
    """Hex SHA-256 over hex digests, in order: the digest of several sets."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()
