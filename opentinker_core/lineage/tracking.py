"""The one place that imports MLflow: where it records, how it is silenced, and what an outage looks like."""

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentinker_core.config.settings import Settings
from opentinker_core.lineage.errors import EventError, MirrorOutageError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.tracing.client import TracingClient
    from mlflow.tracking._model_registry.client import ModelRegistryClient

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "GIT_PYTHON_REFRESH": "quiet",
    # The outbox retries, and reports why; MLflow's own retries would only hold it up.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
_OUTAGE_STATUS = {401, 403, 429, 502, 503, 504}
"""HTTP statuses that concern every event: wrong credentials, too many requests, no backend."""


TRAINING_VIEW = "?workflowType=machine_learning"
"""Makes MLflow's pages show runs and the model registry in their navigation, not LLM applications."""
UI_URL = "http://127.0.0.1:5000"
"""Where `opentinker up` shows what is recorded under an installation's home, unless told otherwise."""


@dataclass(frozen=True)
class TrackingTarget:
    """Where MLflow records: its tracking URI, the root of artifacts (None: the server decides), its pages."""

    tracking_uri: str
    artifact_uri: str | None
    ui_url: str = ""

    @property
    def over_http(self) -> bool:
        return self.tracking_uri.startswith(("http://", "https://"))


@dataclass(frozen=True)
class Tracking:
    """MLflow's clients of one target. They use no state of its fluent API: any thread may use them."""

    target: TrackingTarget
    client: "MlflowClient"
    registry: "ModelRegistryClient"
    traces: "TracingClient"


def tracking_target(settings: Settings) -> TrackingTarget:
    """The target that `settings` names; the default is SQLite and files under `settings.home`."""
    uri = settings.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    uri = uri or f"sqlite:///{settings.home.absolute() / 'mlflow.db'}"
    if uri.startswith(("http://", "https://")):
        return TrackingTarget(uri, None, settings.mlflow_ui_url or uri.rstrip("/"))
    artifacts = (settings.home / "mlartifacts").absolute().as_uri()
    return TrackingTarget(uri, artifacts, settings.mlflow_ui_url or UI_URL)


def prefect_ui_url() -> str:
    """The address of Prefect's pages, from the variables Prefect itself reads; empty: there is no server."""
    api = os.environ.get("PREFECT_API_URL", "").rstrip("/")
    return os.environ.get("PREFECT_UI_URL", "") or api.removesuffix("/api")


def connect(target: TrackingTarget) -> Tracking:
    """Import MLflow and open its stores; the first use of a database creates its tables (a second or more).

    Raises:
        MirrorOutageError: the URI cannot be used: unreachable, no permission, another schema, no such scheme.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from mlflow.tracing.client import TracingClient
    from mlflow.tracking._model_registry.client import ModelRegistryClient
    from sqlalchemy.exc import SQLAlchemyError

    _silence()
    try:
        uri = target.tracking_uri
        client, registry = MlflowClient(uri, registry_uri=uri), ModelRegistryClient(uri, uri)
        return Tracking(target, client, registry, TracingClient(uri))
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise MirrorOutageError(f"MLflow at {target.tracking_uri}: {_first_line(error)}") from error


def translated(error: Exception) -> MirrorOutageError | EventError:
    """What an exception raised by one of MLflow's clients means for the event that was being mirrored."""
    message = f"MLflow: {_first_line(error)}"
    return MirrorOutageError(message) if is_outage(error) else EventError(message)


def is_outage(error: Exception) -> bool:
    """Whether `error` comes from a server or database, MLflow's or the catalog's, that cannot be used now."""
    from sqlalchemy.exc import InterfaceError, OperationalError
    from sqlalchemy.exc import TimeoutError as PoolTimeout

    if isinstance(error, MirrorOutageError):
        return True
    if getattr(error, "get_http_status_code", int)() in _OUTAGE_STATUS:
        return True
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError | OperationalError | InterfaceError | PoolTimeout):
            return not isinstance(cause, FileNotFoundError)
        cause = cause.__cause__ or cause.__context__
    return False


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else type(error).__name__


def _silence() -> None:
    """MLflow reports its migrations and every failed statement; the outbox reports what matters of it."""
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    logging.getLogger("alembic").setLevel(logging.WARNING)
