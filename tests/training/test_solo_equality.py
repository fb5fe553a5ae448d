"""Policies trained fused come out as PEFT and torch.optim.AdamW make them, each alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from opentinker_core.evaluation.isolation import Bench
from opentinker_core.evaluation.participants import participants
from opentinker_core.evaluation.solo import Deviation, Solo, deviations
from opentinker_core.models.loading import load_model
from opentinker_core.models.source import resolve

STEPS = 20
LIMIT = 1e-5


@pytest.fixture(scope="module")
def bench(tiny_home: Path) -> Bench:
    torch.set_num_threads(1)
    return Bench(load_model(resolve("tiny", tiny_home), "cpu", torch.float32), "tiny")


@pytest.fixture(scope="module")
def found(bench: Bench, tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Deviation]:
    base = load_model(resolve("tiny", tiny_home), "cpu", torch.float32)
    trained = participants(8, bench.layout)
    return deviations(bench, base, trained, STEPS, tmp_path_factory.mktemp("adapters"))


def test_every_loss_of_20_fused_steps_is_that_of_the_policy_alone(found: list[Deviation]) -> None:
    assert len(found) == 8
    for deviation in found:
        assert len(deviation.losses) == STEPS
        assert all(apart <= LIMIT for apart in deviation.losses), deviation


def test_so_are_the_factors_after_the_last_step(found: list[Deviation]) -> None:
    for deviation in found:
        assert deviation.weights <= LIMIT, deviation


@pytest.mark.parametrize("index", [0, 1], ids=["cross entropy", "ppo"])
def test_the_peer_learns_from_its_data(bench: Bench, tiny_home: Path, tmp_path: Path, index: int) -> None:
    """Two peers that start alike and see one batch again and again: the loss falls, the factors move."""
    participant = participants(8, bench.layout)[index]
    base = load_model(resolve("tiny", tiny_home), "cpu", torch.float32)
    trainer = bench.trainer()
    trainer.create(participant.name, participant.lora, 0)
    trainer.publish_snapshot(participant.name, tmp_path / "start")
    solo = Solo(base, tmp_path / "start", participant)
    start = {name: weight.detach().clone() for name, weight in solo.weights.items()}
    batch = bench.batch(participant, 0)
    losses = [solo.step(batch) for _ in range(6)]
    assert np.all(np.diff(losses) < 0)
    assert all(not torch.equal(weight, start[name]) for name, weight in solo.weights.items())


def test_another_learning_rate_shows(bench: Bench, tiny_home: Path, tmp_path: Path) -> None:
    """The comparison can fail: a peer with half the learning rate is far away after a few steps."""
    participant = participants(8, bench.layout)[0]
    halved = participant.optimizer.model_copy(
        update={"learning_rate": participant.optimizer.learning_rate / 2}
    )
    base = load_model(resolve("tiny", tiny_home), "cpu", torch.float32)
    trainer = bench.trainer()
    trainer.create(participant.name, participant.lora, 0)
    trainer.publish_snapshot(participant.name, tmp_path / "start")
    solo = Solo(base, tmp_path / "start", replace(participant, optimizer=halved))
    apart = []
    for step in range(5):
        batch = bench.batch(participant, step)
        fused = trainer.forward_backward(batch.policy, batch.datums, batch.objective, batch.scales)
        trainer.optim_step(participant.name, participant.optimizer)
        apart.append(abs(solo.step(batch) - fused.loss) / abs(fused.loss))
    assert apart[0] <= LIMIT
    assert apart[-1] > 10 * LIMIT
