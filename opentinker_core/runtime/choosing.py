"""Where a run computes: in this process, or through a service."""

from pathlib import Path

from opentinker_core.config.schema import RuntimeConfig
from opentinker_core.runtime.engine import FetchSnapshot, open_engine
from opentinker_core.runtime.protocol import RunEngine


def open_run_engine(
    base_model: str, config: RuntimeConfig, home: Path, fetch: FetchSnapshot, tenant: str = "local"
) -> RunEngine:
    """The engine that `config` asks for: `open_engine`, or `open_remote_engine` where it has a `url`.

    Raises:
        UsageError: as these.
    """
    if config.url is None:
        return open_engine(base_model, config, home, fetch, tenant)
    from opentinker_core.runtime.remote.engine import open_remote_engine

    return open_remote_engine(base_model, config.url, home, fetch)
