"""Runs of a deployment, started by hand and by its schedule, do on the pool what a run in-process does."""

from pathlib import Path

import pytest

from docs.screenshots import Servers
from opentinker_core.policies.types import RunStatus
from opentinker_core.runtime.workspace import Workspace
from tests.flows.pooled import pool_of
from tests.runtime.runs import CONFIG, small_config, train, workspace_at

pytestmark = [pytest.mark.servers, pytest.mark.processes]


def _outcome(workspace: Workspace, run_id: str) -> list[tuple[object, ...]]:
    versions = workspace.catalog.run_versions(run_id)
    return [(version.step, version.sampler.digest, version.metrics) for version in versions]


def test_the_pool_gives_the_tokens_and_losses_of_the_process(pool: Servers, tmp_path: Path) -> None:
    parameters = {"config": CONFIG}
    with pool_of(pool.prefect_url, pool.home, "warm-up-then-rl/tiny-rl") as deployment:
        by_hand = deployment.start(parameters)
        with deployment.scheduled(parameters) as by_schedule:
            here = train(tmp_path / "here", small_config())
            deployment.completed(by_hand, by_schedule)
    expected = _outcome(here.workspace, here.run.run_id)
    workspace = workspace_at(pool.home)
    runs = {run.flow_run_id: run for run in workspace.catalog.runs()}
    for flow_run in (by_hand, by_schedule):
        run = runs[str(flow_run)]
        assert (run.name, run.status) == (CONFIG["name"], RunStatus.COMPLETED)
        assert _outcome(workspace, run.run_id) == expected
