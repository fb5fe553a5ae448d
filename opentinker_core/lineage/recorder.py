"""Delivers the catalog's outbox events to MLflow, one by one; delivering an event twice changes nothing."""

from opentinker_core.lineage.errors import EventError
from opentinker_core.lineage.mirror import Mirror
from opentinker_core.lineage.tracking import TrackingTarget, connect, translated
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.outbox import OutboxEvent
from opentinker_core.trajectories.store import TrajectoryStore


class MLflowRecorder:
    """Writes what happened to MLflow. Nothing is imported or opened before the first event."""

    def __init__(
        self,
        target: TrackingTarget,
        catalog: Catalog,
        trajectories: TrajectoryStore,
        *,
        prefect_ui_url: str = "",
    ) -> None:
        """`prefect_ui_url`, e.g. `http://127.0.0.1:4200`, makes MLflow's pages link to Prefect's."""
        self.target = target
        self._catalog = catalog
        self._trajectories = trajectories
        self._prefect_ui_url = prefect_ui_url
        self._mirror: Mirror | None = None

    def record(self, event: OutboxEvent) -> None:
        """Mirror one event; those of runs with `record.mlflow: false` are let pass.

        Raises:
            MirrorOutageError: MLflow cannot be used just now; nothing is wrong with the event.
            OpenTinkerError: this event cannot be mirrored, for a reason of its own.
        """
        if not self._is_wanted(event):
            return
        mirror = self._connected()
        from mlflow.exceptions import MlflowException

        try:
            mirror.handle(event.kind, event.payload)
        except (MlflowException, OSError) as error:
            raise translated(error) from error
        except (LookupError, TypeError, ValueError) as error:
            raise EventError(f"event {event.id} ({event.kind}): {type(error).__name__}: {error}") from error

    def mirror_aliases(self, policy_name: str) -> None:
        """Mirror aliases that moved without a new version (a rollback).

        Raises:
            MirrorOutageError, EventError: as for `record`.
        """
        mirror = self._connected()
        from mlflow.exceptions import MlflowException

        try:
            mirror.versions.mirror_aliases(policy_name)
        except (MlflowException, OSError) as error:
            raise translated(error) from error

    def _is_wanted(self, event: OutboxEvent) -> bool:
        run_id = event.payload.get("run_id")
        config = self._catalog.run(run_id).config if run_id else {}
        return bool(config.get("record", {}).get("mlflow", True))

    def _connected(self) -> Mirror:
        if self._mirror is None:
            tracking = connect(self.target)
            self._mirror = Mirror(tracking, self._catalog, self._trajectories, self._prefect_ui_url)
        return self._mirror
