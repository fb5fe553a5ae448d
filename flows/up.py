"""`opentinker up`: the Prefect and MLflow servers of this installation, and a worker if asked for."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows import servers
from flows.orchestrator import SETTINGS, read_up
from opentinker_core.config.settings import Settings
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.lineage.tracking import tracking_target
from opentinker_core.servers import signals_as_interrupt

POOL = "gpu"

_PATIENT = {"PREFECT_CLIENT_MAX_RETRIES": "7"}
"""The worker and its runs share a server that answers 503 where another's write locks its SQLite. A request
that found it so through all its retries, four minutes, would end the run or the worker. If the server ends,
all end."""


def up(
    workers: Annotated[
        bool, typer.Option("--workers", help="Deploy, and run a worker of the pool 'gpu' too.")
    ] = False,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the Prefect server.")] = 4200,
    mlflow_port: Annotated[
        int, typer.Option("--mlflow-port", min=1, max=65535, help="Port of the MLflow server.")
    ] = 5000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as one JSON object.")] = False,
) -> None:
    """Start Prefect and MLflow on the local stores, print their addresses, and stay until Ctrl-C."""
    settings = Settings()
    home = settings.home.absolute()
    home.mkdir(parents=True, exist_ok=True)
    if running := read_up(home):
        raise UsageError(
            f"opentinker up runs already on {home} (process {running['pid']}): {running['prefect_url']}"
        )
    servers.check_port("--port", port)
    backend = tracking_target(settings)
    if not backend.over_http:
        servers.check_port("--mlflow-port", mlflow_port)
    console = Console(stderr=as_json)
    for name, value in (SETTINGS | _PATIENT).items():
        os.environ.setdefault(name, value)
    with signals_as_interrupt(), ExitStack() as stack:
        started = [_owned(stack, servers.start_prefect(home, port, full=True))]
        if not backend.over_http:
            started.append(_owned(stack, servers.start_mlflow(home, mlflow_port, backend.tracking_uri)))
        _wait(started, console)
        addresses = {
            "prefect_url": started[0].url,
            "mlflow_url": backend.tracking_uri if backend.over_http else started[1].url,
        }
        stack.enter_context(_recorded(home, addresses))
        if workers:
            started.append(_worker(stack, home, addresses, console))
        _announce(addresses, workers, home, console, as_json)
        try:
            _stay(started)
        except KeyboardInterrupt:
            console.print("stopping")


def _owned(stack: ExitStack, server: servers.Server) -> servers.Server:
    """Stop `server` when the stack unwinds."""
    stack.callback(server.stop)
    return server


def _wait(started: list[servers.Server], console: Console) -> None:
    paths = {"Prefect": "/api/health", "MLflow": "/health"}
    with console.status("starting") as status:
        servers.wait_until_healthy(
            [(server, paths[server.name]) for server in started],
            tick=lambda waiting: status.update(f"starting {' and '.join(waiting)}"),
        )


def _worker(stack: ExitStack, home: Path, addresses: dict[str, str], console: Console) -> servers.Server:
    """Bring the deployments up to date, then start a worker of their pool."""
    from flows.deploy import ROOT, apply, default_file
    from opentinker_core.config.loading import read_mapping

    api_url = f"{addresses['prefect_url']}/api"
    os.environ["PREFECT_API_URL"] = api_url  # before Prefect is imported, by `apply`
    with console.status("deploying"):
        apply(read_mapping(default_file()), ROOT)
    environment = {
        "PREFECT_API_URL": api_url,
        "OPENTINKER_HOME": str(home),
        "OPENTINKER_MLFLOW_UI_URL": addresses["mlflow_url"],
    }
    return _owned(stack, servers.start_worker(home, POOL, environment))


def _announce(addresses: dict[str, str], workers: bool, home: Path, console: Console, as_json: bool) -> None:
    if as_json:
        print(json.dumps(addresses | {"home": str(home), "workers": int(workers)}), flush=True)
        return
    console.print(f"Prefect  {addresses['prefect_url']}", highlight=False)
    console.print(f"MLflow   {addresses['mlflow_url']}", highlight=False)
    worker = f"of the pool '{POOL}'" if workers else "none; start with --workers to run deployments"
    console.print(f"worker   {worker}\nlogs     {home / 'logs'}\nCtrl-C stops all of them", highlight=False)


def _stay(started: list[servers.Server]) -> None:
    """Return never; an ended server ends the rest.

    Raises:
        OpenTinkerError: names the server, with the end of its log.
    """
    while True:
        for server in started:
            if not server.running:
                raise OpenTinkerError(
                    f"the {server.name} process ended: {server.reason()} (log: {server.log})"
                )
        time.sleep(0.5)


@contextmanager
def _recorded(home: Path, addresses: dict[str, str]) -> Iterator[None]:
    """Let other commands on this home find the servers."""
    path = home / "up.json"
    path.write_text(json.dumps({"pid": os.getpid(), **addresses}), encoding="utf-8")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
