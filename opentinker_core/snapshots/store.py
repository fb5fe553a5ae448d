"""The snapshot store over a blob store, the same for local files and S3.

Layout below the root: the files of a snapshot at `<key>/<first 16 digits of its digest>/<file>`, its
manifest at `<key>/manifest.json`. The manifest is written last and only if there is none, which
makes the snapshot visible and decides between concurrent writers; as different content has a
different folder, a loser never touches a winner's files. `Snapshot.uri` names the folder, on a
local disk a directory that `peft` and vLLM load as it is.
"""

from pathlib import Path

from opentinker_core.names import check_name
from opentinker_core.snapshots.blobs import BlobMissingError, BlobStore, key_of, open_blob_store
from opentinker_core.snapshots.cache import SnapshotCache
from opentinker_core.snapshots.manifest import MANIFEST_NAME, decode, describe, encode, verify
from opentinker_core.snapshots.protocol import (
    Manifest,
    Snapshot,
    SnapshotConflictError,
    SnapshotError,
    SnapshotKind,
    SnapshotStore,
)


def open_snapshot_store(uri: str, cache: Path, endpoint_url: str = "") -> SnapshotStore:
    """The snapshot store at `uri`: `file:///directory` or `s3://bucket[/prefix]`.

    `cache` is the local directory for downloads from S3; a local store does not use it.

    Raises:
        UsageError: `uri` is neither.
    """
    return BlobSnapshotStore(open_blob_store(uri, endpoint_url), cache)


class BlobSnapshotStore:
    """`SnapshotStore` over any `BlobStore`."""

    def __init__(self, blobs: BlobStore, cache: Path) -> None:
        self.uri = blobs.uri
        self._blobs = blobs
        self._cache = SnapshotCache(cache)

    def publish(self, key: tuple[str, ...], kind: SnapshotKind, directory: Path) -> Snapshot:
        """See `SnapshotStore.publish`."""
        place = "/".join(check_name("snapshot key", part) for part in key)
        before = _stamps(directory)
        manifest = describe(kind, directory)
        published = self._manifest_at(place)
        if published is None:
            for file in manifest.files:
                self._blobs.put(f"{_folder(place, manifest)}/{file.name}", directory / file.name)
            if _stamps(directory) != before:
                raise SnapshotError(f"{directory} changed while it was published")
            if self._blobs.put_if_absent(f"{place}/{MANIFEST_NAME}", encode(manifest)):
                published = manifest
            else:
                published = self._manifest_at(place)
        if published is None:
            raise SnapshotError(f"{self.uri}/{place} was deleted while it was published; publish it again")
        if published.digest != manifest.digest:
            raise SnapshotConflictError(
                f"{self.uri}/{place} holds other content already: {published.digest[:16]}, "
                f"not {manifest.digest[:16]}"
            )
        size = sum(file.size for file in manifest.files)
        return Snapshot(manifest.kind, f"{self.uri}/{_folder(place, manifest)}", manifest.digest, size)

    def manifest(self, uri: str) -> Manifest:
        """See `SnapshotStore.manifest`."""
        return self._find(uri)[1]

    def fetch(self, uri: str, digest: str | None = None) -> Path:
        """See `SnapshotStore.fetch`."""
        folder, manifest = self._find(uri)
        if digest is not None and manifest.digest != digest:
            raise SnapshotError(f"{uri} has the digest {manifest.digest}, not {digest}")
        directory = self._blobs.local_path(folder)
        if directory is None:
            return self._cache.directory(
                manifest, lambda name, target: self._blobs.get(f"{folder}/{name}", target)
            )
        verify(directory, manifest)
        return directory

    def delete(self, uri: str) -> None:
        """See `SnapshotStore.delete`."""
        place, name = _parts(uri, self.uri)
        folder = f"{place}/{name}"
        manifest = self._manifest_at(place)
        if manifest is not None and manifest.digest.startswith(name):
            self._blobs.delete(f"{place}/{MANIFEST_NAME}")
        for key in self._blobs.list(folder):
            # Only the snapshot's own files: below the folder may lie other keys.
            if "/" not in key.removeprefix(f"{folder}/") and not key.endswith(f"/{MANIFEST_NAME}"):
                self._blobs.delete(key)

    def _find(self, uri: str) -> tuple[str, Manifest]:
        """The folder's key and the manifest of a published snapshot."""
        place, name = _parts(uri, self.uri)
        manifest = self._manifest_at(place)
        if manifest is None:
            raise SnapshotError(f"{uri}: there is no such snapshot")
        folder = _folder(place, manifest)
        if folder != f"{place}/{name}":
            raise SnapshotError(f"{uri}: there is no such snapshot; its key holds {manifest.digest[:16]} now")
        return folder, manifest

    def _manifest_at(self, place: str) -> Manifest | None:
        key = f"{place}/{MANIFEST_NAME}"
        try:
            content = self._blobs.read(key)
        except BlobMissingError:
            return None
        return decode(content, f"{self.uri}/{key}")


def _folder(place: str, manifest: Manifest) -> str:
    return f"{place}/{manifest.digest[:16]}"


def _parts(uri: str, root: str) -> tuple[str, str]:
    """The key and the folder's name of a snapshot URI."""
    place, _, name = key_of(uri, root).rpartition("/")
    if not place:
        raise SnapshotError(f"{uri!r:.200} is not the URI of a snapshot")
    return place, name


def _stamps(directory: Path) -> dict[str, tuple[int, int, int]]:
    """What changes when a file of the directory is written again."""
    try:
        found = {path.name: path.lstat() for path in directory.iterdir()}
    except OSError as error:
        raise SnapshotError(f"cannot read {error.filename}: {error.strerror or error}") from error
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}
