"""Training many LoRA policies at once: our fused pass against PEFT, which trains one adapter at a time.

Eight policies, each 2 rows of 64 tokens, r = 8, all linears. The peer is what a user of PEFT writes: one
model with eight adapters, `set_adapter`, forward with labels, backward, for each of them. Both compute the
same losses (checked) over the same tokens. A turn measures the one, then the other; ratios are medians
over turns. SmolLM2-135M is measured in the number format in which the peer is faster, unless `--dtypes`
names others.

    python benchmarks/multi_lora_training.py [--json] [--models tiny smollm2] [--turns N] [--dtypes ...]
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import benchmarks  # noqa: F401  before peft and transformers, see there

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line does, before torch is imported

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from benchmarks.report import show
from benchmarks.subjects import MODELS, Subject
from opentinker_core.config.schema import LoRAConfig, Normalizer
from opentinker_core.models.attention import ATTENTION
from opentinker_core.objectives.cross_entropy import cross_entropy
from opentinker_core.objectives.normalizers import token_scales
from opentinker_core.training.trainer import PolicyBatch, Trainer
from opentinker_core.trajectories.types import Datum

POLICIES, ROWS, TOKENS, RANK, ALPHA = 8, 2, 64, 8, 16.0


@dataclass
class Arms:
    """One turn of each way of training, giving the losses of all policies."""

    ours: Callable[[], list[float]]
    peer: Callable[[], list[float]]


def arms(subject: Subject) -> Arms:
    """Both ways over one and the same data."""
    tokens = np.random.default_rng(0).integers(5, subject.vocabulary, (POLICIES, ROWS, TOKENS))
    return Arms(_ours(subject, tokens), _peer(subject, tokens))


def _ours(subject: Subject, tokens: np.ndarray) -> Callable[[], list[float]]:
    decoder, pool = subject.fused()
    trainer = Trainer(decoder, pool, subject.name)
    batches = []
    for index, rows in enumerate(tokens):
        policy = f"p{index}"
        trainer.create(policy, LoRAConfig(rank=RANK, alpha=ALPHA), index)
        datums = [_datum(row) for row in rows]
        batches.append(
            PolicyBatch(policy, datums, cross_entropy, token_scales(Normalizer.TOKENS, datums, TOKENS))
        )

    def turn() -> list[float]:
        losses = [getattr(result, "loss", float("nan")) for result in trainer.forward_backward_all(batches)]
        for index in range(len(tokens)):
            trainer.discard_gradient(f"p{index}")
        return losses

    return turn


def _datum(row: np.ndarray) -> Datum:
    """All tokens but the first are targets; as with the peer, the last input predicts nothing."""
    targets = np.append(row[1:], 0)
    mask = np.arange(len(row)) < len(row) - 1
    return Datum(row, targets, mask, weights_N=mask.astype(np.float32))


def _peer(subject: Subject, tokens: np.ndarray) -> Callable[[], list[float]]:
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", lora_dropout=0.0)
    model = get_peft_model(subject.plain(), config, adapter_name="p0")
    for index in range(1, len(tokens)):
        model.add_adapter(f"p{index}", config)
    ids = torch.from_numpy(tokens)

    def turn() -> list[float]:
        losses = []
        for index in range(len(tokens)):
            model.set_adapter(f"p{index}")
            loss = model(input_ids=ids[index], labels=ids[index]).loss
            loss.backward()
            losses.append(loss.item())
        _clear(model)
        return losses

    return turn


def _clear(model: PeftModel) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def measure(subject: Subject, turns: int) -> tuple[list[float], list[float]]:
    """Seconds of each turn: ours, the peer's."""
    both = arms(subject)
    ours, theirs = both.ours(), both.peer()  # the first turn warms up
    gap = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    if gap > (1e-4 if subject.dtype == torch.float32 else 5e-2):
        raise SystemExit(f"the two do not compute the same: relative difference of losses {gap:.2g}")
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(turns):
        for arm, own in zip((both.ours, both.peer), seconds, strict=True):
            started = time.perf_counter()
            arm()
            own.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    """Measure, and print the table or the object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["tiny", "smollm2"])
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"]
    )
    parser.add_argument("--turns", type=int, default=0, help="0: 15 for tiny, 3 for smollm2")
    arguments = parser.parse_args()
    assert ATTENTION  # registered with transformers
    rows, ratios = [], {}
    for model in arguments.models:
        dtypes = arguments.dtypes if model == "smollm2" else ["float32"]
        peers = {}
        for dtype in dtypes:
            ours, theirs = measure(
                MODELS[model](getattr(torch, dtype)), arguments.turns or (15 if model == "tiny" else 3)
            )
            ratio = median(t / o for o, t in zip(ours, theirs, strict=True))
            rows += [
                (f"{model} {dtype} fused", median(ours), "s"),
                (f"{model} {dtype} PEFT loop", median(theirs), "s"),
                (f"{model} {dtype} speedup", ratio, "x"),
            ]
            peers[dtype] = (median(theirs), ratio)
        ratios[f"{model}_vs_peft_loop"] = min(peers.values())[1]
    show("multi-LoRA training", rows, ratios, as_json=arguments.json)


if __name__ == "__main__":
    main()
