"""The mirror through a real MLflow server: REST behaves differently from a database opened directly."""

import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from opentinker_core.lineage.outbox import OutboxDispatcher, Outcome
from opentinker_core.lineage.recorder import MLflowRecorder
from opentinker_core.lineage.tracking import Tracking, TrackingTarget, connect
from opentinker_core.runtime.workspace import Workspace
from tests.lineage.test_recorder import contents, deliver, everything, model_versions, run_of
from tests.lineage.training import Training, open_workspace
from tests.servers import free_port
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.servers, pytest.mark.processes]


class Server:
    """An MLflow server that can be stopped and started again on the same database and port."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.home}/mlflow.db"]
        command += ["--artifacts-destination", str(self.home / "served")]
        with (self.home / "server.log").open("ab") as log:
            quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
            environment = {**os.environ, **quiet}
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        wait_until(lambda: self._answers() or self.process.poll() is not None, "MLflow", poll_s=0.1)
        assert self.process.poll() is None, (self.home / "server.log").read_text()[-2000:]

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, 15)
            self.process.wait(PATIENCE_S)
            self.process = None

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=20)
        except OSError:
            return False
        return True


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("server")
    shutil.copy(mlflow_template, home / "mlflow.db")
    server = Server(home)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def served(server: Server, tmp_path: Path) -> Workspace:
    return open_workspace(tmp_path, server.url)


def recorder_of(workspace: Workspace, server: Server) -> MLflowRecorder:
    return MLflowRecorder(TrackingTarget(server.url, None), workspace.catalog, workspace.trajectories)


@pytest.fixture
def remote(server: Server) -> Tracking:
    return connect(TrackingTarget(server.url, None))


def test_events_delivered_twice_change_nothing(served: Workspace, server: Server, remote: Tracking) -> None:
    training = everything(served)
    served.catalog.set_alias("adder", "best", 1)
    events = served.catalog.pending_events()
    for event in events:
        recorder_of(served, server).record([event])
    once = contents(remote, training)
    assert (once["runs"], once["status"], sorted(once["versions"])) == (1, "FINISHED", ["0", "1", "2"])
    assert [spans for _, spans, _ in once["traces"]].count(3) == 2
    assert [rewards for _, _, rewards in once["traces"]] == [1, 1, 1, 1]
    recorder_of(served, server).record(events)
    assert contents(remote, training) == once
    by_alias = remote.client.get_model_version_by_alias("policy.adder", "best")
    assert by_alias.tags["ot.version"] == "1"
    assert remote.client.get_registered_model("policy.adder").tags["ot.alias.latest"] == "2"
    assert "lineage.json" in [
        one.path for one in remote.client.list_artifacts(run_of(remote, training).info.run_id)
    ]


def test_a_local_snapshot_is_registered_by_digest_where_the_server_refuses_paths(
    served: Workspace, server: Server, remote: Tracking
) -> None:
    training = Training(served, policy="local")
    deliver(OutboxDispatcher(served.catalog, recorder_of(served, server)))
    registered = model_versions(remote, "local")["0"]
    assert registered.source == f"snapshot:/{training.version.sampler.digest}"
    assert registered.tags["ot.snapshot_uri"] == training.version.sampler.uri


def test_a_server_that_stops_and_returns_gets_everything_in_order(
    served: Workspace, server: Server, remote: Tracking
) -> None:
    dispatcher = OutboxDispatcher(
        served.catalog, recorder_of(served, server), backoff_s=(0.1, 0.5), poll_s=0.1
    )
    training = Training(served, policy="patient")
    dispatcher.start()
    wait_until(lambda: not dispatcher.pending(), "the end of the deliveries")
    server.stop()
    try:
        started = time.monotonic()
        training.step()
        training.step()
        assert time.monotonic() - started < 60  # MLflow's client alone would try for minutes
        wait_until(lambda: dispatcher.last and dispatcher.last.outcome is Outcome.OUTAGE, "the outage")
        assert [event.attempts for event in dispatcher.pending()] == [0, 0]
    finally:
        server.start()
    assert dispatcher.close(PATIENCE_S) == 0
    assert sorted(model_versions(remote, "patient")) == ["0", "1", "2"]
    history = remote.client.get_metric_history(run_of(remote, training).info.run_id, "loss")
    assert [one.step for one in history] == [1, 2]
