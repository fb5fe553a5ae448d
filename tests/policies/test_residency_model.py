"""Any sequence of calls leaves the host tier with the values of a dictionary that never evicts."""

import random
from collections import OrderedDict
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from opentinker_core.errors import NotFoundError
from opentinker_core.policies.residency.host import HostTier
from opentinker_core.policies.residency.types import NoRoomError, ResidencyError
from tests.policies.residency_values import Shelf, State

BUDGET = 40
keys = st.sampled_from("abcdef")
contents = st.tuples(st.binary(min_size=1, max_size=8), st.binary(max_size=16))


class Held:
    """A lease that is kept over several calls."""

    def __init__(self, key: str, whole: bool, stack: ExitStack, value: State) -> None:
        self.key, self.whole, self.stack, self.value = key, whole, stack, value


class TierMachine(RuleBasedStateMachine):
    """One thread, no waiting: whatever does not fit now is refused now."""

    @initialize()
    def start(self) -> None:
        self.shelf = Shelf(a=1, b=2)
        self.tier = HostTier(self.shelf, BUDGET, timeout_s=0)
        self.oracle: dict[str, tuple[bytes, bytes | None]] = dict(self.shelf.disk)
        self.held: list[Held] = []
        self.served = 0
        self.bound = BUDGET

    def teardown(self) -> None:
        while self.held:
            self.held.pop().stack.close()
        self.shelf.full = self.shelf.unreadable = False
        self.tier.flush()
        assert self.shelf.disk == self.oracle
        for key in self.oracle:
            self.tier.evict(key)
        assert self.tier.resident() == []
        assert self.tier.statistics().bytes == self.shelf.live_bytes == 0

    def is_held(self, key: str, whole_only: bool = False) -> bool:
        return any(held.key == key and (held.whole or not whole_only) for held in self.held)

    def size(self, key: str) -> int:
        return sum(len(part or b"") for part in self.oracle[key])

    def least_bytes(self, without: str | None = None) -> int:
        """Bytes that stay in memory when everything is freed that may be."""
        pinned = {held.key for held in self.held} - {without}
        return sum(
            self.size(key) if self.is_held(key, whole_only=True) else len(self.oracle[key][0])
            for key in pinned
        )

    def lease(self, key: str, whole: bool) -> Held | None:
        """A lease of `key`; None if it was refused, rightly."""
        stack = ExitStack()
        try:
            value = stack.enter_context(self.tier.lease(key, whole=whole))
        except NotFoundError:
            assert key not in self.oracle
        except NoRoomError:
            assert not self.is_held(key, whole_only=whole)
            assert self.least_bytes(without=key) + self.size(key) > BUDGET
        except ResidencyError:
            assert self.shelf.full
        except OSError:
            assert self.shelf.unreadable
        else:
            assert value.weights == self.oracle[key][0]
            assert value.moments == self.oracle[key][1] or (value.moments is None and not whole)
            self.served += 1
            return Held(key, whole, stack, value)
        return None

    @rule(key=keys, whole=st.booleans())
    def look(self, key: str, whole: bool) -> None:
        if held := self.lease(key, whole):
            held.stack.close()

    @precondition(lambda self: len(self.held) < 4)
    @rule(key=keys, whole=st.booleans())
    def hold(self, key: str, whole: bool) -> None:
        if held := self.lease(key, whole):
            self.held.append(held)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 3))
    def release(self, which: int) -> None:
        self.held.pop(which % len(self.held)).stack.close()

    @rule(key=keys, content=contents)
    def change(self, key: str, content: tuple[bytes, bytes]) -> None:
        if held := self.lease(key, whole=True):
            with held.stack:
                self.tier.mark_dirty(key)
                held.value.weights, held.value.moments = self.oracle[key] = content
                self.resize(key)

    @rule(key=keys, content=contents)
    def change_within_the_budget(self, key: str, content: tuple[bytes, bytes]) -> None:
        if held := self.lease(key, whole=True):
            more = max(0, sum(map(len, content)) - self.size(key))
            wanted = self.least_bytes(without=key) + self.size(key) + more
            with held.stack:
                try:
                    self.tier.reserve(key, more)
                except NoRoomError:
                    assert wanted > BUDGET
                except ResidencyError:
                    assert self.shelf.full or self.size(key) + more > BUDGET
                else:
                    self.tier.mark_dirty(key)
                    held.value.weights, held.value.moments = self.oracle[key] = content
                    self.tier.resized(key)
                    assert not more or self.tier.statistics().bytes <= BUDGET

    def resize(self, key: str) -> None:
        """Growth that is there already may exceed the budget: where leases or a full disk forbid eviction."""
        pinned = self.least_bytes(without=key) + self.size(key)
        self.tier.resized(key)
        self.bound = self.tier.statistics().bytes
        assert self.shelf.full or self.bound <= max(BUDGET, pinned)

    @rule(key=keys, content=contents)
    def put(self, key: str, content: tuple[bytes, bytes]) -> None:
        try:
            self.tier.put(key, self.shelf.state(*content))
        except NoRoomError:
            assert self.least_bytes(without=key) + sum(map(len, content)) > BUDGET
        except ResidencyError:
            assert self.is_held(key) or self.shelf.full
        else:
            assert not self.is_held(key)
            self.oracle[key] = content

    @rule(key=keys)
    def evict(self, key: str) -> None:
        try:
            self.tier.evict(key)
        except ResidencyError:
            assert self.is_held(key)
        except OSError:
            assert self.shelf.full
        else:
            assert key not in self.tier.resident()
            assert self.shelf.disk.get(key) == self.oracle.get(key)

    @rule(key=keys)
    def flush(self, key: str) -> None:
        try:
            self.tier.flush(key)
        except ResidencyError:
            assert self.is_held(key, whole_only=True)
        except OSError:
            assert self.shelf.full
        else:
            assert self.shelf.disk.get(key) == self.oracle.get(key)

    @rule(key=keys)
    def drop(self, key: str) -> None:
        try:
            self.tier.drop(key)
        except ResidencyError:
            assert self.is_held(key)
        else:
            assert not self.is_held(key)
            assert key not in self.tier.resident()
            if key in self.shelf.disk:
                self.oracle[key] = self.shelf.disk[key]
            else:
                self.oracle.pop(key, None)

    @rule(full=st.booleans(), unreadable=st.booleans())
    def break_or_repair_the_disk(self, full: bool, unreadable: bool) -> None:
        self.shelf.full, self.shelf.unreadable = full, unreadable

    @invariant()
    def memory_is_accounted_and_bounded(self) -> None:
        statistics = self.tier.statistics()
        assert statistics.bytes == self.shelf.live_bytes
        assert statistics.entries == len(self.tier.resident())
        assert statistics.pinned_bytes <= statistics.bytes
        self.bound = max(BUDGET, min(self.bound, statistics.bytes))
        assert statistics.bytes <= self.bound

    @invariant()
    def what_is_leased_stays(self) -> None:
        assert {held.key for held in self.held} <= set(self.tier.resident())
        for held in self.held:
            assert held.value.weights == self.oracle[held.key][0]

    @invariant()
    def each_miss_is_one_load(self) -> None:
        statistics = self.tier.statistics()
        assert statistics.hits + statistics.loads + statistics.restores == self.served
        assert statistics.write_backs == self.shelf.writes.total()


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("exponent", [1.1, 1.5])
def test_a_zipf_trace_over_ten_thousand_policies(
    exponent: float, record_property: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hits are exactly those of a textbook LRU; memory is bounded; each miss is one load; nothing is lost."""
    n_keys, n_resident, n_accesses = 10_000, 16, 20_000
    popularity = 1 / np.arange(1, n_keys + 1) ** exponent
    draws = np.random.default_rng(7).choice(n_keys, n_accesses, p=popularity / popularity.sum())
    shelf = Shelf(**{f"p{n}": 0 for n in range(n_keys)})
    tier = HostTier(shelf, budget=16 * n_resident, timeout_s=0)
    changing = random.Random(7)
    oracle = dict.fromkeys(range(n_keys), 0)
    textbook: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for n in draws.tolist():
        hits += n in textbook
        textbook[n] = None
        textbook.move_to_end(n)
        if len(textbook) > n_resident:
            textbook.popitem(last=False)
        with tier.lease(f"p{n}") as state:
            assert state.step == oracle[n]
            if changing.random() < 0.5:
                oracle[n] += 1
                tier.mark_dirty(f"p{n}")
                state.weights = state.moments = State.of_step(oracle[n]).weights
        assert shelf.live_bytes <= tier.budget
    statistics = tier.statistics()
    with capsys.disabled():
        print(f"\nZipf {exponent}: hit rate {hits / n_accesses:.3f}, {statistics}")
    assert statistics.hits == hits
    assert statistics.loads == n_accesses - hits
    assert statistics.loads + statistics.restores == shelf.reads.total()
    assert statistics.peak_bytes <= tier.budget
    tier.flush()
    assert {key: int.from_bytes(weights, "big") for key, (weights, _) in shelf.disk.items()} == {
        f"p{n}": step for n, step in oracle.items()
    }
