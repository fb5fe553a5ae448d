"""The sessions of this process by run id: tasks name a run, and find the loaded model here."""

import fcntl
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from opentinker_core.config.schema import TrainConfig
from opentinker_core.errors import OpenTinkerError
from opentinker_core.lineage.courier import Courier
from opentinker_core.runtime.joint import MemberSession
from opentinker_core.runtime.opening import find_run
from opentinker_core.runtime.session import RunSession, open_session
from opentinker_core.runtime.workspace import Workspace

_LOG = logging.getLogger(__name__)


@dataclass
class _Open:
    """A session, the lock on its run, and what mirrors it to MLflow: one for the runs that go on at once."""

    session: RunSession
    lock: IO[str]
    courier: Courier | None


_open: dict[str, _Open] = {}
_opening = threading.Lock()


def start_session(
    config: TrainConfig | None,
    run_id: str | None,
    flow_run_id: str | None,
    workspace: Workspace | None = None,
) -> RunSession:
    """Open the session of a new run, or of the run to go on with, and keep it for the tasks.

    `workspace`: one that others of a joint run share; None: one of its own.

    Raises:
        OpenTinkerError: another process works on this run.
    """
    workspace = workspace or Workspace()
    found = find_run(workspace.catalog, run_id, flow_run_id, config.name if config else None)
    lock = _lock(workspace.home, found.run_id) if found else None  # before anything of the run is touched
    kind = MemberSession if config is not None and config.joint is not None else RunSession
    session = open_session(config, workspace, run_id=run_id, flow_run_id=flow_run_id, kind=kind)
    run_id = session.run.run_id
    lock = lock or _lock(workspace.home, run_id)
    with _opening:
        _open[run_id] = _Open(session, lock, _courier(session) if session.config.record.mlflow else None)
    return session


def session_of(run_id: str) -> RunSession:
    """The open session of a run.

    Raises:
        OpenTinkerError: this process has none; tasks run in the process of their flow.
    """
    if run_id not in _open:
        raise OpenTinkerError(f"run {run_id} is not open in this process; the flow opens it first")
    return _open[run_id].session


def courier_of(run_id: str) -> Courier | None:
    """What mirrors the run to MLflow beside this process; None: the run keeps out of MLflow."""
    return _open[run_id].courier


def end_session(run_id: str) -> None:
    """Forget the session and its model, let others have the run; the last lets MLflow take what is left."""
    with _opening:
        opened = _open.pop(run_id)
        goes_on = any(other.courier is opened.courier for other in _open.values())
    try:
        if opened.courier and not goes_on and (pending := opened.courier.close()):
            _LOG.warning("%d events are not in MLflow yet; `opentinker sync` sends them", pending)
    finally:
        opened.lock.close()


def _courier(session: RunSession) -> Courier:
    """That of another run of the same installation, else a new one."""
    settings = session.workspace.settings
    others = (one.courier for one in _open.values() if one.session.workspace.settings == settings)
    return next((courier for courier in others if courier), None) or Courier(session.workspace)


def _lock(home: Path, run_id: str) -> IO[str]:
    """Hold a file lock while this process works on the run; the kernel lets go of it at its end."""
    directory = home / "runs" / run_id
    directory.mkdir(parents=True, exist_ok=True)
    stream = (directory / "lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise OpenTinkerError(f"run {run_id} is being trained by another process; stop that first") from None
    return stream
