"""The courier delivers beside the run, and ends with it, however the run ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from opentinker_core.lineage.courier import Courier
from opentinker_core.policies.catalog import Catalog
from opentinker_core.runtime.workspace import Workspace
from tests.runtime.runs import small_config, train, workspace_at
from tests.waiting import wait_until

pytestmark = pytest.mark.processes

_PARENT = """
import sys, time
from pathlib import Path
from opentinker_core.lineage.courier import Courier
from tests.runtime.runs import workspace_at
courier = Courier(workspace_at(Path(sys.argv[1])))
print(courier.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def trained(tmp_path: Path) -> Workspace:
    """A finished run that MLflow has not heard of."""
    return train(tmp_path, small_config(sft=None, record={"mlflow": True})).workspace


def test_it_delivers_everything_before_it_is_closed(trained: Workspace) -> None:
    assert trained.catalog.pending_events()
    courier = Courier(trained)
    assert courier.close() == 0
    assert trained.catalog.pending_events() == []


def test_what_it_leaves_is_counted_when_it_dies(trained: Workspace) -> None:
    courier = Courier(trained)
    os.kill(courier.pid, signal.SIGKILL)
    courier._process.wait()
    assert courier.close() == len(trained.catalog.pending_events()) > 0


def test_it_outlives_a_killed_run_only_to_deliver(trained: Workspace) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(trained.home)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    courier = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_until(lambda: not Path(f"/proc/{courier}").exists(), "the end of the courier")
    catalog = Catalog(workspace_at(trained.home).settings.resolved_catalog_url)
    assert catalog.pending_events() == []
