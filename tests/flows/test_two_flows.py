"""Two flow runs at the same time in one process: one base model, one engine, and each as if alone."""

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

import pytest

from opentinker_core.config.loading import load_config
from opentinker_core.config.schema import TrainConfig
from opentinker_core.runtime.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "sft.steps=2",
    "sft.publish_every=1",
    "rl.steps=2",
    "rl.groups=4",
    "rl.group_size=4",
    "record.mlflow=false",
]
SMALL += ["evaluation.episodes=2", "evaluation.samples=2", "rl.objective.kl_coefficient=0.01"]
CONFIGS = [
    [*SMALL, "name=one", "policy.name=one", "seed=1"],
    [
        *SMALL,
        "name=two",
        "policy.name=two",
        "seed=2",
        "policy.lora.rank=20",
        "rl.optimizer.learning_rate=1e-3",
    ],
]

pytestmark = pytest.mark.servers


def _outcome(run_id: str) -> tuple[list[float], list[str]]:
    """Losses of the run's versions, and the versions that sampled what its RL steps were trained on."""
    catalog = Workspace().catalog
    versions = catalog.run_versions(run_id)
    sampled_by = [s.sampled_by for s in catalog.trajectory_sets(run_id, "train")]
    return [version.metrics.get("loss", 0.0) for version in versions], sampled_by


def test_two_flows_at_once_are_what_each_is_alone(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.warm_up_then_rl import warm_up_then_rl

    def run(config: TrainConfig) -> str:
        return warm_up_then_rl(config)

    configs = [load_config(ROOT / "deployments/configs/tiny_rl.yaml", changes) for changes in CONFIGS]
    alone = []
    for config in configs:
        monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path / config.name))
        alone.append(_outcome(run(config)))
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path / "together"))
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(copy_context().run, run, config) for config in configs]
        together = [_outcome(future.result()) for future in futures]
    for config, one, other in zip(configs, alone, together, strict=True):
        assert other[0] == pytest.approx(one[0], rel=1e-5, abs=1e-7)
        assert other[1] == one[1]
        assert all(ref == "demonstration" or ref.startswith(f"{config.name}@") for ref in other[1])
