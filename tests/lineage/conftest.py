"""An installation of its own for each test; MLflow's tables are created once, and copied."""

import shutil
from pathlib import Path

import pytest

from opentinker_core.lineage.outbox import OutboxDispatcher
from opentinker_core.lineage.recorder import MLflowRecorder
from opentinker_core.lineage.tracking import Tracking, connect, tracking_target
from opentinker_core.runtime.workspace import Workspace
from tests.lineage.training import open_workspace


@pytest.fixture(autouse=True)
def _no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of the developer's own servers do not leak into the tests."""
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "PREFECT_UI_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def mlflow_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = open_workspace(tmp_path_factory.mktemp("mlflow"))
    connect(tracking_target(workspace.settings))
    return workspace.home / "mlflow.db"


@pytest.fixture
def workspace(tmp_path: Path, mlflow_template: Path) -> Workspace:
    shutil.copy(mlflow_template, tmp_path / "mlflow.db")
    return open_workspace(tmp_path)


@pytest.fixture
def tracking(workspace: Workspace) -> Tracking:
    """MLflow as a reader sees it."""
    return connect(tracking_target(workspace.settings))


@pytest.fixture
def recorder(workspace: Workspace) -> MLflowRecorder:
    return recorder_of(workspace)


def recorder_of(workspace: Workspace) -> MLflowRecorder:
    return MLflowRecorder(tracking_target(workspace.settings), workspace.catalog, workspace.trajectories)


@pytest.fixture
def dispatcher(workspace: Workspace, recorder: MLflowRecorder) -> OutboxDispatcher:
    return OutboxDispatcher(workspace.catalog, recorder, max_attempts=2, backoff_s=(0.02, 0.1), poll_s=0.05)
