"""Both stores keep every promise; a store that breaks one is found out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opentinker_core.snapshots import conformance
from opentinker_core.snapshots.protocol import Manifest, Snapshot, SnapshotKind
from tests.snapshots.conftest import Place


def flip_a_byte(place: Place, snapshot: Snapshot, name: str) -> None:
    key = f"{snapshot.uri.removeprefix(place.uri + '/')}/{name}"
    content = bytearray(place.blobs().read(key))
    content[len(content) // 2] ^= 1
    place.blobs().put(key, bytes(content))


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_store_conforms(
    place: Place, tmp_path: Path, check: Callable[[conformance.OpenStore, Path], None]
) -> None:
    check(place.store, tmp_path)


def test_store_refuses_damage(place: Place, tmp_path: Path) -> None:
    conformance.check_refuses_damage(
        place.store, tmp_path, lambda snapshot, name: flip_a_byte(place, snapshot, name)
    )


def test_the_whole_suite_runs_as_a_third_party_would_call_it(local: Place, tmp_path: Path) -> None:
    conformance.check_store(local.store, tmp_path, lambda snapshot, name: flip_a_byte(local, snapshot, name))


class Delegating:
    """A store that does what a good one does; the broken ones below change one thing."""

    def __init__(self, place: Place) -> None:
        self.place, self.inner = place, place.store()
        self.uri = self.inner.uri

    def publish(self, key: tuple[str, ...], kind: SnapshotKind, directory: Path) -> Snapshot:
        return self.inner.publish(key, kind, directory)

    def manifest(self, uri: str) -> Manifest:
        return self.inner.manifest(uri)

    def fetch(self, uri: str, digest: str | None = None) -> Path:
        return self.inner.fetch(uri, digest)

    def delete(self, uri: str) -> None:
        self.inner.delete(uri)


class LastWriterWins(Delegating):
    def publish(self, key: tuple[str, ...], kind: SnapshotKind, directory: Path) -> Snapshot:
        self.place.blobs().delete("/".join(key) + "/manifest.json")
        return self.inner.publish(key, kind, directory)


class IgnoresDigest(Delegating):
    def fetch(self, uri: str, digest: str | None = None) -> Path:
        return self.inner.fetch(uri)


class NeverVerifies(Delegating):
    def fetch(self, uri: str, digest: str | None = None) -> Path:
        folder = self.place.blobs().local_path(uri.removeprefix(self.uri + "/"))
        assert folder is not None
        return folder


class KeepsDeleted(Delegating):
    def delete(self, uri: str) -> None:
        pass


class AcceptsAnyKey(Delegating):
    def publish(self, key: tuple[str, ...], kind: SnapshotKind, directory: Path) -> Snapshot:
        return self.inner.publish(tuple(str(hash(part)).strip("-") for part in key), kind, directory)


@pytest.mark.parametrize(
    "broken", [LastWriterWins, IgnoresDigest, NeverVerifies, KeepsDeleted, AcceptsAnyKey]
)
def test_suite_finds_a_broken_store(local: Place, tmp_path: Path, broken: Any) -> None:
    with pytest.raises(conformance.ConformanceError, match="broken promise"):
        conformance.check_store(
            lambda: broken(local), tmp_path, lambda snapshot, name: flip_a_byte(local, snapshot, name)
        )
