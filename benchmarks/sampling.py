"""Sampling, side by side: our native sampler, HF `generate` with PEFT, and vLLM's CPU server.

Group rollouts: 8 prompts of 24 to 120 tokens, 8 completions of each at temperature 1, by 1, 8 or 64
adapters (r = 8, all linears) that change between the groups, or with 64 within them. A completion ends
at the end of a sentence, at `--longest` tokens at the latest, so lengths are ragged: our sampler draws
them, and the others are told the lengths it drew, so that all give the same number of tokens. `generate`
runs until the longest of a batch ends; its batches have one adapter each, or are PEFT's mixed ones
(`adapter_names`), whichever was faster in the first turn. vLLM gets a request for each completion through
our client, and serves without LoRA where no row has an adapter. Speeds are the tokens of completions per
second.

Several turns: 8 episodes of `--exchanges` turns (8) whose prompts grow from 192 tokens by 88 a turn, of which
24 are the model's own; our sampler with its cache of prefixes, and without.

Each turn has new prompts, so no cache knows them; a turn measures one way after the other, and ratios are
medians over turns. `native_vs_generate` and `native_vs_vllm_cpu_lora` are the smallest over the numbers of
adapters.

    python benchmarks/sampling.py [--json] [--parts generate vllm multiturn] [--adapters 1 8 64] [--turns N]
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import benchmarks  # noqa: F401  before peft and transformers, see there

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line does, before torch is imported

import torch

from benchmarks.report import show
from benchmarks.rollouts import GROUPS, TURNS, Rollouts, Text, one_by_one
from benchmarks.sampling_peers import ALPHA, RANK, Generate, vllm, vllm_is_missing
from benchmarks.subjects import MODELS, Subject
from opentinker_core.config.schema import LoRAConfig
from opentinker_core.lora.adapter import fresh_adapter
from opentinker_core.lora.peft_format import read_peft, write_peft
from opentinker_core.sampling.generation import Limits
from opentinker_core.sampling.native import NativeSampler
from opentinker_core.sampling.protocol import BASE, SampleRequest

PARTS = ("generate", "vllm", "multiturn")
NATIVE = "native"
Way = Callable[[list[SampleRequest]], object]


@dataclass
class Results:
    """What was measured so far."""

    rows: list[tuple[str, float, str]] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)

    def add(self, where: str, speeds: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Note tokens/s of each way, of each turn; gives the ratio of the native sampler to every other."""
        new = [(f"{where}: {name}", median(own), "tokens/s") for name, own in speeds.items()]
        self.rows += new
        for name, speed, unit in new:  # the whole takes long
            print(f"{name} {speed:.4g} {unit}", file=sys.stderr)
        return {
            name: median(n / o for n, o in zip(speeds[NATIVE], own, strict=True))
            for name, own in speeds.items()
            if name != NATIVE
        }

    def note(self, name: str, of_adapters: Mapping[int, float]) -> None:
        """Note a ratio for each number of adapters, and the smallest as the ratio itself."""
        self.ratios |= {f"{name}_{count}": ratio for count, ratio in of_adapters.items()}
        self.ratios[name] = min(of_adapters.values())


class Bench:
    """A subject with our samplers and the adapters of all parts."""

    def __init__(self, subject: Subject, scratch: Path, adapters: int, turns: int, longest: int) -> None:
        self.subject, self._turns, self._longest = subject, turns, longest
        self._decoder, self.pool = subject.fused()
        self._adapters = self._write(scratch, adapters)
        self._native = self._sampler(Limits())
        self._rollouts = Rollouts(Text.of(subject))

    def generate(self, counts: Iterable[int], results: Results) -> None:
        """Our sampler and HF `generate`."""
        ratios = {}
        for count in counts:
            chosen = self._chosen(count)
            peer = Generate(self.subject, chosen)
            ways: dict[str, Way] = {"generate by adapter": peer.by_adapter}
            if count > 1:
                ways["generate mixed"] = peer.mixed
            (ratios[count],) = results.add(f"{count} adapters", self._compare(list(chosen), ways)).values()
        results.note("native_vs_generate", ratios)

    def vllm(self, counts: Iterable[int], arguments: Sequence[str], results: Results) -> None:
        """Our sampler and vLLM, base model and adapters."""
        ratios = {}
        for count in (0, *counts):
            chosen = self._chosen(count)
            with vllm(self.subject, self.pool, chosen, arguments) as peer:
                where = f"{count} adapters" if count else "base model"
                speeds = self._compare(list(chosen) or [BASE], {"vLLM": peer.sample})
            (ratios[count],) = results.add(where, speeds).values()
        results.ratios["native_vs_vllm_cpu_base"] = ratios.pop(0)
        results.note("native_vs_vllm_cpu_lora", ratios)

    def multiturn(self, exchanges: int, results: Results) -> None:
        """Our sampler with its cache of prefixes, and without, in episodes of so many turns."""
        version = next(iter(self._adapters))
        without = self._sampler(Limits(prefix_bytes=0))
        speeds: dict[str, list[float]] = {NATIVE: [], "no prefix cache": []}
        for turn in range(self._turns + 1):
            self._forget()
            episodes = self._rollouts.episodes(version)
            for name, sampler in ((NATIVE, self._native), ("no prefix cache", without)):
                started = time.perf_counter()
                actions: list[list[list[int]]] = [[] for _ in episodes]
                for step in range(exchanges if turn else 1):
                    asked = [e.request(step, own) for e, own in zip(episodes, actions, strict=True)]
                    for own, sequences in zip(actions, sampler.sample(asked), strict=True):
                        own.append(sequences[0].tokens.tolist())
                tokens = sum(len(action) for own in actions for action in own)
                if turn:
                    speeds[name].append(tokens / (time.perf_counter() - started))
        ratio = results.add(f"{GROUPS} episodes of {exchanges} turns", speeds)
        results.ratios["multiturn_reuse"] = ratio["no prefix cache"]

    def _compare(self, versions: list[str], ways: Mapping[str, Way]) -> dict[str, list[float]]:
        """Tokens/s of each turn: our sampler's, and those of the way that was faster in the first turn."""
        left = dict(ways)
        self._turn(versions, left, longest=2)  # warms up
        taken: list[dict[str, float]] = []
        for _ in range(self._turns):
            taken.append(self._turn(versions, left, self._longest))
            fastest = max(left, key=taken[0].__getitem__)
            left = {fastest: left[fastest]}
        return {name: [one[name] for one in taken] for name in (NATIVE, *left)}

    def _turn(self, versions: list[str], ways: Mapping[str, Way], longest: int) -> dict[str, float]:
        self._forget()
        requests = self._rollouts.groups(versions, longest)
        started = time.perf_counter()
        lengths = [[len(one.tokens) for one in own] for own in self._native.sample(requests)]
        seconds = {NATIVE: time.perf_counter() - started}
        for name, way in ways.items():
            asked = one_by_one(requests, lengths)
            started = time.perf_counter()
            way(asked)
            seconds[name] = time.perf_counter() - started
        tokens = sum(map(sum, lengths))
        return {name: tokens / own for name, own in seconds.items()}

    def _forget(self) -> None:
        self._native.generation.prefixes.clear()

    def _chosen(self, count: int) -> dict[str, Path]:
        return dict(list(self._adapters.items())[:count])

    def _sampler(self, limits: Limits) -> NativeSampler:
        sampler = NativeSampler(
            self._decoder,
            self.pool,
            None,
            lambda uri, _: Path(uri),
            lambda directory: read_peft(directory, self.pool.model),
            limits=limits,
        )
        for index, (version, directory) in enumerate(self._adapters.items()):
            sampler.refresh(version, str(directory), f"digest-{index}")
        return sampler

    def _write(self, scratch: Path, count: int) -> dict[str, Path]:
        """Adapters that leave the model speaking sense."""
        written = {}
        for index in range(count):
            adapter = fresh_adapter(LoRAConfig(rank=RANK, alpha=ALPHA), self.pool.model, index)
            generator = torch.Generator().manual_seed(index)
            adapter.row_P.add_(0.002 * torch.randn(adapter.row_P.shape, generator=generator))
            written[f"p{index}@1"] = scratch / f"p{index}"
            write_peft(adapter, written[f"p{index}@1"], self.subject.name)
        return written


def main() -> None:
    """Measure, and print the table or the object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--adapters", nargs="+", type=int, default=[1, 8, 64], choices=range(1, 65), metavar="N"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--longest", type=int, default=96, help="tokens of a completion at most")
    parser.add_argument(
        "--exchanges", type=int, default=TURNS, choices=range(1, TURNS + 1), help="turns of an episode"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--model", choices=sorted(MODELS), default="smollm2", help="vLLM serves smollm2 alone"
    )
    parser.add_argument(
        "--vllm", action="append", default=[], help="--vllm=ARGUMENT: one more for its server"
    )
    arguments = parser.parse_args()
    parts = set(arguments.parts)
    why = "vLLM is left out: it serves smollm2 alone" if arguments.model != "smollm2" else vllm_is_missing()
    if "vllm" in parts and why:
        print(why, file=sys.stderr)
        parts.discard("vllm")
    results = Results()
    with TemporaryDirectory() as scratch:
        subject = MODELS[arguments.model](getattr(torch, arguments.dtype))
        bench = Bench(subject, Path(scratch), max(arguments.adapters), arguments.turns, arguments.longest)
        if "generate" in parts:
            bench.generate(arguments.adapters, results)
        if "vllm" in parts:
            bench.vllm(arguments.adapters, arguments.vllm, results)
        if "multiturn" in parts:
            bench.multiturn(arguments.exchanges, results)
    show("sampling", results.rows, results.ratios, as_json=arguments.json)


if __name__ == "__main__":
    main()
