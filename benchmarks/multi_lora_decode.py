"""Decoding with many LoRA adapters in one batch, one sequence each: the price over the base model alone.

The same sequences are decoded by our sampler without an adapter, by our sampler with as many adapters as
sequences, and by PEFT's mixed batch (`generate(adapter_names=...)`), greedily, after a prompt of 32 tokens.
A decode step is what another token costs: the time for `--new-tokens` less that for one, which has the
prefill in it. A turn measures one way after the other; ratios are medians over turns.

    python benchmarks/multi_lora_decode.py [--json] [--models tiny smollm2] [--turns N]
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import benchmarks  # noqa: F401  before peft and transformers, see there

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line does, before torch is imported

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

from benchmarks.report import show
from benchmarks.subjects import MODELS, Subject
from opentinker_core.config.schema import LoRAConfig
from opentinker_core.lora.adapter import fresh_adapter
from opentinker_core.lora.peft_format import read_peft, write_peft
from opentinker_core.lora.pool import AdapterPool
from opentinker_core.models.decoder import Decoder
from opentinker_core.sampling.native import NativeSampler
from opentinker_core.sampling.protocol import BASE, SampleRequest, SamplingParams

PROMPT, RANK, ALPHA = 32, 8, 16.0
ADAPTERS = {"smollm2": 8, "tiny": 64}


class Arms:
    """The three ways over the same prompts; each gives the tokens it decoded."""

    def __init__(self, subject: Subject, scratch: Path) -> None:
        self._n = ADAPTERS[subject.name]
        draw = np.random.default_rng(0)
        self._prompts = draw.integers(5, subject.vocabulary, (self._n, PROMPT))
        decoder, pool = subject.fused()
        directories = self._write_adapters(pool, scratch, subject.name)
        self._sampler = self._make_sampler(decoder, pool, directories)
        self._peer = self._make_peer(subject, directories)

    def _write_adapters(self, pool: AdapterPool, scratch: Path, name: str) -> list[Path]:
        directories = []
        for index in range(self._n):
            adapter = fresh_adapter(LoRAConfig(rank=RANK, alpha=ALPHA), pool.model, index)
            generator = torch.Generator().manual_seed(index)
            adapter.row_P.add_(0.02 * torch.randn(adapter.row_P.shape, generator=generator))
            directories.append(scratch / f"{name}-{index}")
            write_peft(adapter, directories[-1], name)
        return directories

    def _make_sampler(self, decoder: Decoder, pool: AdapterPool, directories: list[Path]) -> NativeSampler:
        sampler = NativeSampler(
            decoder,
            pool,
            None,  # type: ignore[arg-type]  # no stop strings, so nothing is decoded to text
            lambda uri, _: Path(uri),
            lambda directory: read_peft(directory, pool.model),
        )
        for index, directory in enumerate(directories):
            sampler.refresh(f"p{index}@1", str(directory), f"digest-{index}")
        return sampler

    def _make_peer(self, subject: Subject, directories: list[Path]) -> Any:
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
        model = get_peft_model(subject.plain(), config, adapter_name="unused")
        for index, directory in enumerate(directories):
            model.load_adapter(directory, f"p{index}")
        return model.eval()

    def base(self, new_tokens: int) -> list[list[int]]:
        """Our sampler without an adapter."""
        return self._sample([BASE] * self._n, new_tokens)

    def adapters(self, new_tokens: int) -> list[list[int]]:
        """Our sampler, an adapter for each sequence."""
        return self._sample([f"p{index}@1" for index in range(self._n)], new_tokens)

    def peft(self, new_tokens: int) -> list[list[int]]:
        """PEFT, an adapter for each sequence."""
        ids = torch.from_numpy(self._prompts)
        names = [f"p{index}" for index in range(self._n)]
        with torch.inference_mode():
            out = self._peer.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                adapter_names=names,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return out[:, PROMPT:].tolist()

    def _sample(self, versions: list[str], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(new_tokens, temperature=0.0)
        requests = [
            SampleRequest(tuple(prompt.tolist()), params, version, (0,))
            for prompt, version in zip(self._prompts, versions, strict=True)
        ]
        return [sequences[0].tokens.tolist() for sequences in self._sampler.sample(requests)]


Arm = Callable[[int], list[list[int]]]


def measure(arms: list[Arm], turns: int, new_tokens: int) -> list[list[float]]:
    """Milliseconds a decode step of each arm, of each turn."""
    for arm in arms:
        arm(2)
    steps: list[list[float]] = [[] for _ in arms]
    for _ in range(turns):
        for arm, own in zip(arms, steps, strict=True):
            longer = _seconds(arm, new_tokens)
            own.append(1000 * (longer - _seconds(arm, 1)) / (new_tokens - 1))
    return steps


def _seconds(arm: Arm, new_tokens: int) -> float:
    started = time.perf_counter()
    arm(new_tokens)
    return time.perf_counter() - started


def main() -> None:
    """Measure, and print the table or the object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="+", choices=sorted(ADAPTERS), default=["tiny", "smollm2"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=24)
    arguments = parser.parse_args()
    rows: list[tuple[str, float, str]] = []
    ratios = {}
    for name in arguments.models:
        with TemporaryDirectory() as scratch:
            arms = Arms(MODELS[name](torch.float32), Path(scratch))
            long = arguments.new_tokens
            same = sum(a == b for a, b in zip(arms.adapters(long), arms.peft(long), strict=True))
            base, ours, peer = measure([arms.base, arms.adapters, arms.peft], arguments.turns, long)
        n = ADAPTERS[name]
        rows += [
            (f"{name} base alone, {n} sequences", median(base), "ms a step"),
            (f"{name} {n} adapters", median(ours), "ms a step"),
            (f"{name} PEFT mixed batch", median(peer), "ms a step"),
            (f"{name} sequences decoded alike", same / n, "share"),
        ]
        ratios[f"{name}_{n}_over_base"] = median(o / b for o, b in zip(ours, base, strict=True))
        ratios[f"{name}_{n}_vs_peft_mixed"] = median(p / o for o, p in zip(ours, peer, strict=True))
    show("multi-LoRA decoding", rows, ratios, as_json=arguments.json)


if __name__ == "__main__":
    main()
