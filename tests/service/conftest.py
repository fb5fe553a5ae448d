"""One server for all tests of a module; no telemetry of the SDK."""

import os
from collections.abc import Iterator

import pytest

from tests.service.live import Live, serving

os.environ["TINKER_TELEMETRY"] = "0"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("home")) as live:
        yield live
