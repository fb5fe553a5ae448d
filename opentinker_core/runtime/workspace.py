"""Opens the stores of an installation: catalog, snapshots, trajectories."""

from functools import cached_property
from pathlib import Path

from opentinker_core.config.settings import Settings
from opentinker_core.policies.catalog import Catalog
from opentinker_core.snapshots.protocol import SnapshotStore
from opentinker_core.snapshots.store import open_snapshot_store
from opentinker_core.trajectories.store import TrajectoryStore


class Workspace:
    """The stores that `settings` names, each opened when first used."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()

    @property
    def home(self) -> Path:
        return self.settings.home

    @cached_property
    def catalog(self) -> Catalog:
        return Catalog(self.settings.resolved_catalog_url, self.settings.tenant)

    @cached_property
    def snapshots(self) -> SnapshotStore:
        cache = self.home / "cache" / "snapshots"
        return open_snapshot_store(
            self.settings.resolved_snapshot_uri, cache, endpoint_url=self.settings.s3_endpoint_url
        )

    @cached_property
    def trajectories(self) -> TrajectoryStore:
        cache = self.home / "cache" / "trajectories"
        return TrajectoryStore(
            self.settings.resolved_trajectory_uri, cache, endpoint_url=self.settings.s3_endpoint_url
        )
