"""A server of the model of sums, as `opentinker serve`, and clients that find the cookbook."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from opentinker_core.config.settings import Settings
from tests.forked import Forks
from tests.servers import free_port
from tests.service.cookbook import installation, model
from tests.service.cookbook.workspace import MODEL, Workspace
from tests.service.processes import Server, serve


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory, sums: Path) -> Workspace:
    try:
        packages = installation.ensure(Settings().home)
    except installation.NotInstallableError as error:
        pytest.skip(str(error))
    return Workspace.make(tmp_path_factory.mktemp("workspace"), packages, sums)


@pytest.fixture(scope="session")
def sums() -> Path:
    """The directory of a model that answers sums sometimes."""
    return model.ensure(Settings().home)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, sums: Path) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    config = home / "serve.yaml"
    config.write_text(f"models: [{{model: {sums}, name: {MODEL}}}]\n")
    with serve(home, str(config), f"port={free_port()}") as server:
        yield server


@pytest.fixture(scope="session")
def python(workspace: Workspace, server: Server) -> Iterator[Forks]:
    """Runs recipes as clients of the server."""
    with workspace.python(server.url, server.said["key"]) as python:
        yield python
