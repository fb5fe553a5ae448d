"""Delivers the outbox beside a training run, in a process of its own.

In a thread, or as a process of ordinary priority, it would take a core from the training loop while
torch computes on all of them, and a parallel region is as slow as its slowest thread. So it works when
the cores have nothing better to do, and seldom: what has gathered in a while costs less together.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from opentinker_core.config.settings import Settings
from opentinker_core.lineage.outbox import open_dispatcher
from opentinker_core.niceness import set_session_nice
from opentinker_core.runtime.workspace import Workspace

_LAST_CALL_S = 60.0
"""How long the end of a run may wait for MLflow to take what is left."""


class Courier:
    """A child process that delivers until this process closes it, or ends in whatever way."""

    def __init__(self, workspace: Workspace) -> None:
        self._catalog = workspace.catalog
        log = workspace.home / "logs" / "mlflow-delivery.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "opentinker_core.lineage.courier"],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                env=os.environ | _environment(workspace.settings),
                start_new_session=True,  # Ctrl-C is for the run; the courier ends when its input does
            )

    @property
    def pid(self) -> int:
        """The process that delivers."""
        return self._process.pid

    def close(self) -> int:
        """Let it deliver what is pending, within a minute.

        Returns:
            The number of events still pending.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_LAST_CALL_S + 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return len(self._catalog.pending_events())


def _environment(settings: Settings) -> dict[str, str]:
    """Variables that give another process the same settings."""
    prefix = Settings.model_config["env_prefix"]
    return {f"{prefix}{name.upper()}": str(value) for name, value in settings.model_dump().items()}


def main() -> None:
    """Deliver now and then until the input ends; then deliver what is left."""
    _yield_to_others()
    dispatcher = open_dispatcher(Workspace())
    dispatcher.start()
    sys.stdin.buffer.read()  # until the run closes it, or ends in whatever way
    _compete_again()
    dispatcher.close(_LAST_CALL_S)


def _yield_to_others() -> None:
    """Run only when nothing else wants the core (Linux), or at the lowest priority."""
    set_session_nice(19)
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


def _compete_again() -> None:
    """At the end the run waits for what is left: go back to ordinary priority, where that is permitted."""
    set_session_nice(0)
    if hasattr(os, "SCHED_IDLE"):
        with suppress(PermissionError):
            for task in Path("/proc/self/task").iterdir():
                os.sched_setscheduler(int(task.name), os.SCHED_OTHER, os.sched_param(0))


if __name__ == "__main__":
    main()
