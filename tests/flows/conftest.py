"""One Prefect server for all tests of this room, and an installation of its own for each test."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.programs import Program
from tests.servers import prefect_server


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API URL of a real Prefect server, used by flows that run in this process too."""
    with prefect_server(tmp_path_factory.mktemp("prefect")) as url:
        os.environ["PREFECT_API_URL"] = url
        from prefect.settings import (
            PREFECT_API_URL,
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
            temporary_settings,
        )

        with temporary_settings({PREFECT_API_URL: url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            yield url
            hand_over_what_is_left()
        del os.environ["PREFECT_API_URL"]


def hand_over_what_is_left() -> None:
    """What this process still holds for the server would be tried in vain at the end of the tests."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogHandler

    EventsWorker.drain_all(timeout=5)
    APILogHandler().flush()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh `OPENTINKER_HOME`."""
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    """Starts `opentinker` with arguments and more environment; what runs still after the test is killed."""
    started = []

    def start(*arguments: str, **environment: str) -> Program:
        started.append(Program(arguments, {**os.environ, **environment}))
        return started[-1]

    yield start
    for program in started:
        program.kill()
        program.wait()
