"""The host tier under threads and under failures: one load a miss, back-pressure, nothing lost."""

import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import pytest

from opentinker_core.errors import NotFoundError, UsageError
from opentinker_core.policies.residency.host import HostTier
from opentinker_core.policies.residency.types import Backing, NoRoomError, ResidencyError
from tests.policies.residency_values import Shelf, State
from tests.waiting import PATIENCE_S


def step_of(tier: HostTier[State], key: str, timeout_s: float | None = None) -> int:
    with tier.lease(key, timeout_s=timeout_s) as state:
        return state.step


def advance(tier: HostTier[State], key: str) -> None:
    with tier.lease(key) as state:
        tier.mark_dirty(key)
        size, step = len(state.weights), state.step + 1
        state.weights, state.moments = State.of_step(step, size).weights, State.of_step(step, size).weights


def together(call: Callable[[int], object], n: int) -> "list[Future[object]]":
    """What `n` threads made of `call`, all started at once."""
    barrier = threading.Barrier(n)

    def run(index: int) -> object:
        barrier.wait()
        return call(index)

    with ThreadPoolExecutor(n) as pool:
        return [pool.submit(run, index) for index in range(n)]


class Slow(Shelf):
    """Its loads and saves tell that they have begun, and end when they are allowed to."""

    def __init__(self, **steps: int) -> None:
        super().__init__(**steps)
        self.begun, self.may_end = threading.Event(), threading.Event()

    def load(self, key: str) -> State:
        self._wait(key)
        return super().load(key)

    def save(self, key: str, value: State) -> None:
        self._wait(key)
        super().save(key, value)

    def _wait(self, key: str) -> None:
        if key == "slow":
            self.begun.set()
            assert self.may_end.wait(PATIENCE_S)


# Leases and loads


def test_threads_that_want_one_cold_key_share_one_load() -> None:
    class Lingering(Shelf):
        def load(self, key: str) -> State:
            time.sleep(0.05)
            return super().load(key)

    shelf = Lingering(a=5)
    tier = HostTier(shelf, 16)
    assert [done.result() for done in together(lambda _: step_of(tier, "a"), 16)] == [5] * 16
    statistics = tier.statistics()
    assert (shelf.reads["a"], statistics.loads, statistics.hits) == (1, 1, 15)


def test_a_failing_load_fails_all_who_wait_and_leaves_nothing() -> None:
    class Failing(Slow):
        def load(self, key: str) -> State:
            state = super().load(key)
            if self.unreadable:
                raise OSError(5, "Input/output error")
            return state

    shelf = Failing(slow=5)
    tier = HostTier(shelf, 16)
    with ThreadPoolExecutor(4) as pool:
        leases = [pool.submit(step_of, tier, "slow") for _ in range(4)]
        assert shelf.begun.wait(PATIENCE_S)
        shelf.unreadable = True
        time.sleep(0.05)  # for the others to come and wait
        shelf.may_end.set()
        errors = [lease.exception() for lease in leases]
    assert len({id(error) for error in errors}) == 1
    assert isinstance(errors[0], OSError)
    assert tier.resident() == []
    assert tier.statistics().bytes == 0
    shelf.unreadable = False
    assert step_of(tier, "slow") == 5


def test_an_interrupted_load_is_taken_over_by_who_waits() -> None:
    class Interrupted(Slow):
        def load(self, key: str) -> State:
            state = super().load(key)
            if self.reads["slow"] == 1:
                raise KeyboardInterrupt
            return state

    shelf = Interrupted(slow=5)
    tier = HostTier(shelf, 16)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(step_of, tier, "slow")
        assert shelf.begun.wait(PATIENCE_S)
        second = pool.submit(step_of, tier, "slow")
        time.sleep(0.05)  # for the second to come and wait
        shelf.may_end.set()
        assert isinstance(first.exception(), KeyboardInterrupt)
        assert second.result() == 5


def test_different_keys_load_at_the_same_time() -> None:
    barrier = threading.Barrier(4)

    class Meeting(Shelf):
        def load(self, key: str) -> State:
            barrier.wait(PATIENCE_S)  # passes when four loads are in here
            return super().load(key)

    tier = HostTier(Meeting(a=1, b=2, c=3, d=4), 64)
    assert [done.result() for done in together(lambda n: step_of(tier, "abcd"[n]), 4)] == [1, 2, 3, 4]


def test_loads_do_not_hold_up_what_is_in_memory() -> None:
    shelf = Slow(slow=1, a=2)
    tier = HostTier(shelf, 64)
    step_of(tier, "a")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(step_of, tier, "slow")
        assert shelf.begun.wait(PATIENCE_S)
        assert step_of(tier, "a") == 2
        assert tier.statistics().pinned_bytes == 16
        with pytest.raises(ResidencyError, match="'slow': somebody else's load or write-back took too long"):
            step_of(tier, "slow", timeout_s=0)
        shelf.may_end.set()
        assert loading.result() == 1


def test_an_unknown_key_is_the_backings_error() -> None:
    tier = HostTier(Shelf(), 16)
    with pytest.raises(NotFoundError, match="there is no 'a'"):
        step_of(tier, "a")
    assert tier.resident() == []


# Room


def test_the_least_recently_used_goes_first_and_dirty_ones_are_written() -> None:
    shelf = Shelf(a=1, b=2, c=3)
    tier = HostTier(shelf, 32)
    advance(tier, "a")
    step_of(tier, "b")
    step_of(tier, "c")
    assert tier.resident() == ["b", "c"]
    assert shelf.disk["a"] == (State.of_step(2).weights,) * 2
    step_of(tier, "b")
    assert step_of(tier, "a") == 2
    assert tier.resident() == ["b", "a"]
    assert shelf.writes == {"a": 1}


def test_optimizer_state_ages_on_its_own() -> None:
    shelf = Shelf(a=1, b=2, c=3, d=4)
    tier = HostTier(shelf, 40)
    advance(tier, "a")
    step_of(tier, "b")
    with tier.lease("a", whole=False) as state:
        assert step_of(tier, "c") == 3  # needs 8 bytes: the moments of `a`, which is only sampled from
        assert (state.step, state.moments) == (2, None)
        assert step_of(tier, "d") == 4
        assert sorted(tier.resident()) == ["a", "c", "d"]
        assert step_of(tier, "a") == 2
        assert state.moments == state.weights
    statistics = tier.statistics()
    assert (statistics.shrinks, statistics.restores, statistics.write_backs) == (3, 1, 1)
    assert shelf.reads == {"a": 2, "b": 1, "c": 1, "d": 1}


def test_optimizer_state_goes_and_comes_as_often_as_needed() -> None:
    tier = HostTier(Shelf(a=1, b=2), 24, timeout_s=0)
    with tier.lease("a", whole=False) as state:
        for _ in range(3):
            assert step_of(tier, "b") == 2
            assert state.moments is None
            assert step_of(tier, "a") == 1
            assert state.moments == state.weights


def test_a_failing_restore_leaves_the_weights() -> None:
    shelf = Shelf(a=1, b=2)
    tier = HostTier(shelf, 24)
    step_of(tier, "a")
    step_of(tier, "b")
    shelf.unreadable = True
    with pytest.raises(OSError, match="Input/output error"):
        step_of(tier, "a")
    with tier.lease("a", whole=False) as state:
        assert (state.step, state.moments) == (1, None)
    shelf.unreadable = False
    assert step_of(tier, "a") == 1
    assert tier.statistics().bytes == shelf.live_bytes


def test_who_finds_no_room_waits_for_a_lease_to_end() -> None:
    released = threading.Event()

    class Watching(Shelf):
        def load(self, key: str) -> State:
            assert key == "a" or released.is_set()
            return super().load(key)

    tier = HostTier(Watching(a=1, b=2), 16)
    with ThreadPoolExecutor(1) as pool:
        with tier.lease("a"):
            waiting = pool.submit(step_of, tier, "b")
            time.sleep(0.05)
            assert not waiting.done()
            released.set()
        assert waiting.result() == 2


def test_the_deadline_of_the_wait_names_bytes() -> None:
    tier = HostTier(Shelf(a=1, b=2), 24)
    message = "'b': no room in host memory: 16 bytes are needed, 8 of 24 are free, 16 are pinned by others"
    with tier.lease("a"):
        with pytest.raises(NoRoomError, match=message):
            step_of(tier, "b", timeout_s=0.01)
        with pytest.raises(NoRoomError, match=message):
            tier.put("b", State.of_step(3), timeout_s=0)
        assert tier.resident() == ["a"]
        assert tier.statistics().bytes == 16
    assert step_of(tier, "b", timeout_s=0) == 2


def test_what_is_larger_than_the_budget_is_refused_at_once() -> None:
    tier = HostTier(Shelf(a=1), 15)
    with pytest.raises(ResidencyError, match="'a': 16 bytes; accepted: at most the 15 of the host memory"):
        step_of(tier, "a")
    with pytest.raises(ResidencyError, match="'b': 16 bytes; accepted: at most the 15"):
        tier.put("b", State.of_step(1))
    assert tier.statistics().bytes == 0
    with pytest.raises(UsageError, match="budget: 0; accepted: a positive number of bytes"):
        HostTier(Shelf(), 0)


def test_a_value_larger_than_expected_has_to_find_room_too() -> None:
    class Underestimating(Shelf):
        def expected_bytes(self, key: str) -> int:
            return 1

    shelf = Underestimating(a=1, b=2, c=3)
    tier = HostTier(shelf, 32)
    step_of(tier, "a")
    with tier.lease("b"):
        assert step_of(tier, "c") == 3
        assert tier.resident() == ["b", "c"]
        with tier.lease("c"), pytest.raises(NoRoomError):
            step_of(tier, "a", timeout_s=0)
    assert tier.statistics().bytes == shelf.live_bytes == 32


def test_growth_within_a_lease_pushes_others_out() -> None:
    tier = HostTier(Shelf(a=1, b=2, c=3), 32)
    with tier.lease("a") as a, tier.lease("b") as b:
        a.moments = bytes(40)
        tier.resized("a")
        assert tier.statistics().bytes == 64
        with pytest.raises(NoRoomError, match="0 of 32 are free, 64 are pinned"):
            step_of(tier, "c", timeout_s=0)
        a.moments = bytes(8)
        tier.resized("a")
        b.moments = None
        tier.resized("b")
    step_of(tier, "c")
    assert tier.statistics().bytes <= 32


def test_room_for_growth_is_made_before_it() -> None:
    tier = HostTier(Shelf(a=1, b=2, c=3), 48, timeout_s=0)
    for key in "abc":
        step_of(tier, key)
    with tier.lease("a") as a:
        tier.reserve("a", 32)
        assert (tier.resident(), tier.statistics().bytes) == (["a"], 48)
        with pytest.raises(ResidencyError, match="'a': 49 bytes; accepted: at most the 48"):
            tier.reserve("a", 1)
        a.moments = bytes(24)
        tier.resized("a")
        with tier.lease("b"), pytest.raises(NoRoomError, match="1 bytes are needed, 0 of 48 are free"):
            tier.reserve("a", 1)
        assert tier.statistics().bytes == 48


def test_growth_during_a_load_does_not_take_its_room_away() -> None:
    class Interfering(Shelf):
        def load(self, key: str) -> State:
            state = super().load(key)
            if key == "b":
                a.moments = bytes(40)
                tier.resized("a")
            return state

    tier = HostTier(Interfering(a=1, b=2), 32, timeout_s=0)
    with tier.lease("a") as a:
        assert step_of(tier, "b") == 2
        assert tier.statistics().bytes == 64


def test_a_lease_counts_as_use_until_it_ends() -> None:
    tier = HostTier(Shelf(a=1, b=2, c=3), 32)
    with tier.lease("a"):
        step_of(tier, "b")
    step_of(tier, "c")
    assert tier.resident() == ["a", "c"]


def test_a_key_that_is_wanted_again_while_it_is_written_back_stays() -> None:
    shelf = Slow(slow=1, a=2)
    tier = HostTier(shelf, 16)
    tier.put("slow", State.of_step(7))
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(step_of, tier, "a")
        assert shelf.begun.wait(PATIENCE_S)
        wanted = pool.submit(step_of, tier, "slow")
        time.sleep(0.05)  # for it to come and wait
        shelf.may_end.set()
        assert wanted.result() == 7
        assert other.result() == 2
    assert shelf.reads == {"a": 1}
    assert shelf.writes == {"slow": 1}


# Changes


def test_a_failing_write_back_keeps_the_value() -> None:
    shelf = Shelf(a=1, b=2, c=3)
    tier = HostTier(shelf, 32)
    advance(tier, "a")
    advance(tier, "b")
    shelf.full = True
    with pytest.raises(
        ResidencyError, match=r"'c': no room in host memory, as 'a' cannot be saved: .*No space"
    ):
        step_of(tier, "c")
    for attempt in (tier.flush, lambda: tier.flush("b"), lambda: tier.evict("b")):
        with pytest.raises(OSError, match="No space left"):
            attempt()
    assert (step_of(tier, "a"), step_of(tier, "b")) == (2, 3)
    assert tier.statistics().write_backs == 0
    shelf.full = False
    assert step_of(tier, "c") == 3
    tier.flush()
    assert (shelf.disk["a"][0], shelf.disk["b"][0]) == (State.of_step(2).weights, State.of_step(3).weights)


def test_growth_over_a_full_disk_is_accounted_and_told_to_who_needs_the_room() -> None:
    shelf = Shelf(a=1, b=2, c=3)
    tier = HostTier(shelf, 32)
    advance(tier, "b")
    shelf.full = True
    with tier.lease("a") as a:
        a.moments = bytes(40)
        tier.resized("a")
    assert tier.statistics().bytes == 64
    with pytest.raises(
        ResidencyError, match=r"'c': no room in host memory, as 'b' cannot be saved: .*No space"
    ):
        step_of(tier, "c")
    assert (tier.resident(), step_of(tier, "b")) == (["b", "a"], 3)
    shelf.full = False
    with tier.lease("a") as a:
        a.moments = bytes(8)
        tier.resized("a")
    assert step_of(tier, "c") == 3
    assert tier.statistics().bytes == 32


def test_flushing_everything_does_not_stop_at_the_first_failure() -> None:
    class PartlyFull(Shelf):
        def save(self, key: str, value: State) -> None:
            self.full = key == "b"
            super().save(key, value)

    shelf = PartlyFull()
    tier = HostTier(shelf, 64)
    for key in "abc":
        tier.put(key, State.of_step(1))
    with pytest.raises(OSError, match="No space left"):
        tier.flush()
    assert sorted(shelf.disk) == ["a", "c"]
    shelf.disk.clear()
    with pytest.raises(OSError, match="No space left"):
        tier.flush()
    assert shelf.disk == {}


def test_errors_keep_no_memory_until_garbage_is_collected() -> None:
    """An error's traceback refers to frames and so to values; no frame may refer to the error."""

    class BrokenError(Exception):
        pass

    raised: list[weakref.ref[BrokenError]] = []

    class Broken(Slow):
        def load(self, key: str) -> State:
            super().load(key)
            raise self._error()

        def save(self, key: str, value: State) -> None:
            raise self._error()

        def _error(self) -> BrokenError:
            error = BrokenError()
            raised.append(weakref.ref(error))
            try:
                return error
            finally:
                del error

    def attempt() -> None:
        with suppress(BrokenError):
            step_of(tier, "slow")

    shelf = Broken(slow=1)
    tier = HostTier(shelf, 16)
    threads = [threading.Thread(target=attempt) for _ in range(3)]
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        assert shelf.begun.wait(PATIENCE_S)
        time.sleep(0.05)  # for the others to come and wait
        shelf.may_end.set()
        for thread in threads:
            thread.join()
        tier.put("a", State.of_step(1))
        with suppress(BrokenError):
            tier.flush()
        assert [error() for error in raised] == [None, None]
    finally:
        gc.enable()


def test_dropping_forgets_what_was_not_written() -> None:
    shelf = Shelf(a=1)
    tier = HostTier(shelf, 16)
    advance(tier, "a")
    tier.drop("a")
    tier.drop("unknown")
    assert step_of(tier, "a") == 1
    assert not shelf.writes


def test_a_put_replaces_what_the_key_had() -> None:
    shelf = Shelf(a=1)
    tier = HostTier(shelf, 16)
    advance(tier, "a")
    tier.put("a", shelf.state(*shelf.disk["a"]), dirty=False)
    assert step_of(tier, "a") == 1
    assert shelf.live_bytes == 16
    tier.evict("a")
    assert not shelf.writes
    tier.put("a", State.of_step(9))
    tier.evict("a")
    assert step_of(tier, "a") == 9


def test_changes_are_announced_within_a_lease_of_the_whole() -> None:
    tier = HostTier(Shelf(a=1), 16)
    for call in (tier.mark_dirty, tier.resized, lambda key: tier.reserve(key, 1)):
        with pytest.raises(UsageError, match="'a': nobody leases the whole value"):
            call("a")
        with tier.lease("a", whole=False), pytest.raises(UsageError, match="nobody leases the whole value"):
            call("a")


@pytest.mark.parametrize("method", ["flush", "evict", "drop"])
def test_what_is_leased_is_left_alone(method: str) -> None:
    shelf = Shelf(a=1)
    tier = HostTier(shelf, 16)
    with tier.lease("a"):
        tier.mark_dirty("a")
        with pytest.raises(ResidencyError, match="'a': in use by 1 leases until the deadline"):
            getattr(tier, method)("a", timeout_s=0.01)
        with pytest.raises(ResidencyError, match="'a': in use by 1 leases"):
            tier.put("a", State.of_step(4), timeout_s=0)
    assert tier.resident() == ["a"]
    assert not shelf.writes
    getattr(tier, method)("a")
    assert shelf.writes.total() == (method != "drop")


def test_an_exception_in_the_block_ends_the_lease() -> None:
    tier = HostTier(Shelf(a=1), 16)
    with pytest.raises(ZeroDivisionError), tier.lease("a"):
        raise ZeroDivisionError
    tier.evict("a", timeout_s=0)


def test_immutable_values_are_dropped_and_loaded_again() -> None:
    class Texts(Backing[str]):
        def expected_bytes(self, key: str) -> int:
            return 4

        def load(self, key: str) -> str:
            return key * 4

        def bytes_of(self, value: str) -> int:
            return len(value)

    tier = HostTier(Texts(), 8)
    for key in "abcab":
        with tier.lease(key) as text:
            assert text == key * 4
    statistics = tier.statistics()
    assert (statistics.loads, statistics.evictions, statistics.shrinks) == (5, 3, 0)
    with tier.lease("a"):
        tier.mark_dirty("a")
    with pytest.raises(UsageError, match="'a': values of a Texts are immutable"):
        tier.flush()


def test_many_threads_change_evict_and_flush_without_a_loss() -> None:
    """Each key's step counts the changes made to it; a state is never written half changed."""
    names = [f"p{n}" for n in range(30)]
    owners = {name: threading.Lock() for name in names}
    shelf = Shelf(**dict.fromkeys(names, 0))
    tier = HostTier(shelf, 16 * 10, timeout_s=300)
    changes = dict.fromkeys(names, 0)

    def work(seed: int) -> None:
        draws = random.Random(seed)
        for _ in range(400):
            name = names[min(int(draws.paretovariate(0.7)), len(names)) - 1]
            action = draws.random()
            if action < 0.6:
                with owners[name], tier.lease(name) as state:
                    tier.mark_dirty(name)
                    step = State.of_step(state.step + 1).weights
                    state.weights = step
                    time.sleep(0)  # weights and moments differ here
                    state.moments = step
                    changes[name] += 1
            elif action < 0.8:
                with tier.lease(name, whole=False) as state:
                    assert int.from_bytes(state.weights, "big") <= changes[name] + 1
            elif action < 0.9:
                tier.flush(name)
            else:
                tier.evict(name)

    for done in together(work, 8):
        done.result()
    tier.flush()
    assert {name: State(*shelf.disk[name]).step for name in names} == changes
    statistics = tier.statistics()
    assert statistics.pinned_bytes == 0
    assert statistics.peak_bytes <= tier.budget
    assert statistics.loads + statistics.restores == shelf.reads.total()
    assert statistics.write_backs == shelf.writes.total()


def test_it_needs_no_torch() -> None:
    program = (
        "import sys; from opentinker_core.policies.residency import host, local_states\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
