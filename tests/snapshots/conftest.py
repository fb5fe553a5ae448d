"""Every kind of store, ready to be opened: local files, and S3 as moto speaks it over HTTP."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from opentinker_core.snapshots.blobs import BlobStore, open_blob_store
from opentinker_core.snapshots.protocol import SnapshotStore
from opentinker_core.snapshots.store import BlobSnapshotStore, open_snapshot_store
from tests.servers import S3_CREDENTIALS, new_bucket, s3_server


class Place:
    """Where a store lies; opens it as often as asked."""

    def __init__(self, uri: str, cache: Path, endpoint: str) -> None:
        self.uri, self.cache, self.endpoint = uri, cache, endpoint

    def store(self) -> SnapshotStore:
        return open_snapshot_store(self.uri, self.cache, self.endpoint)

    def blobs(self) -> BlobStore:
        return open_blob_store(self.uri, self.endpoint)

    def store_over(self, blobs: BlobStore) -> SnapshotStore:
        return BlobSnapshotStore(blobs, self.cache)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3_CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.servers)])
def place(request: pytest.FixtureRequest, tmp_path: Path, s3_credentials: None) -> Place:
    if request.param == "local":
        return Place((tmp_path / "store room").as_uri(), tmp_path / "cache", "")
    endpoint = request.getfixturevalue("s3_endpoint")
    return Place(f"s3://{new_bucket(endpoint)}/some/prefix", tmp_path / "cache", endpoint)


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return Place((tmp_path / "store").as_uri(), tmp_path / "cache", "")


def local_folder(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path))
