"""Gradient checkpointing: less is kept, blocks run twice under the same routing, no bit changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opentinker_core.runtime.engine
from opentinker_core.errors import UsageError
from opentinker_core.evaluation.isolation import Bench, Setting, Training
from opentinker_core.evaluation.participants import participants
from opentinker_core.lora.routing import same_routing
from opentinker_core.models.loading import load_model
from opentinker_core.models.source import resolve
from opentinker_core.sampling.native import NativeSampler
from opentinker_core.sampling.protocol import SampleRequest, SamplingParams
from opentinker_core.training.trainer import LayoutSettings
from tests.runtime.runs import small_config, train
from tests.tiny import TinyEngine


def _bench(home: Path, checkpointing: bool) -> Bench:
    bench = Bench(load_model(resolve("tiny", home), "cpu", torch.float32), "tiny")
    if checkpointing:
        bench.decoder = bench.decoder.with_checkpoints(same_routing)
    return bench


@pytest.mark.parametrize("layout", [LayoutSettings(), LayoutSettings(micro_batch_tokens=96, pack=True)])
def test_no_bit_of_any_policy_changes(tiny_home: Path, layout: LayoutSettings) -> None:
    records = []
    for checkpointing in (False, True):
        bench = _bench(tiny_home, checkpointing)
        setting = Setting(tuple(participants(8, bench.layout)), 2, layout=layout)
        records.append(bench.train(setting))
    for name, record in records[0].items():
        assert record.differing(records[1][name]) == set()


def test_blocks_run_twice_and_keep_less(tiny_home: Path) -> None:
    runs, kept = [], []
    for checkpointing in (False, True):
        bench = _bench(tiny_home, checkpointing)
        participant = participants(1, bench.layout)[0]
        training = Training(bench.trainer(), [participant])
        batch = bench.batch(participant, 0)
        calls: list[int] = []
        block = bench.decoder.trunk.get_submodule("layers.1.mlp")
        block.register_forward_pre_hook(lambda module, args, calls=calls: calls.append(1))
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            training.forward_backward([batch])
        runs.append(len(calls))
        kept.append(sum(sizes))
    assert runs == [1, 2]
    assert kept[1] < 0.5 * kept[0]


def test_no_gradient_no_second_run(tiny_home: Path) -> None:
    bench = _bench(tiny_home, True)
    batch = bench.batch(participants(1, bench.layout)[0], 0)
    calls: list[int] = []
    block = bench.decoder.trunk.get_submodule("layers.1.mlp")
    block.register_forward_pre_hook(lambda *_: calls.append(1))
    bench.trainer().forward(None, batch.datums)
    assert len(calls) == 1


def test_sampling_keeps_its_cache(tiny_home: Path, tmp_path: Path) -> None:
    """After a gradient pass, which sets blocks to training mode, the sampler decodes as ever."""
    engine = TinyEngine.open(tiny_home, tmp_path)
    params = SamplingParams(max_tokens=12)
    request = SampleRequest(engine.ids("12+34="), params, "base", (1, 2, 3))
    plain = engine.sampler.sample([request])[0]
    bench = _bench(tiny_home, True)
    participant = participants(1, bench.layout)[0]
    training = Training(bench.trainer(), [participant])
    training.forward_backward([bench.batch(participant, 0)])
    trainer = bench.trainer()
    sampler = NativeSampler(
        bench.decoder, trainer._pool, engine.tokenizer, lambda uri, _: Path(uri), trainer.read_adapter
    )
    again = sampler.sample([request])[0]
    for a, b in zip(plain, again, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.logprobs.tolist() == b.logprobs.tolist()


def test_a_model_that_cannot_is_refused(tiny_home: Path) -> None:
    decoder = _bench(tiny_home, False).decoder
    decoder.model.supports_gradient_checkpointing = False
    with pytest.raises(UsageError, match=r"gradient_checkpointing: True is not supported by Llama.*False"):
        replace(decoder).with_checkpoints(same_routing)


def test_a_run_publishes_the_same_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the config to the engine: SFT, rollouts, RL and evaluation."""
    asked: list[bool] = []

    def counted() -> Any:
        asked.append(True)
        return same_routing()

    monkeypatch.setattr(opentinker_core.runtime.engine, "same_routing", counted)
    digests = []
    for checkpointing in (False, True):
        config = small_config(runtime={"threads": 1, "gradient_checkpointing": checkpointing})
        digests.append(train(tmp_path / str(checkpointing), config).version.sampler.digest)
        assert bool(asked) == checkpointing
    assert digests[0] == digests[1]
