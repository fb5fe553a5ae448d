"""Every kind of trajectory store: local files, and S3 as moto speaks it over HTTP."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opentinker_core.trajectories.store import TrajectoryStore
from tests.servers import S3_CREDENTIALS, new_bucket, s3_server

OpenStore = Callable[[], TrajectoryStore]


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.servers)])
def open_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenStore:
    if request.param == "local":
        uri, endpoint = (tmp_path / "sets").as_uri(), ""
    else:
        for name, value in S3_CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        endpoint = request.getfixturevalue("s3_endpoint")
        uri = f"s3://{new_bucket(endpoint)}/some/prefix"
    return lambda: TrajectoryStore(uri, tmp_path / "cache", endpoint_url=endpoint)
