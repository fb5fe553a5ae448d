"""Delivers the catalog's outbox events to MLflow; delivering an event twice changes nothing."""

from collections.abc import Sequence

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

    def record(self, events: Sequence[OutboxEvent]) -> None:
        """Mirror events, in order; those of runs with `record.mlflow: false` are let pass.

        After an error any of them may be in MLflow already, or in part: record them again.

        Raises:
            MirrorOutageError: MLflow cannot be used just now; nothing is wrong with the events.
            OpenTinkerError: one of them cannot be mirrored, for a reason of its own.
        """
        wanted = self._wanted(events)
        if not wanted:
            return
        mirror = self._connected()
        from mlflow.exceptions import MlflowException

        try:
            mirror.handle(wanted)
        except (MlflowException, OSError) as error:
            raise translated(error) from error
        except (LookupError, TypeError, ValueError) as error:
            named = ", ".join(f"{event.id} ({event.kind})" for event in wanted)
            raise EventError(f"event {named}: {type(error).__name__}: {error}") from error

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

    def _wanted(self, events: Sequence[OutboxEvent]) -> list[OutboxEvent]:
        run_ids = {event.payload.get("run_id") for event in events}
        configs = {run_id: self._catalog.run(run_id).config if run_id else {} for run_id in run_ids}
        unwanted = {
            run_id for run_id, config in configs.items() if not config.get("record", {}).get("mlflow", True)
        }
        return [event for event in events if event.payload.get("run_id") not in unwanted]

    def _connected(self) -> Mirror:
        if self._mirror is None:
            tracking = connect(self.target)
            self._mirror = Mirror(tracking, self._catalog, self._trajectories, self._prefect_ui_url)
        return self._mirror
