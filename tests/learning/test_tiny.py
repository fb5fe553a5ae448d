"""The tiny example learns, with three seeds; with shuffled rewards, nothing is learned."""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

from opentinker_core.config.loading import load_config
from opentinker_core.config.schema import TrainConfig
from opentinker_core.runtime.session import open_session
from tests.runtime.runs import imitate, learn, workspace_at

CONFIG = Path(__file__).parents[2] / "deployments" / "configs" / "tiny_rl.yaml"

pytestmark = pytest.mark.learning


def _rewards(home: Path, config: TrainConfig) -> Iterator[float]:
    """Mean sampled reward of each RL step, as it is made."""
    session = open_session(config, workspace_at(home))
    imitate(session)
    while session.next_step <= config.steps:
        learn(session, session.next_step)
        yield session.version.metrics["reward_mean"]


def _config(seed: int, *overrides: str) -> TrainConfig:
    quick = ["record.mlflow=false", "evaluation.episodes=2", "evaluation.samples=1"]
    return load_config(CONFIG, [f"seed={seed}", *quick, *overrides])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rl_goes_on_from_the_warm_up_to_almost_perfect_rewards(tmp_path: Path, seed: int) -> None:
    rewards: list[float] = []
    for reward in _rewards(tmp_path, _config(seed)):
        rewards.append(reward)
        if fmean(rewards[-10:]) >= 0.95:
            break  # it has learned: the steps that are left would only cost time
    assert rewards[0] <= 0.65
    assert fmean(rewards[-10:]) >= 0.95


def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    rewards = [*_rewards(tmp_path, _config(0, "rl.shuffle_rewards=true", "rl.steps=30"))]
    assert fmean(rewards[-10:]) <= rewards[0] + 0.1  # else it is 0.3 more by then
