"""Runs of a deployment on a pool: started by hand and by a schedule, waited for, and told of if they fail."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tests.waiting import PATIENCE_S, wait_until

_RETRIES = 8
"""Of a request, with waits that double: minutes, for a server whose SQLite is locked (503)."""

_DAY = timedelta(days=1)
_MOST_LINES = 60


class Pool:
    """A deployment on a running `opentinker up --workers`, whose logs are under `home`."""

    def __init__(self, client: SyncPrefectClient, api: str, home: Path, deployment: str) -> None:
        self._client, self._api, self._home, self._name = client, api, home, deployment
        self._deployment = client.read_deployment_by_name(deployment)

    def start(self, parameters: dict[str, Any]) -> UUID:
        """Start a run as the documentation says; returns the flow run's id."""
        given = [f"--param={name}={json.dumps(value)}" for name, value in parameters.items()]
        settings = {"PREFECT_API_URL": self._api, "PREFECT_CLIENT_MAX_RETRIES": str(_RETRIES)}
        done = subprocess.run(
            [sys.executable, "-m", "prefect", "deployment", "run", self._name, *given],
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        found = re.search(r"UUID: ([0-9a-f-]{36})", done.stdout)
        assert found, done.stderr + done.stdout
        return UUID(found[1])

    @contextmanager
    def scheduled(self, parameters: dict[str, Any]) -> Iterator[UUID]:
        """The flow run that a schedule starts within a minute or so; its schedule stays for the block.

        A time that has passed before the server's scheduler saw the schedule is passed over until the next
        day: then the schedule is made anew, with a later time.
        """
        ahead = timedelta(seconds=15)
        while True:
            schedule, run = self._next(ahead, parameters)
            try:
                if run.expected_start_time - datetime.now(UTC) < _DAY / 2:
                    yield run.id
                    return
            finally:
                self._client.delete_deployment_schedule(self._deployment.id, schedule)
            ahead *= 2

    def _next(self, ahead: timedelta, parameters: dict[str, Any]) -> tuple[UUID, FlowRun]:
        """A new daily schedule, and the first of the runs that the server makes for it."""
        times = IntervalSchedule(interval=_DAY, anchor_date=datetime.now(UTC) + ahead, timezone="UTC")
        wanted = DeploymentScheduleCreate(schedule=times, active=True, parameters=parameters)
        (made,) = self._client.create_deployment_schedules(self._deployment.id, [wanted])
        # The scheduler looks every minute for schedules, and every five seconds at deployments just updated.
        same = DeploymentUpdate(description=self._deployment.description)
        self._client.update_deployment(self._deployment.id, same)
        runs: list[FlowRun] = []
        wait_until(lambda: runs.extend(self._runs_of(made.id)) or runs, "a run of the schedule", poll_s=0.5)
        return made.id, min(runs, key=lambda run: run.expected_start_time)

    def _runs_of(self, schedule: UUID) -> list[FlowRun]:
        ours = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[self._deployment.id]))
        runs = self._client.read_flow_runs(flow_run_filter=ours)
        return [run for run in runs if run.created_by is not None and run.created_by.id == schedule]

    def completed(self, *runs: UUID) -> None:
        """Return once all of `runs` are completed.

        Raises:
            AssertionError: one ended otherwise, or not at all; with the states and logs of all of them.
        """

        def ended() -> bool:
            states = [self._client.read_flow_run(run).state for run in runs]
            failed = [state for state in states if state and state.is_final() and not state.is_completed()]
            assert not failed, f"not completed: {failed}"
            return all(state is not None and state.is_completed() for state in states)

        try:
            wait_until(ended, f"the end of {len(runs)} runs", poll_s=0.5)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *map(self._story, runs), *self._tails()])) from None
        except httpx.HTTPError as error:  # the server is gone
            raise AssertionError("\n".join([repr(error), *self._tails()])) from error

    def _story(self, run: UUID) -> str:
        """Which states a flow run was in, and what it logged."""
        states = sorted(self._client.read_flow_run_states(run), key=lambda state: state.timestamp)
        of_run = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run]))
        logs = self._client.read_logs(of_run, limit=_MOST_LINES)
        told = [f"{state.timestamp:%H:%M:%S} {state.name}: {state.message}" for state in states]
        told += [f"{log.timestamp:%H:%M:%S} {log.name}: {log.message}" for log in logs]
        return "\n  ".join([f"flow run {run}", *told])

    def _tails(self) -> Iterator[str]:
        for log in sorted((self._home / "logs").glob("*.log")):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_MOST_LINES:]
            yield "\n  ".join([log.name, *lines])


@contextmanager
def pool_of(prefect_url: str, home: Path, deployment: str) -> Iterator[Pool]:
    """A client's view of `deployment` on the servers of `home`."""
    api = f"{prefect_url}/api"
    with (
        temporary_settings({PREFECT_API_URL: api, PREFECT_CLIENT_MAX_RETRIES: _RETRIES}),
        get_client(sync_client=True) as client,
    ):
        yield Pool(client, api, home, deployment)
