"""More policies than slots and than memory: nothing shows of it but time, whatever happens to the process."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.lora.adapter import Adapter
from opentinker_core.policies.residency.local_states import LocalStates
from opentinker_core.policies.residency.types import NoRoomError
from opentinker_core.sampling.native import NativeSampler
from opentinker_core.sampling.protocol import SampleRequest, SamplingParams
from opentinker_core.training.state import PolicyState
from opentinker_core.training.trainer import ForwardBackward
from tests.training.residency_schedule import POLICIES, due, operations, rounds
from tests.training.residency_worker import (
    ROW,
    SLOTS,
    Base,
    Runner,
    digest,
    digest_of_result,
    digest_of_state,
)

Report = dict[str, Any]
"""What a worker says after each round."""


class Oracle:
    """All policies' operations without interruption, with memory and slots for all states."""

    def __init__(self, base: Base, scratch: Path) -> None:
        self._base = base
        self._runner = Runner(base, base.pool(len(POLICIES)), scratch, None)
        self.answers: dict[str, list[str]] = {policy: [] for policy in POLICIES}
        self.states: dict[str, list[str]] = {policy: [] for policy in POLICIES}
        """Digests of each policy's state after each of its operations."""

    def run(self, goals: Counter[str]) -> None:
        for index in range(max(goals.values())):
            wanted = {p: operations(p)[index] for p in POLICIES if index < goals[p]}
            for policy, answer in self._runner.run(wanted).items():
                self.answers[policy].append(answer)
                self.states[policy].append(digest_of_state(self.state(policy)))

    def state(self, policy: str) -> PolicyState:
        return self._runner.trainer.state_of(policy)

    def operations_behind(self, policy: str, root: Path) -> int:
        """How far the state on disk has come, 0: there is none; fails if it never was the policy's state."""
        states = LocalStates(root)
        if not states.exists(policy):
            return 0
        found = digest_of_state(self.load(policy, root))
        known = self.states[policy]
        assert found in known, f"{policy}: the state on disk is none that it ever had"
        return len(known) - known[::-1].index(found)

    def load(self, policy: str, root: Path) -> PolicyState:
        base = self._base
        return LocalStates(root).load(
            policy, lambda directory: PolicyState.load(directory, base.layout, base.decoder.device)
        )


class Workers:
    """Starts processes one after the other and kills them."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def live(
        self, first: int, seed: int, *, fatal_save: int = 0, kill_after: int | None = None
    ) -> tuple[int, list[Report]]:
        """Let one work from round `first` until it ends, dies in a save, or is killed after some rounds.

        Returns:
            Its exit code, and what it reported.
        """
        assert self._process.stdin is not None
        print(first, seed, fatal_save, file=self._process.stdin, flush=True)
        pid, reports = int(self._line()), []
        while not (line := self._line()).startswith("ended"):
            reports.append(json.loads(line))
            if len(reports) == kill_after:
                time.sleep(random.Random(seed).random() / 20)
                os.kill(pid, signal.SIGKILL)
        return int(line.split()[1]), reports

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the worker has died of an error"
        return line.strip()


@contextmanager
def workers(*arguments: object) -> Iterator[Workers]:
    command = [sys.executable, "-m", "tests.training.residency_worker", *map(str, arguments)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield Workers(process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def base(tiny_home: Path) -> Base:
    return Base.load(tiny_home)


@pytest.mark.processes
def test_200_policies_over_8_slots_and_little_memory_survive_kills(
    base: Base, tiny_home: Path, tmp_path: Path
) -> None:
    oracle, root, draws = Oracle(base, tmp_path), tmp_path / "states", random.Random(0)
    goals = due(len(rounds()))
    assert (len(goals), goals.total()) == (200, 2000)
    with workers(tiny_home, root, tmp_path) as successive:
        oracle.run(goals)
        first = 0
        for life in range(8):
            fatal_save, n_rounds = (draws.randint(1, 60), None) if life % 2 else (0, draws.randint(1, 30))
            code, reports = successive.live(first, life, fatal_save=fatal_save, kill_after=n_rounds)
            assert code == -signal.SIGKILL
            check_reports(oracle, reports)
            check_disk(oracle, root, reports, rounds()[first : first + len(reports) + 1])
            first += len(reports)
        code, reports = successive.live(first, 8)
    assert code == 0
    check_reports(oracle, reports)
    check_memory(reports)
    for policy, goal in goals.items():
        assert oracle.operations_behind(policy, root) == goal
        check_equal(oracle.load(policy, root), oracle.state(policy))


def check_reports(oracle: Oracle, reports: list[Report]) -> None:
    """Every operation gave what it gives without eviction, and nothing was read twice."""
    for report in reports:
        for policy, index, answer in report["answers"]:
            assert answer == oracle.answers[policy][index], (policy, operations(policy)[index])
        assert report["reads"] == report["loads"] == report["misses"]
        assert report["reads_of_moments"] == report["loads"] + report["restores"]


def check_disk(oracle: Oracle, root: Path, reports: list[Report], done: list[list[str]]) -> None:
    """Whoever was in the rounds `done` is whole on disk, and not older than what was said to be there."""
    saved = {policy: n for report in reports for policy, n in report["saved"].items()}
    for policy in {*saved, *(policy for together in done for policy in together)}:
        assert oracle.operations_behind(policy, root) >= saved.get(policy, 0)


def check_memory(reports: list[Report]) -> None:
    """When all is warm memory grows far less than if each eviction left the smallest state behind."""
    warm, last = reports[len(reports) // 4], reports[-1]
    evictions = last["evictions"] - warm["evictions"]
    assert evictions > 200
    assert last["slot_evictions"] > 200
    smallest_state = 3 * ROW // 2  # half the largest rank; weights and moments
    assert last["rss"] - warm["rss"] < evictions * smallest_state / 2
    assert last["alive"] == last["entries"] < 30


def check_equal(found: PolicyState, expected: PolicyState) -> None:
    """To the bit."""
    assert (found.seed, found.step) == (expected.seed, expected.step)
    assert torch.equal(found.adapter.row_P, expected.adapter.row_P)
    assert (found.moments is None) == (expected.moments is None)
    if found.moments and expected.moments:
        for name in ("exp_avg_P", "exp_avg_sq_P", "updates"):
            assert torch.equal(getattr(found.moments, name), getattr(expected.moments, name))
    assert (found.gradient is None) == (expected.gradient is None)
    if found.gradient and expected.gradient:
        assert torch.equal(found.gradient.row_P, expected.gradient.row_P)


def test_more_policies_than_slots_take_turns(base: Base, tmp_path: Path) -> None:
    oracle, pool = Oracle(base, tmp_path / "oracle"), base.pool(4)
    together = Counter(dict.fromkeys(POLICIES[:12], 6))
    oracle.run(together)
    runner = Runner(base, pool, tmp_path / "few", None)
    for index in range(6):
        answers = runner.run({policy: operations(policy)[index] for policy in together})
        for policy, answer in answers.items():
            assert answer == oracle.answers[policy][index]
            assert digest_of_state(runner.trainer.state_of(policy)) == oracle.states[policy][index]
    assert pool.stats.evictions > 12


def test_a_batch_of_more_policies_than_fit_the_memory(base: Base, tmp_path: Path) -> None:
    """Who finds no room is told so at once, and the same request succeeds when there is."""
    oracle, tier = Oracle(base, tmp_path), base.states(tmp_path / "states", 3 * ROW)
    oracle.run(Counter(dict.fromkeys(POLICIES[:8], 2)))
    runner = Runner(base, base.pool(SLOTS), tmp_path, tier)
    runner.run({policy: operations(policy)[0] for policy in POLICIES[:8]})
    batches = {policy: runner.batch(policy, operations(policy)[1]) for policy in POLICIES[:8]}

    message = r"'p\d': no room in host memory: \d+ bytes are needed, \d+ of \d+ are free, \d+ are pinned"
    with pytest.raises(NoRoomError, match=message):
        runner.trainer.forward_all([(policy, batch.datums) for policy, batch in batches.items()])
    turns = 0
    while batches:
        results = runner.trainer.forward_backward_all(list(batches.values()))
        turns += 1
        for policy, result in zip(list(batches), results, strict=True):
            if isinstance(result, NoRoomError):
                assert re.match(message, str(result))
            else:
                assert isinstance(result, ForwardBackward)
                assert digest_of_result(result) == oracle.answers[policy][1]
                del batches[policy]
        assert tier.statistics().pinned_bytes == 0
    assert 2 < turns < 8
    tier.flush()
    for policy in POLICIES[:8]:
        assert oracle.operations_behind(policy, tmp_path / "states") == 2


def test_a_policy_that_is_created_anew_leaves_nothing_in_its_slot(base: Base, tmp_path: Path) -> None:
    """Its next adapter has a lower rank and fewer targets."""
    runner = Runner(base, base.pool(SLOTS), tmp_path, None)
    datums = runner.batch("p", operations("p0")[1]).datums
    runner.trainer.create("p", LoRAConfig(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj")), 0)
    randomize(runner.trainer.state_of("p"), 0)
    before = runner.trainer.forward("p", datums)
    for name in ("p", "q"):
        runner.trainer.create(name, LoRAConfig(rank=2, alpha=8.0, target_modules=("q_proj",)), 1)
        randomize(runner.trainer.state_of(name), 1)
    after, expected = (digest(runner.trainer.forward(name, datums)) for name in ("p", "q"))
    assert after == expected != digest(before)


def randomize(state: PolicyState, seed: int) -> None:
    state.adapter.row_P.normal_(0, 0.2, generator=torch.Generator().manual_seed(seed))


def test_a_version_that_was_evicted_is_read_once_and_samples_the_same(base: Base, tmp_path: Path) -> None:
    trainer, reads = Runner(base, base.pool(SLOTS), tmp_path, None).trainer, Counter[str]()

    def read(directory: Path) -> Adapter:
        reads[directory.name] += 1
        return trainer.read_adapter(directory)

    size = 2 * ROW
    sampler = NativeSampler(
        base.decoder, base.pool(3), base.tokenizer, lambda uri, _: Path(uri), read, memory=9 * size // 2
    )
    versions = [f"v{number}" for number in range(30)]
    for seed, version in enumerate(versions):
        lora = LoRAConfig(rank=4, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
        trainer.create(version, lora, seed)
        assert trainer.state_of(version).nbytes == size
        randomize(trainer.state_of(version), seed)
        trainer.publish_snapshot(version, tmp_path / version)
        sampler.refresh(version, str(tmp_path / version), version)
    recent, expected = versions[-4:], Counter(versions)
    drawn: dict[str, str] = {}
    draws = random.Random(0)
    for version in [*versions, *draws.choices(versions[:8], k=60), *versions]:
        if version in recent:
            recent.remove(version)
        else:
            expected[version] += 1
        recent = [*recent, version][-4:]
        request = SampleRequest((5, 6, 7), SamplingParams(max_tokens=4), version, (1, 2))
        sequences = sampler.sample([request])[0]
        of_all = digest([array for one in sequences for array in (one.tokens, one.logprobs)])
        assert drawn.setdefault(version, of_all) == of_all
        assert reads == expected
    assert len(set(drawn.values())) == 30
