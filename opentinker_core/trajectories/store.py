"""Stored sets of trajectories: one Parquet file a set, named after its content.

A set lies at `<key>/<first 16 digits of its digest>.parquet`. Saving the same set again changes nothing;
another set under the same key gets a file of its own, so that nothing recorded is ever replaced.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opentinker_core.names import check_name
from opentinker_core.snapshots.blobs import BlobMissingError, BlobStore, key_of, open_blob_store
from opentinker_core.snapshots.local import LocalBlobStore
from opentinker_core.trajectories.errors import TrajectoryError, TrajectoryStoreError
from opentinker_core.trajectories.parquet import decode, encode
from opentinker_core.trajectories.types import Trajectory

_SUFFIX = ".parquet"


@dataclass(frozen=True)
class StoredSet:
    """A reference to a stored set; small enough to travel between tasks."""

    uri: str
    digest: str
    """Hex SHA-256 of the file."""
    episodes: int
    """Number of trajectories."""
    tokens: int
    """Tokens that the agents generated."""


class TrajectoryStore:
    """Writes sets atomically and hands them out verified.

    Args:
        uri: `file:///directory` or `s3://bucket[/prefix]`.
        cache: local directory for copies of a remote store's sets; a local store does not use it.
        endpoint_url: an S3-compatible server; empty: AWS.

    Raises:
        UsageError: `uri` is neither.
    """

    def __init__(self, uri: str, cache: Path, endpoint_url: str = "") -> None:
        self._blobs: BlobStore = open_blob_store(uri, endpoint_url)
        self._cache = LocalBlobStore(cache)
        self.uri = self._blobs.uri

    def save(self, key: tuple[str, ...], trajectories: Sequence[Trajectory]) -> StoredSet:
        """Store a set under `key`, e.g. `("run-1f2e", "s00003-train")`; repeatable.

        Raises:
            UsageError: a part of the key is not a safe name.
            TrajectoryError: no trajectories, two with one id, or one whose `info` is not JSON.
            BlobError: the store cannot be written.
        """
        _check_ids(trajectories)
        content = encode(trajectories)
        digest = hashlib.sha256(content).hexdigest()
        place = "/".join([*(check_name("trajectory key", part) for part in key), digest[:16] + _SUFFIX])
        # What lies there under this digest can only differ if it was damaged: write it anew.
        if not self._blobs.put_if_absent(place, content) and self._blobs.read(place) != content:
            self._blobs.put(place, content)
        tokens = sum(trajectory.sampled_tokens for trajectory in trajectories)
        return StoredSet(f"{self.uri}/{place}", digest, len(trajectories), tokens)

    def load(
        self, uri: str, digest: str | None = None, rows: Sequence[int] | None = None
    ) -> list[Trajectory]:
        """The trajectories of a set, in the order saved; the file's SHA-256 is verified.

        Without `digest` it is verified against the digits in the URI. `rows` picks some, by position.

        Raises:
            BlobMissingError: there is no such set; BlobError: it lies outside the store or cannot
                be read.
            TrajectoryStoreError: the file is not what its digest or its format says.
        """
        key = key_of(uri, self.uri)
        name = key.rpartition("/")[2]
        expected = digest or name.removesuffix(_SUFFIX)
        content = self._blobs.read(key) if self._is_local(key) else self._read_cached(key, name, expected)
        found = hashlib.sha256(content).hexdigest()
        if not found.startswith(expected):
            raise TrajectoryStoreError(
                f"{uri}: its SHA-256 is {found}, not {expected}: damaged or another set"
            )
        return decode(content, uri, rows)

    def _is_local(self, key: str) -> bool:
        return self._blobs.local_path(key) is not None

    def _read_cached(self, key: str, name: str, expected: str) -> bytes:
        try:
            content = self._cache.read(name)
            if hashlib.sha256(content).hexdigest().startswith(expected):
                return content
        except BlobMissingError:
            pass
        content = self._blobs.read(key)
        self._cache.put(name, content)
        return content


def _check_ids(trajectories: Sequence[Trajectory]) -> None:
    if not trajectories:
        raise TrajectoryError("trajectories", [], "at least one")
    name, count = Counter(trajectory.trajectory_id for trajectory in trajectories).most_common(1)[0]
    if count > 1:
        raise TrajectoryError("trajectory_id", name, "unique within a set")
