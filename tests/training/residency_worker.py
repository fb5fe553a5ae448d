"""Another process that trains many policies within little memory, for tests of death in the middle.

    python -m tests.training.residency_worker HOME ROOT SCRATCH

Loads the model once. For each line `FIRST_ROUND SEED FATAL_SAVE` on its input it starts a child that does
the rounds of `residency_schedule` from there on, with policies' states below ROOT; the child prints its
process id, then a JSON object a round, and kills itself within its FATAL_SAVE-th save (0: never). The
end of a child is printed as `ended` and its exit code.
"""

import gc
import hashlib
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import PreTrainedTokenizerBase

from opentinker_core.config.schema import Normalizer
from opentinker_core.errors import UsageError
from opentinker_core.lora.layer import install
from opentinker_core.lora.layout import ModelLayout
from opentinker_core.lora.pool import AdapterPool
from opentinker_core.models.decoder import Decoder
from opentinker_core.models.loading import load_model, load_tokenizer
from opentinker_core.models.source import resolve
from opentinker_core.objectives.cross_entropy import cross_entropy
from opentinker_core.objectives.normalizers import token_scales
from opentinker_core.policies.residency.host import HostTier
from opentinker_core.sampling.native import NativeSampler
from opentinker_core.sampling.protocol import SampleRequest, SamplingParams
from opentinker_core.training.residency import states_on_disk
from opentinker_core.training.state import PolicyState
from opentinker_core.training.trainer import ForwardBackward, PolicyBatch, Trainer
from tests.training.residency_schedule import (
    Kind,
    Operation,
    Standing,
    datums_of,
    due,
    lora_of,
    operations,
    optimizer_of,
    parts,
    rounds,
)

SLOTS = 8
ROW = 4 * 4 * (64 + 64) * 2 * 2
"""Bytes of the largest adapters: float32, rank 4, two square layers of width 64 in each of two blocks."""
BUDGET = 34 * ROW
"""The states of a round, whole and with gradients, and little more: about a dozen of average size."""


@dataclass(frozen=True, eq=False)
class Base:
    """The tiny model, which any number of trainers and samplers may use one after the other."""

    name: str
    decoder: Decoder
    layout: ModelLayout
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls, home: Path) -> "Base":
        torch.set_num_threads(1)
        source = resolve("tiny", home)
        model = load_model(source, "cpu", torch.float32)
        return cls(source.name, Decoder.of(model), install(model), load_tokenizer(source))

    def pool(self, slots: int) -> AdapterPool:
        return AdapterPool(self.layout, "cpu", torch.float32, slots)

    def states(self, root: Path, budget: int) -> HostTier[PolicyState]:
        return states_on_disk(root, budget, self.layout, self.decoder.device, self.name)


class Runner:
    """Does operations of policies, those of one kind together."""

    def __init__(
        self, base: Base, pool: AdapterPool, scratch: Path, states: HostTier[PolicyState] | None
    ) -> None:
        self.trainer = Trainer(base.decoder, pool, base.name, states=states)
        self._tokenizer = base.tokenizer
        self._sampler = NativeSampler(
            base.decoder,
            pool,
            base.tokenizer,
            lambda uri, _: Path(uri),
            self.trainer.read_adapter,
            memory=9 * ROW // 2,
        )
        self._scratch, self._published = scratch, 0

    def run(self, wanted: Mapping[str, Operation]) -> dict[str, str]:
        """The digest of what each policy's operation gave."""
        given: dict[str, str] = {}
        for kind in Kind:
            chosen = {policy: operation for policy, operation in wanted.items() if operation.kind is kind}
            if chosen:
                given |= dict(zip(chosen, self._run(kind, chosen), strict=True))
        return given

    def _run(self, kind: Kind, chosen: Mapping[str, Operation]) -> list[str]:
        trainer, asked = self.trainer, chosen.items()
        match kind:
            case Kind.CREATE:
                return [self._create(policy, operation.leaves.seed) for policy, operation in asked]
            case Kind.FORWARD_BACKWARD:
                return self._forward_backward([self.batch(*item) for item in asked])
            case Kind.OPTIM_STEP:
                norms = [trainer.optim_step(p, optimizer_of(operation)) for p, operation in asked]
                return [repr(norm["grad_norm"]) for norm in norms]
            case Kind.FORWARD:
                datums = [(policy, datums_of(operation, self._tokenizer)) for policy, operation in asked]
                return [digest(logprobs) for logprobs in trainer.forward_all(datums)]
            case Kind.SAMPLE:
                return [self._sample(*item) for item in asked]

    def _create(self, policy: str, seed: int) -> str:
        self.trainer.create(policy, lora_of(seed), seed)
        return "created"

    def batch(self, policy: str, operation: Operation) -> PolicyBatch:
        """What a forward_backward asks for."""
        datums = datums_of(operation, self._tokenizer)
        return PolicyBatch(policy, datums, cross_entropy, token_scales(Normalizer.TOKENS, datums, 1))

    def _forward_backward(self, batches: Sequence[PolicyBatch]) -> list[str]:
        given = []
        for result in self.trainer.forward_backward_all(batches):
            if isinstance(result, Exception):
                raise result
            given.append(digest_of_result(result))
        return given

    def _sample(self, policy: str, operation: Operation) -> str:
        """Publish what the policy is now, and draw from it."""
        self._published += 1
        directory, version = self._scratch / f"{os.getpid()}-{self._published}", f"{policy}@{self._published}"
        self.trainer.publish_snapshot(policy, directory)
        self._sampler.refresh(version, str(directory), version)
        draws = operation.draws()
        prompt = tuple(self._tokenizer.encode(f"{draws.randrange(100)}+1=", add_special_tokens=False))
        request = SampleRequest(prompt, SamplingParams(max_tokens=2), version, (draws.randrange(1 << 30),))
        sequence = self._sampler.sample([request])[0][0]
        return digest([sequence.tokens, sequence.logprobs])


def digest(arrays: Sequence[np.ndarray | np.generic]) -> str:
    """Of every bit."""
    return hashlib.sha256(b"|".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def digest_of_result(result: ForwardBackward) -> str:
    """Of every bit of loss and logprobs."""
    return digest([np.float64(result.loss), *result.logprobs])


def digest_of_state(state: PolicyState) -> str:
    """Of every bit of weights, moments, gradient, seed and step."""
    moments, gradient = state.moments, state.gradient
    rows = [state.adapter.row_P]
    rows += [moments.exp_avg_P, moments.exp_avg_sq_P, moments.updates] if moments else []
    rows += [gradient.row_P] if gradient else []
    numbers = np.array([state.seed, state.step, moments is not None, gradient is not None])
    return digest([numbers, *(row.numpy() for row in rows)])


class Life:
    """One process: from what lies on disk to wherever it dies."""

    def __init__(self, base: Base, root: Path, scratch: Path, seed: int) -> None:
        self._tier = base.states(root, BUDGET)
        self._pool = base.pool(SLOTS)
        self._runner = Runner(base, self._pool, scratch, self._tier)
        self._draws = random.Random(seed)
        self._counts = count_reads(self._tier)
        self._done: dict[str, int] = {}
        """Operations behind the states of those who were met in this life."""

    def do_rounds(self, first: int) -> None:
        visits = due(first)
        for policies in rounds()[first:]:
            visits.update(policies)
            answers = self._catch_up({policy: visits[policy] for policy in policies})
            saved = self._disturb()
            self._report(answers, saved)
        answers = []
        for policy, goal in visits.items():  # what a kill has undone and nobody came back to
            answers += self._catch_up({policy: goal})
        self._tier.flush()
        gc.collect()
        alive = sum(type(thing) is PolicyState for thing in gc.get_objects())
        self._report(answers, dict(self._done), alive=alive)

    def _report(self, answers: list[tuple[str, int, str]], saved: dict[str, int], **more: int) -> None:
        print(json.dumps({"answers": answers, "saved": saved} | self._measure() | more), flush=True)

    def _catch_up(self, goals: Mapping[str, int]) -> list[tuple[str, int, str]]:
        """Bring policies to where they have done so many operations: (policy, index, digest) of each done."""
        for policy in goals:
            if policy not in self._done:
                self._done[policy] = self._stands(policy)
        answers = []
        while behind := [policy for policy, goal in goals.items() if self._done[policy] < goal]:
            given = self._runner.run({policy: operations(policy)[self._done[policy]] for policy in behind})
            for policy in behind:
                answers.append((policy, self._done[policy], given[policy]))
                self._done[policy] += 1
        return answers

    def _stands(self, policy: str) -> int:
        """Operations that the policy's state has behind it; if that is unclear, it goes back to its step."""
        try:
            state = self._runner.trainer.state_of(policy)
        except UsageError:
            return 0
        pending = 0
        if state.gradient is not None and parts(state.seed, state.step) == 1:
            pending = 1
        elif state.gradient is not None:
            self._runner.trainer.discard_gradient(policy)
        standing = Standing(state.seed, state.step, pending)
        return 1 + [operation.leaves for operation in operations(policy)].index(standing)

    def _disturb(self) -> dict[str, int]:
        """Evict or write random states: how many operations are behind what is known to be on disk."""
        chosen = [policy for policy in self._tier.resident() if self._draws.random() < 0.1]
        for policy in chosen:
            self._draws.choice([self._tier.evict, self._tier.flush])(policy)
        return {policy: self._done[policy] for policy in chosen}

    def _measure(self) -> dict[str, int]:
        statistics = self._tier.statistics()
        return {
            "rss": psutil.Process().memory_info().rss,
            "loads": statistics.loads,
            "restores": statistics.restores,
            "evictions": statistics.evictions,
            "entries": statistics.entries,
            "slot_evictions": self._pool.stats.evictions,
            **self._counts,
        }


def count_reads(tier: HostTier[PolicyState]) -> Counter[str]:
    """Counts from here on: `misses`, `reads` of a whole state, and `reads_of_moments`, those included."""
    counts = Counter(misses=0, reads=0, reads_of_moments=0)
    lease, load, load_moments = tier.lease, PolicyState.load, PolicyState.load_moments

    @contextmanager
    def counting_lease(key: str, **options: Any) -> Iterator[PolicyState]:
        missing = key not in tier.resident()
        with lease(key, **options) as state:
            counts["misses"] += missing
            yield state

    def counting_load(*arguments: Any) -> PolicyState:
        counts["reads"] += 1
        return load(*arguments)

    def counting_load_moments(self: PolicyState, directory: Path) -> None:
        counts["reads_of_moments"] += 1
        load_moments(self, directory)

    tier.lease = counting_lease  # type: ignore[method-assign]
    PolicyState.load = staticmethod(counting_load)  # type: ignore[assignment]
    PolicyState.load_moments = counting_load_moments  # type: ignore[method-assign]
    return counts


def die_in_save(number: int) -> None:
    """Kill this process when the files of its n-th save are written and not yet in place."""
    save, saves = PolicyState.save, 0

    def fatal(self: PolicyState, *arguments: Any, **options: Any) -> None:
        nonlocal saves
        save(self, *arguments, **options)
        saves += 1
        if saves == number:
            os.kill(os.getpid(), signal.SIGKILL)

    PolicyState.save = fatal  # type: ignore[method-assign]


def main(home: str, root: str, scratch: str) -> None:
    base = Base.load(Path(home))
    for line in sys.stdin:
        first, seed, fatal_save = map(int, line.split())
        child = os.fork()
        if not child:
            print(os.getpid(), flush=True)
            die_in_save(fatal_save)
            Life(base, Path(root), Path(scratch), seed).do_rounds(first)
            return
        _, status = os.waitpid(child, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
