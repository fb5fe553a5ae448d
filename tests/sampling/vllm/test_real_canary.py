"""The canary over real vLLM, after small optimizer steps of SmolLM2: what is right passes, nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from opentinker_core.config.schema import CanaryConfig, LoRAConfig, OptimizerConfig
from opentinker_core.lora.adapter import Adapter
from opentinker_core.objectives.cross_entropy import cross_entropy
from opentinker_core.sampling.canary import Canary, CanaryError
from opentinker_core.sampling.protocol import BASE, SampledSequence, SampleRequest
from opentinker_core.sampling.vllm.sampler import VLLMSampler
from opentinker_core.trajectories.types import Datum
from tests.sampling.vllm.conftest import Reference

pytestmark = [pytest.mark.vllm, pytest.mark.pretrained]
LORA = LoRAConfig(rank=8, alpha=16.0)
STEP = OptimizerConfig(learning_rate=5e-4)
TEXTS = {"mine": "The capital of France is Rome, and that of Italy is Paris.", "theirs": "1+1=3\n2+2=5\n"}


class Instead:
    """A sampler that serves, for the version asked for and for the base, what it was told to."""

    def __init__(self, sampler: VLLMSampler, instead: dict[str, str]) -> None:
        self._sampler, self._instead = sampler, instead

    def refresh(self, version: str, snapshot_uri: str, digest: str) -> None:
        self._sampler.refresh(version, snapshot_uri, digest)

    def release(self, version: str) -> None:
        self._sampler.release(version)

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[SampledSequence]]:
        return self._sampler.sample(
            [replace(r, version=self._instead.get(r.version, r.version)) for r in requests]
        )


class Trained:
    """A policy in the reference's trainer that takes steps; every state is served as a version of its own."""

    def __init__(self, reference: Reference, sampler: VLLMSampler, name: str, seed: int) -> None:
        self.reference, self.sampler, self.name = reference, sampler, name
        self._served = 0
        reference.trainer.create(name, LORA, seed)
        ids = np.array(reference.ids(TEXTS[name]))
        weights = np.ones(len(ids) - 1, np.float32)
        self._datum = Datum(ids[:-1], ids[1:], weights > 0, weights_N=weights)

    def step(self) -> str:
        trainer = self.reference.trainer
        scale = np.full(len(self._datum), 1 / len(self._datum), np.float32)
        trainer.forward_backward(self.name, [self._datum], cross_entropy, [scale])
        trainer.optim_step(self.name, STEP)
        return self.serve(lambda _: None)

    def serve(self, change: Callable[[Adapter], None]) -> str:
        """A version of the state after a change that the trainer does not keep."""
        adapter = self.reference.trainer.state_of(self.name).adapter
        before = adapter.row_P.clone()
        self._served += 1
        directory = self.reference.scratch / f"{self.name}-{self._served}"
        with torch.no_grad():
            change(adapter)
            self.reference.trainer.publish_snapshot(self.name, directory)
            adapter.row_P.copy_(before)
        version = f"{self.name}@{self._served}"
        self.sampler.refresh(
            version, str(directory), f"{self._served:x}{self.name.encode().hex()}".ljust(64, "0")
        )
        return version

    def canary(self, instead: dict[str, str]) -> Canary:
        def score(version: str, datums: Sequence[Datum]) -> list[np.ndarray]:
            return self.reference.trainer.forward(None if version == BASE else self.name, datums)

        sampler = Instead(self.sampler, instead)
        return Canary(CanaryConfig(), sampler, score, self.reference.tokenizer, kind="vllm")


def doubled(adapter: Adapter) -> None:
    for factors in adapter.factors.values():
        factors.Bt_RN.mul_(2)


def without(layer: str) -> Callable[[Adapter], None]:
    def zero(adapter: Adapter) -> None:
        for name, factors in adapter.factors.items():
            if layer in name:
                factors.Bt_RN.zero_()

    return zero


def test_the_canary_tells_every_planted_fault_from_what_is_right(
    reference: Reference, sampler: VLLMSampler
) -> None:
    mine, theirs = Trained(reference, sampler, "mine", 1), Trained(reference, sampler, "theirs", 2)
    for _ in range(2):
        right = mine.canary({}).check(version := mine.step())
        assert right["sampler/canary_alarm"] == 0
        assert 0 < right["sampler/canary_mean"] < 5e-5
    before, now = version, mine.step()
    faults = {
        "not loaded": {now: BASE},
        "another policy's": {now: theirs.step()},
        "the version before": {now: before},
        "scale doubled": {now: mine.serve(doubled)},
        "base rows with the adapter": {BASE: now},
        "one layer's B zeroed": {now: mine.serve(without("layers.29.mlp.down_proj"))},
        "a block's B zeroed": {now: mine.serve(without("layers.12."))},
    }
    missed = []
    for name, instead in faults.items():
        try:
            mine.canary(instead).check(now)
        except CanaryError:
            continue
        missed.append(name)
    assert missed == []
    assert mine.canary({}).check(now)["sampler/canary_alarm"] == 0
