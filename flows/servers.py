"""The servers of an installation: Prefect, MLflow and workers, each a child process that ends with us."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from opentinker_core.servers import (
    Server,
    answers,
    check_port,
    free_port,
    start,
    wait_until_healthy,
)

__all__ = [
    "Server",
    "answers",
    "check_port",
    "free_port",
    "prefect_home",
    "start",
    "start_mlflow",
    "start_prefect",
    "start_worker",
    "wait_until_healthy",
]


_UNUSED_SERVICES = (
    "TRIGGERS",
    "FOREMAN",
    "REPOSSESSOR",
    "PAUSE_EXPIRATIONS",
    "CANCELLATION_CLEANUP",
    "DB_VACUUM",
)
"""What a server has nothing to do for that knows no work pools and no automations, and lives for one run."""


def start_prefect(
    home: Path, port: int, *, full: bool, host: str = "127.0.0.1", directory: Path | None = None
) -> Server:
    """Start a Prefect server on the database in `directory`, by default `prefect_home(home)`.

    Args:
        full: With UI and schedules; else only what one training run needs.
    """
    directory = directory or prefect_home(home)
    url = f"http://{host}:{port}"
    lean = [] if full else ["--no-ui", "--no-scheduler", "--no-late-runs"]
    without = () if full else _UNUSED_SERVICES
    return start(
        "Prefect",
        [sys.executable, "-m", "prefect", "server", "start", "--host", host, "--port", str(port), *lean],
        url=url,
        log=home / "logs" / ("prefect.log" if full else f"prefect-{port}.log"),
        environment={
            "PREFECT_HOME": str(directory),
            # Its pages would ask port 4200, or the server that PREFECT_API_URL names, for their contents.
            "PREFECT_SERVER_UI_API_URL": os.environ.get("PREFECT_UI_API_URL") or f"{url}/api",
            "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(directory / "ui"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": os.environ.get("PREFECT_SERVER_ANALYTICS_ENABLED", "false"),
            **{f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false" for service in without},
        },
    )


def prefect_home(home: Path) -> Path:
    """Where Prefect keeps its database: `PREFECT_HOME` if the user set it, else under our home."""
    return Path(os.environ.get("PREFECT_HOME") or home / "prefect").absolute()


def start_mlflow(home: Path, port: int, backend_uri: str, host: str = "127.0.0.1") -> Server:
    """Start an MLflow server on `backend_uri`, with artifacts under `home/mlartifacts`."""
    return start(
        "MLflow",
        [
            *(
                sys.executable,
                "-m",
                "mlflow",
                "server",
                "--host",
                host,
                "--port",
                str(port),
                "--workers",
                "1",
            ),
            *("--backend-store-uri", backend_uri, "--artifacts-destination", str(home / "mlartifacts")),
        ],
        url=f"http://{host}:{port}",
        log=home / "logs" / "mlflow.log",
        environment={
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "GIT_PYTHON_REFRESH": "quiet",
            # Its runner of background jobs is eight processes of 150 MB each, for jobs that nothing has.
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": os.environ.get(
                "MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false"
            ),
        },
    )


def start_worker(home: Path, pool: str, environment: Mapping[str, str]) -> Server:
    """Start a worker of a process pool; its runs inherit `environment`."""
    return start(
        "worker",
        [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process"],
        url="",
        log=home / "logs" / "worker.log",
        environment=environment,
    )
