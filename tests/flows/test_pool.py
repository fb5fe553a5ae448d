"""Runs of a deployment, started by hand and by its schedule, do on the pool what a run in-process does."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from docs.screenshots import Servers
from opentinker_core.policies.types import Run, RunStatus
from opentinker_core.runtime.workspace import Workspace
from tests.runtime.runs import CONFIG, small_config, train, workspace_at
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.servers, pytest.mark.processes]

DEPLOYMENT = "warm-up-then-rl/tiny-rl"


def _start_by_hand(api: str, parameters: dict[str, Any]) -> None:
    given = [f"--param={name}={json.dumps(value)}" for name, value in parameters.items()]
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "deployment", "run", DEPLOYMENT, *given],
        env=os.environ | {"PREFECT_API_URL": api},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@contextmanager
def _started_by_schedule(api: str, parameters: dict[str, Any]) -> Iterator[None]:
    """For a block, a schedule whose next time is so far off that a busy server has seen it by then."""
    found = httpx.get(f"{api}/deployments/name/{DEPLOYMENT}", timeout=PATIENCE_S).raise_for_status().json()
    soon = (datetime.now(UTC) + timedelta(seconds=40)).isoformat()
    schedule = {"interval": 86400, "anchor_date": soon, "timezone": "UTC"}
    body = [{"schedule": schedule, "active": True, "parameters": parameters}]
    schedules = f"{api}/deployments/{found['id']}/schedules"
    made = httpx.post(schedules, json=body, timeout=PATIENCE_S).raise_for_status().json()
    yield
    for one in made:
        httpx.delete(f"{schedules}/{one['id']}", timeout=PATIENCE_S).raise_for_status()


def _completed(workspace: Workspace, count: int) -> list[Run]:
    def completed() -> list[Run]:
        ours = [run for run in workspace.catalog.runs() if run.name == CONFIG["name"]]
        return [run for run in ours if run.status is RunStatus.COMPLETED]

    wait_until(lambda: len(completed()) >= count, f"the end of {count} runs", poll_s=0.5)
    return completed()


def _outcome(workspace: Workspace, run_id: str) -> list[tuple[object, ...]]:
    versions = workspace.catalog.run_versions(run_id)
    return [(version.step, version.sampler.digest, version.metrics) for version in versions]


def test_the_pool_gives_the_tokens_and_losses_of_the_process(pool: Servers, tmp_path: Path) -> None:
    api, parameters = f"{pool.prefect_url}/api", {"config": CONFIG}
    workspace = workspace_at(pool.home)
    with _started_by_schedule(api, parameters):
        _start_by_hand(api, parameters)
        here = train(tmp_path / "here", small_config())
        runs = _completed(workspace, 2)
    expected = _outcome(here.workspace, here.run.run_id)
    for run in runs:
        assert _outcome(workspace, run.run_id) == expected
        assert run.flow_run_id
