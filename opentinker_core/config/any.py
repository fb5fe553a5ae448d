"""Reading a config of either kind: of one policy, or, if it has `policies` at its top, of a joint run."""

from collections.abc import Sequence
from pathlib import Path

from opentinker_core.config.agents import AgentsConfig
from opentinker_core.config.loading import read_mapping, validate
from opentinker_core.config.schema import TrainConfig
from opentinker_core.errors import UsageError


def load_any(path: Path | str, overrides: Sequence[str] = ()) -> TrainConfig | AgentsConfig:
    """As `loading.load_config`, for both kinds."""
    data = read_mapping(Path(path))
    if "policies" in data:
        return validate(data, AgentsConfig, str(path), overrides)
    config = validate(data, TrainConfig, str(path), overrides)
    if config.joint is not None:
        raise UsageError(
            f"{path}: joint: is filled in by `train`; accepted: a config with 'policies' for a joint run"
        )
    return config
