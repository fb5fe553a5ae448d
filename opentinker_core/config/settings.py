"""Where an installation keeps its state: environment variables `OPENTINKER_*`, or the embedded default."""

from functools import cached_property
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Installation settings. Every field can be set by the variable `OPENTINKER_<FIELD>`.

    Unset URLs resolve to local files under `home`, so that nothing else needs to be installed.
    """

    model_config = SettingsConfigDict(env_prefix="OPENTINKER_", frozen=True, extra="ignore")

    home: Path = Field(default_factory=lambda: Path.home() / ".opentinker")
    tenant: str = "default"
    catalog_url: str = ""
    """SQLAlchemy URL of the catalog; empty: SQLite under `home`."""
    snapshot_uri: str = ""
    """`file:///directory` or `s3://bucket/prefix`; empty: `home/snapshots`."""
    trajectory_uri: str = ""
    """`file:///directory`; empty: `home/trajectories`."""
    mlflow_tracking_uri: str = ""
    """MLflow tracking URI; empty: `MLFLOW_TRACKING_URI` if set, else SQLite under `home`."""
    mlflow_ui_url: str = ""
    """Where MLflow's pages are, for links; empty: the tracking URI, if http, else where `up` serves."""
    s3_endpoint_url: str = ""
    """Endpoint of an S3-compatible server; empty: AWS, or boto3's own `AWS_ENDPOINT_URL`."""

    @cached_property
    def resolved_catalog_url(self) -> str:
        return self.catalog_url or f"sqlite:///{self.home / 'catalog.db'}"

    @cached_property
    def resolved_snapshot_uri(self) -> str:
        return self.snapshot_uri or (self.home / "snapshots").absolute().as_uri()

    @cached_property
    def resolved_trajectory_uri(self) -> str:
        return self.trajectory_uri or (self.home / "trajectories").absolute().as_uri()
