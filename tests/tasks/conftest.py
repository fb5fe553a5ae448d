"""A small run of the tiny model in an installation of its own."""

from pathlib import Path

import pytest

from opentinker_core.config.loading import load_config
from opentinker_core.config.schema import TrainConfig

TINY = Path(__file__).resolve().parents[2] / "deployments" / "configs" / "tiny_rl.yaml"
SMALL = ("sft.steps=3", "sft.publish_every=2", "rl.steps=2", "rl.groups=4", "rl.group_size=4")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """SFT steps 1 to 3 (published at 2 and 3), RL steps 4 and 5; nothing is recorded in MLflow."""
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path))
    return load_config(TINY, [*SMALL, "evaluation.episodes=2", "evaluation.samples=2", "record.mlflow=false"])
