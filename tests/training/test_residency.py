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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import UsageError
from opentinker_core.lora.adapter import Adapter
from opentinker_core.objectives.types import Metrics, SignalBatch
from opentinker_core.policies.residency.local_states import LocalStates
from opentinker_core.policies.residency.types import ResidencyError
from opentinker_core.sampling.native import NativeSampler
from opentinker_core.sampling.protocol import SampleRequest, SamplingParams
from opentinker_core.training.state import PolicyState
from opentinker_core.training.trainer import ForwardBackward
from opentinker_core.trajectories.types import Datum
from tests.training.residency_schedule import POLICIES, Kind, due, operations, rounds
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
    assert (len(goals), goals.total()) == (200, 1800)
    with workers(tiny_home, root, tmp_path) as successive:
        oracle.run(goals)
        first = 0
        for life in range(8):
            fatal_save, n_rounds = (draws.randint(1, 40), None) if life % 2 else (0, draws.randint(1, 20))
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
    """When all is warm memory grows less than if each eviction left the smallest state behind."""
    warm, last = reports[len(reports) // 4], reports[-1]
    evictions = last["evictions"] - warm["evictions"]
    assert evictions > 200
    assert last["slot_evictions"] > 200
    smallest_state = 3 * ROW // 2  # half the largest rank; weights and moments
    assert last["rss"] - warm["rss"] < evictions * smallest_state * 3 / 4  # the allocator's noise: some MB
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


@pytest.mark.parametrize("scarce", ["slots", "memory"])
def test_more_policies_than_fit_take_turns(scarce: str, base: Base, tmp_path: Path) -> None:
    oracle, together = Oracle(base, tmp_path / "oracle"), Counter(dict.fromkeys(POLICIES[:12], 6))
    oracle.run(together)
    pool = base.pool(4 if scarce == "slots" else SLOTS)
    tier = base.states(tmp_path / "states", 5 * ROW) if scarce == "memory" else None
    runner = Runner(base, pool, tmp_path / "few", tier)
    for index in range(6):
        answers = runner.run({policy: operations(policy)[index] for policy in together})
        for policy, answer in answers.items():
            assert answer == oracle.answers[policy][index]
            assert digest_of_state(runner.trainer.state_of(policy)) == oracle.states[policy][index]
    if tier is None:
        assert pool.stats.evictions > 12
    else:
        statistics = tier.statistics()
        assert statistics.evictions > 12
        assert statistics.pinned_bytes == 0
        assert statistics.peak_bytes <= tier.budget + ROW, "a first step brings moments, a row more"


def test_the_base_model_takes_its_turn_once(base: Base, tmp_path: Path) -> None:
    runner = Runner(base, base.pool(SLOTS), tmp_path, base.states(tmp_path / "states", 2 * ROW))
    asked: list[tuple[str | None, Sequence[Datum]]] = []
    for policy in POLICIES[:6]:
        runner.run({policy: operations(policy)[0]})
        randomize(runner.trainer.state_of(policy), 0)
        asked += [(policy, runner.batch(policy, operations(policy)[1]).datums)]
        asked += [(None, asked[-1][1])]
    alone = [digest(runner.trainer.forward(policy, datums)) for policy, datums in asked]
    assert [digest(logprobs) for logprobs in runner.trainer.forward_all(asked)] == alone
    assert runner.trainer.forward_all([]) == []


def test_of_batches_that_take_turns_one_fails_alone(base: Base, tmp_path: Path) -> None:
    """Those of earlier turns keep their gradients, and nobody gets any twice."""
    oracle, tier = Oracle(base, tmp_path), base.states(tmp_path / "states", 5 * ROW)
    oracle.run(Counter(dict.fromkeys(POLICIES[:8], 2)))
    runner = Runner(base, base.pool(SLOTS), tmp_path, tier)
    runner.run({policy: operations(policy)[0] for policy in POLICIES[:8]})
    batches = {policy: runner.batch(policy, operations(policy)[1]) for policy in POLICIES[:8]}

    def broken(logprobs_M: torch.Tensor, batch: SignalBatch) -> tuple[torch.Tensor, Metrics]:
        raise ZeroDivisionError

    batches["p6"] = replace(batches["p6"], objective=broken)
    batches["nobody"] = replace(batches["p5"], policy="nobody")
    outcomes = dict(zip(batches, runner.trainer.forward_backward_all([*batches.values()]), strict=True))
    assert isinstance(outcomes.pop("p6"), ZeroDivisionError)
    assert isinstance(outcomes.pop("nobody"), UsageError)
    for policy, outcome in outcomes.items():
        assert isinstance(outcome, ForwardBackward)
        assert digest_of_result(outcome) == oracle.answers[policy][1]
    assert tier.statistics().pinned_bytes == 0
    tier.flush()
    for policy in POLICIES[:8]:
        assert oracle.operations_behind(policy, tmp_path / "states") == (1 if policy == "p6" else 2)


def test_a_policy_larger_than_the_memory_is_refused_alone(base: Base, tmp_path: Path) -> None:
    runner = Runner(base, base.pool(SLOTS), tmp_path, None)
    tier = base.states(tmp_path / "states", 5 * ROW)
    runner.run({policy: operations(policy)[0] for policy in POLICIES[:2]})
    runner.trainer.create("large", LoRAConfig(rank=32), 0)
    for policy in ("large", *POLICIES[:2]):
        save = partial(runner.trainer.save_checkpoint, policy)
        LocalStates(tmp_path / "states").save(policy, save)
    batches = [replace(runner.batch("p0", operations("p0")[1]), policy=p) for p in ("p0", "large", "p1")]
    few = Runner(base, base.pool(SLOTS), tmp_path, tier)
    first, large, second = few.trainer.forward_backward_all(batches)
    assert isinstance(first, ForwardBackward)
    assert isinstance(second, ForwardBackward)
    assert isinstance(large, ResidencyError)
    assert re.match(rf"'large': \d+ bytes; accepted: at most the {5 * ROW} of the host memory", str(large))


def test_what_was_done_is_not_reported_as_failed_when_others_cannot_be_saved(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a client would take a step twice; what has not been done is refused before it begins."""
    oracle, goals = Oracle(base, tmp_path), Counter(p1=3, p3=1)
    oracle.run(goals)
    kinds = [operation.kind for operation in operations("p1")[:3]]
    assert kinds == [Kind.CREATE, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP]
    row, other_row = (oracle.state(policy).adapter.nbytes for policy in goals)
    tier = base.states(tmp_path / "states", 4 * row)
    assert 2 * row + other_row < tier.budget < 3 * row + other_row, "a gradient fits, moments do not"
    runner = Runner(base, base.pool(SLOTS), tmp_path, tier)
    runner.run({policy: operations(policy)[0] for policy in goals})

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PolicyState, "save", full)
        for index in (1, 2):
            assert runner.run({"p1": operations("p1")[index]}) == {"p1": oracle.answers["p1"][index]}
            assert digest_of_state(runner.trainer.state_of("p1")) == oracle.states["p1"][index]
        assert tier.statistics().bytes > tier.budget
        message = r"'p1': no room .* 'p3' cannot be saved: .*No space left on device"
        with pytest.raises(ResidencyError, match=message):
            runner.run({"p1": operations("p1")[1]})
        runner.trainer.discard_gradient("p1")
        assert digest_of_state(runner.trainer.state_of("p1")) == oracle.states["p1"][2]
    tier.flush()
    for policy, goal in goals.items():
        assert oracle.operations_behind(policy, tmp_path / "states") == goal


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
