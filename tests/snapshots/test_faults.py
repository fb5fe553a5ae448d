"""Disks that are full or read-only, servers that are away, forgetful or strict: one clear error each."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from opentinker_core.errors import UsageError
from opentinker_core.snapshots.blobs import BlobError, open_blob_store
from opentinker_core.snapshots.local import LocalBlobStore
from opentinker_core.snapshots.protocol import SnapshotError, SnapshotKind
from opentinker_core.snapshots.store import open_snapshot_store
from tests.disks import make_read_only, small_disk
from tests.servers import free_port, new_bucket, s3_server
from tests.snapshots.conftest import Place, local_folder

KEY = ("adder-1f2e", "v000012", "sampler")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(os.urandom(2 << 20))
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as folder:
        yield folder


def test_full_disk(disk: Path, tmp_path: Path, source: Path) -> None:
    store = open_snapshot_store((disk / "store").as_uri(), tmp_path / "cache")
    with pytest.raises(SnapshotError, match=rf"cannot write {disk}/store/.*No space left on device"):
        store.publish(KEY, SnapshotKind.SAMPLER, source)
    assert not [path for path in (disk / "store").rglob("*") if path.is_file()]
    (source / "adapter_model.safetensors").write_bytes(b"small enough")
    snapshot = store.publish(KEY, SnapshotKind.SAMPLER, source)
    assert store.fetch(snapshot.uri, snapshot.digest).is_dir()


def test_full_disk_of_the_cache(disk: Path, source: Path, s3_endpoint: str, s3_credentials: None) -> None:
    uri = f"s3://{new_bucket(s3_endpoint)}"
    store = open_snapshot_store(uri, disk / "cache", s3_endpoint)
    snapshot = store.publish(KEY, SnapshotKind.SAMPLER, source)
    with pytest.raises(SnapshotError, match=rf"cannot write {disk}/cache/.*No space left on device"):
        store.fetch(snapshot.uri)
    assert not list((disk / "cache").rglob("*.safetensors"))


def test_file_size_limit(local: Place, source: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from opentinker_core.snapshots.store import open_snapshot_store\n"
        "from opentinker_core.snapshots.protocol import SnapshotError, SnapshotKind\n"
        "store = open_snapshot_store(sys.argv[1], Path('unused'))\n"
        "try: store.publish(('key',), SnapshotKind.SAMPLER, Path(sys.argv[2]))\n"
        "except SnapshotError as error: print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, local.uri, str(source)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    )
    assert result.stdout.startswith(f"cannot write {local_folder(local.uri)}/key/"), result.stderr
    assert "File too large" in result.stdout
    assert not local.blobs().list()


def test_read_only_directory(disk: Path, tmp_path: Path, source: Path) -> None:
    make_read_only(disk)
    store = open_snapshot_store(disk.as_uri(), tmp_path / "cache")
    with pytest.raises(SnapshotError, match=rf"cannot write {disk}/.*Read-only file system"):
        store.publish(KEY, SnapshotKind.SAMPLER, source)


def test_a_file_where_the_store_should_be(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = open_snapshot_store((tmp_path / "file" / "store").as_uri(), tmp_path / "cache")
    with pytest.raises(SnapshotError, match=rf"{tmp_path}/file/store"):
        store.publish(KEY, SnapshotKind.SAMPLER, source)


def test_missing_source(local: Place, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=f"cannot read {tmp_path}/nowhere"):
        local.store().publish(KEY, SnapshotKind.SAMPLER, tmp_path / "nowhere")


def test_a_source_that_changes_meanwhile_is_not_published(local: Place, source: Path) -> None:
    class Writing(LocalBlobStore):
        def put(self, key: str, written: Path | bytes) -> None:
            super().put(key, written)
            (source / "adapter_model.safetensors").write_bytes(b"changed")

    store = local.store_over(Writing(local_folder(local.uri)))
    with pytest.raises(SnapshotError, match="changed while it was published"):
        store.publish(KEY, SnapshotKind.SAMPLER, source)
    assert not local.blobs().exists("/".join(KEY) + "/manifest.json")


def test_a_damaged_cache_is_downloaded_again(
    source: Path, tmp_path: Path, s3_endpoint: str, s3_credentials: None
) -> None:
    store = open_snapshot_store(f"s3://{new_bucket(s3_endpoint)}", tmp_path / "cache", s3_endpoint)
    snapshot = store.publish(KEY, SnapshotKind.SAMPLER, source)
    cached = store.fetch(snapshot.uri) / "adapter_model.safetensors"
    cached.write_bytes(cached.read_bytes()[:-1])
    again = store.fetch(snapshot.uri) / "adapter_model.safetensors"
    assert again.read_bytes() == (source / "adapter_model.safetensors").read_bytes()


def test_a_local_fetch_copies_nothing(local: Place, source: Path) -> None:
    snapshot = local.store().publish(KEY, SnapshotKind.SAMPLER, source)
    assert local.store().fetch(snapshot.uri) == local_folder(snapshot.uri)
    assert not local.cache.exists()


def test_leftovers_of_killed_writers_are_swept_after_a_day(local: Place, source: Path) -> None:
    staging = local_folder(local.uri) / ".staging"
    staging.mkdir(parents=True)
    for name, age in (("old", 25 * 3600), ("young", 60)):
        (staging / name).write_text("torn")
        os.utime(staging / name, (time.time() - age,) * 2)
    local.store().publish(KEY, SnapshotKind.SAMPLER, source)
    assert [path.name for path in staging.iterdir()] == ["young"]


@pytest.mark.parametrize(
    "uri", ["/plain/path", "s3://", "gs://bucket/x", "file://host/x", "file:relative", ""]
)
def test_other_uris_are_refused(uri: str) -> None:
    with pytest.raises(UsageError, match="accepted: 'file:///directory' or 's3://bucket/prefix'"):
        open_blob_store(uri)


@pytest.mark.parametrize(
    "key", ["", "/", "a//b", "../a", "a/..", "/a", "a\0", "n" * 64, "a/" * 500 + "a", "a\\b c"]
)
def test_hostile_keys_are_refused(place: Place, key: str) -> None:
    blobs = place.blobs()
    with pytest.raises(UsageError, match="key: "):
        blobs.put(key, b"")
    with pytest.raises(UsageError, match="key: "):
        blobs.put_if_absent(key, b"")
    with pytest.raises(UsageError, match="key: "):
        blobs.read(key)
    with pytest.raises(UsageError, match="key: "):
        blobs.delete(key)


def test_blobs_are_listed_by_folder(place: Place) -> None:
    blobs = place.blobs()
    for key in ("a/b/c", "a/b2", "a/b/d", "e"):
        blobs.put(key, key.encode())
    assert blobs.list() == ["a/b/c", "a/b/d", "a/b2", "e"]
    assert blobs.list("a/b") == ["a/b/c", "a/b/d"]
    assert blobs.list("nowhere") == []
    blobs.delete("a/b/c")
    blobs.delete("a/b/c")
    assert not blobs.exists("a/b/c")
    assert blobs.exists("a/b/d")


@pytest.mark.servers
class TestS3:
    """What can be wrong with a server."""

    def test_server_away(self, source: Path, tmp_path: Path, s3_credentials: None) -> None:
        endpoint = f"http://127.0.0.1:{free_port()}"
        store = open_snapshot_store("s3://bucket/x", tmp_path / "cache", endpoint)
        with pytest.raises(SnapshotError, match=f"cannot read s3://bucket/x/.*{endpoint} cannot be reached"):
            store.publish(KEY, SnapshotKind.SAMPLER, source)

    def test_missing_bucket(
        self, s3_endpoint: str, source: Path, tmp_path: Path, s3_credentials: None
    ) -> None:
        store = open_snapshot_store("s3://no-such-bucket", tmp_path / "cache", s3_endpoint)
        with pytest.raises(SnapshotError, match="there is no bucket 'no-such-bucket'"):
            store.publish(KEY, SnapshotKind.SAMPLER, source)

    def test_wrong_credentials(
        self, source: Path, tmp_path: Path, s3_credentials: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAWRONG")
        with s3_server(checks_credentials=True) as endpoint:
            store = open_snapshot_store("s3://bucket", tmp_path / "cache", endpoint)
            with pytest.raises(
                SnapshotError, match=r"refused the credentials .InvalidAccessKeyId.; check AWS_"
            ):
                store.publish(KEY, SnapshotKind.SAMPLER, source)

    def test_no_credentials(
        self, s3_endpoint: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HOME", str(tmp_path))
        store = open_snapshot_store("s3://bucket", tmp_path / "cache", s3_endpoint)
        with pytest.raises(SnapshotError, match="no S3 credentials; set AWS_ACCESS_KEY_ID"):
            store.publish(KEY, SnapshotKind.SAMPLER, source)

    def test_a_server_that_ignores_conditions_is_refused(
        self, source: Path, tmp_path: Path, s3_credentials: None
    ) -> None:
        with s3_server(forgetful=True) as endpoint:
            uri = f"s3://{new_bucket(endpoint)}"
            store = open_snapshot_store(uri, tmp_path / "cache", endpoint)
            with pytest.raises(BlobError, match="ignores the condition 'If-None-Match"):
                store.publish(KEY, SnapshotKind.SAMPLER, source)
            assert not [key for key in open_blob_store(uri, endpoint).list() if key.endswith("manifest.json")]

    def test_an_endpoint_that_is_no_url(self) -> None:
        with pytest.raises(UsageError, match="S3 endpoint: 'nonsense'; accepted: an http"):
            open_blob_store("s3://bucket", "nonsense")
