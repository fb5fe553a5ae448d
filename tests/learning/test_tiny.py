"""The tiny example learns, with three seeds; with shuffled rewards, nothing is learned."""

from pathlib import Path
from statistics import fmean

import pytest

from opentinker_core.config.loading import load_config
from opentinker_core.config.schema import TrainConfig
from tests.runtime.runs import train

CONFIG = Path(__file__).parents[2] / "deployments" / "configs" / "tiny_rl.yaml"

pytestmark = pytest.mark.learning


def _rewards(home: Path, config: TrainConfig) -> list[float]:
    """Mean sampled reward of each RL step."""
    session = train(home, config)
    versions = session.workspace.catalog.run_versions(session.run.run_id)
    return [version.metrics["reward_mean"] for version in versions if version.phase == "rl"]


def _config(seed: int, *overrides: str) -> TrainConfig:
    quick = ["record.mlflow=false", "evaluation.episodes=2", "evaluation.samples=1"]
    return load_config(CONFIG, [f"seed={seed}", *quick, *overrides])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rl_goes_on_from_the_warm_up_to_almost_perfect_rewards(tmp_path: Path, seed: int) -> None:
    rewards = _rewards(tmp_path, _config(seed))
    assert rewards[0] <= 0.65
    assert fmean(rewards[-10:]) >= 0.95


def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    rewards = _rewards(tmp_path, _config(0, "rl.shuffle_rewards=true", "rl.steps=30"))
    assert fmean(rewards[-10:]) <= rewards[0] + 0.1  # else it is 0.3 more by then
