"""Which Prefect server a command talks to, and the settings Prefect is imported with.

In order: `PREFECT_API_URL`; the server of a running `opentinker up` on this home; a Prefect profile
of the user's own; else a private server on `home/prefect` that lives as long as the command.
"""

import json
import os
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows import servers
from opentinker_core.errors import OpenTinkerError

_FLUSH_S = 1
"""How often the private server stores task runs; what it holds back at its end is lost."""

_PATIENCE_S = 30.0
"""A server that is gone refuses at once; one that is only busy may take seconds to answer."""

_NICE = 10
"""Of the private server beside its run."""

SETTINGS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "opentinker_core",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "WARNING",  # that a phase is done, its state tells
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": str(_FLUSH_S),
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": str(_FLUSH_S),
}
"""Offline, quiet defaults; a variable that is already set wins."""


UI_URL = "http://127.0.0.1:4200"
"""Where `opentinker up` shows runs unless told otherwise; a private server keeps them for it."""


@dataclass
class Orchestrator:
    """The Prefect API of this process; `server` is set where the process brought its own."""

    api_url: str
    server: servers.Server | None = None
    lost: bool = False
    """The server was gone at the end. Prefect would try for minutes to hand it what is left."""

    @property
    def ui_url(self) -> str:
        """Where runs can be looked at; empty for a private server, which has no UI."""
        return "" if self.server else self.api_url.removesuffix("/api")

    def wait(self) -> None:
        """Return once the API answers.

        Raises:
            OpenTinkerError: it does not.
        """
        if self.server is not None:
            servers.wait_until_healthy([(self.server, "/api/health")])
            self.server.give_way(_NICE)
        elif self.api_url and not servers.answers(f"{self.api_url}/health", _PATIENCE_S):
            raise OpenTinkerError(
                f"no Prefect server answers at {self.api_url}; start it, or unset PREFECT_API_URL "
                "(and any Prefect profile) to run without one"
            )

    def close(self) -> None:
        """Stop the private server, after it was handed the last events and logs of this process."""
        used = "prefect.flows" in sys.modules
        self.lost = used and not servers.answers(f"{self.api_url}/health", _PATIENCE_S)
        if self.server is None:
            return
        if used and not self.lost:
            from prefect.events.worker import EventsWorker
            from prefect.logging.handlers import APILogHandler

            EventsWorker.drain_all(timeout=5)
            APILogHandler().flush()
            time.sleep(_FLUSH_S + 0.3)  # until the server has stored them
        self.server.stop()
        self.server.log.unlink(missing_ok=True)


current: Orchestrator | None = None
"""The one of this process; Prefect's settings are the process's too."""


@contextmanager
def orchestrator(home: Path, *, verbose: bool = False, private: bool = True) -> Iterator[Orchestrator]:
    """Point Prefect, which must not be imported yet, at a server; the private one is still starting.

    Args:
        home: The installation's home.
        verbose: Show Prefect's own log on stderr; else only the run page has it.
        private: Start a private server where there is no other; else that is an error.

    Raises:
        OpenTinkerError: the server does not answer; or there is none, and none may be started.
    """
    level = "INFO" if verbose else "CRITICAL"
    defaults = {
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": level,
        "PREFECT_LOGGING_INTERNAL_LEVEL": "ERROR" if verbose else level,
        **SETTINGS,
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    global current
    found = current = _find(home, private)
    if found.api_url:
        os.environ["PREFECT_API_URL"] = found.api_url
    try:
        if found.server is None:
            found.wait()
        yield found
    finally:
        found.close()


@contextmanager
def without_heartbeat() -> Iterator[None]:
    """Run flows without the heartbeat thread, for whose last beat a sync flow waits a second."""
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield


def read_up(home: Path) -> dict[str, Any] | None:
    """What a live `opentinker up` on this home recorded: pid, prefect_url, mlflow_url."""
    try:
        state = json.loads((home / "up.json").read_text(encoding="utf-8"))
        os.kill(int(state["pid"]), 0)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if servers.answers(f"{state.get('prefect_url')}/api/health", _PATIENCE_S) else None


def _find(home: Path, private: bool) -> Orchestrator:
    up = read_up(home)
    if up and (mlflow_url := up.get("mlflow_url")):
        os.environ.setdefault("OPENTINKER_MLFLOW_UI_URL", mlflow_url)
    if url := os.environ.get("PREFECT_API_URL"):
        return Orchestrator(url.rstrip("/"))
    if up:
        return Orchestrator(f"{up['prefect_url']}/api")
    if (url := _profile_api_url()) is not None:
        return Orchestrator(url.rstrip("/"))
    if not private:
        raise OpenTinkerError(
            "no Prefect server is known; start one with `opentinker up`, or set PREFECT_API_URL to one's API"
        )
    os.environ["PREFECT_HOME"] = str(servers.prefect_home(home))
    os.environ.setdefault("PREFECT_UI_URL", UI_URL)
    server = servers.start_prefect(home, servers.free_port(), full=False)
    return Orchestrator(f"{server.url}/api", server)


def _profile_api_url() -> str | None:
    """The API URL of the user's active Prefect profile, if there is one."""
    prefect_home = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect")
    path = Path(os.environ.get("PREFECT_PROFILES_PATH") or prefect_home / "profiles.toml")
    try:
        profiles = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return None
    active = os.environ.get("PREFECT_PROFILE") or profiles.get("active", "")
    url = profiles.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")
    return url if isinstance(url, str) else None
