"""One Prefect server for the runs of this room."""

from collections.abc import Iterator

import pytest

from tests.servers import prefect_server


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with prefect_server(tmp_path_factory.mktemp("prefect")) as url:
        yield url
