"""Batches: in order, within their limits, as full as they can be, and fair between tenants."""

from collections import Counter
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker_core.errors import UsageError
from opentinker_core.runtime.batching import OPERATION_COST, BatchLimits, FairShares, form_batch
from opentinker_core.runtime.operation_queue import Entry, OperationQueue
from opentinker_core.runtime.operations import FUSED, Kind, Operation
from opentinker_core.sampling.protocol import BASE
from tests.runtime.executors import operation

FB, STEP, SAMPLE = Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP, Kind.SAMPLE

batch_limits = st.builds(BatchLimits, st.integers(1, 3), st.integers(1, 2000), st.integers(1, 20))
operations = st.builds(
    operation,
    st.sampled_from(Kind),
    st.sampled_from(["p", "q", "r", "s", BASE]),
    tenant=st.sampled_from(["a", "b", "c"]),
    tokens=st.integers(0, 1500),
    sequences=st.integers(0, 15),
)


class Queue:
    """A queue whose batches are run by hand."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._queue = OperationQueue()
        self._shares = FairShares(limits.tokens)
        self._numbers = count()

    def add(self, *added: Operation[Any]) -> None:
        for item in added:
            self._queue.add(Entry(next(self._numbers), item))
            self._shares.joined(item.tenant)

    def waiting(self, tenant: str) -> int:
        return sum(entry.operation.tenant == tenant for entry in self._queue)

    def next(self) -> list[Operation[Any]]:
        """Run the next batch."""
        self.batch = form_batch(self._queue.lanes, self._shares, self.limits)
        self._queue.take(self.batch.entries)
        run = [entry.operation for entry in self.batch.entries]
        self._shares.served(run[0].tenant, run)
        return run

    def drain(self) -> list[list[Operation[Any]]]:
        batches = []
        while len(self._queue):
            batches.append(self.next())
        return batches


def _queue(*added: Operation[Any], slots: int = 8, **limits: int) -> Queue:
    queue = Queue(BatchLimits(slots, **limits))
    queue.add(*added)
    return queue


@settings(deadline=None)
@given(st.lists(operations, max_size=40), batch_limits)
def test_everything_runs_once_in_the_order_of_its_lane(
    submitted: list[Operation[Any]], limits: BatchLimits
) -> None:
    queue = Queue(limits)
    queue.add(*submitted)
    run = [item for batch in queue.drain() for item in batch]
    assert Counter(map(id, run)) == Counter(map(id, submitted))
    for lane in {item.lane for item in submitted}:
        assert [x for x in run if x.lane == lane] == [x for x in submitted if x.lane == lane]


@settings(deadline=None)
@given(st.lists(operations, max_size=40), batch_limits)
def test_batches_keep_their_limits(submitted: list[Operation[Any]], limits: BatchLimits) -> None:
    queue = Queue(limits)
    queue.add(*submitted)
    for batch in queue.drain():
        kind = batch[0].kind
        assert {item.kind for item in batch} == {kind}
        assert len({item.subject for item in batch} - {BASE}) <= limits.slots
        if len(batch) == 1:
            continue
        assert kind in FUSED
        if kind is SAMPLE:
            assert sum(item.sequences for item in batch) <= limits.sequences
        else:
            assert sum(item.tokens for item in batch) <= limits.tokens
        if kind is STEP:
            assert len({item.lane for item in batch}) == len(batch)


@settings(deadline=None)
@given(st.lists(operations, min_size=1, max_size=40), batch_limits)
def test_what_would_fit_is_not_left_behind(submitted: list[Operation[Any]], limits: BatchLimits) -> None:
    queue = Queue(limits)
    queue.add(*submitted)
    batch = queue.next()
    kind = batch[0].kind
    if kind not in FUSED or not queue.batch.has_room:
        return
    left = [item for item in submitted if item not in batch]
    heads = {item.lane: item for item in reversed(left)}.values()
    waiting = [item for item in heads if item.kind is kind]
    assert all(kind is STEP and item.lane in {x.lane for x in batch} for item in waiting)


def test_policies_tenants_and_consecutive_forward_backwards_share_a_batch() -> None:
    submitted = [operation(FB, "p"), operation(FB, "p"), operation(FB, "q"), operation(FB, "r", tenant="b")]
    assert set(_queue(*submitted).next()) == set(submitted)


def test_versions_and_the_base_model_share_a_batch_of_samples() -> None:
    submitted = [operation(SAMPLE, version, sequences=4) for version in ("p@1", "p@2", BASE)]
    assert _queue(*submitted, slots=2).next() == submitted


def test_more_policies_than_slots_take_several_batches() -> None:
    submitted = [operation(FB, f"p{i}") for i in range(5)]
    assert list(map(len, _queue(*submitted, slots=2).drain())) == [2, 2, 1]


def test_an_operation_larger_than_a_batch_runs_alone() -> None:
    submitted = [operation(FB, "p", tokens=101), operation(FB, "q", tokens=10)]
    assert _queue(*submitted, tokens=100).drain() == [[submitted[0]], [submitted[1]]]


def test_two_steps_of_one_policy_never_share_a_batch() -> None:
    submitted = [operation(STEP, "p"), operation(STEP, "p"), operation(STEP, "q")]
    assert list(map(len, _queue(*submitted).drain())) == [2, 1]


def test_policies_of_a_tenant_run_in_the_order_of_arrival() -> None:
    submitted = [operation(Kind.SAVE, subject) for subject in ("q", "p", "r", "p", "q")]
    assert [batch[0] for batch in _queue(*submitted).drain()] == submitted


def test_tenants_share_a_batch_equally() -> None:
    lots = [operation(FB, "p", tenant=tenant, tokens=100) for tenant in "aaaaaaaaaabbbbbbbbbb"]
    assert Counter(item.tenant for item in _queue(*lots, tokens=1000).next()) == {"a": 5, "b": 5}


@settings(deadline=None)
@given(
    others=st.integers(1, 4),
    backlog=st.lists(operations, min_size=20, max_size=60),
    before=st.integers(0, 10),
    light=operations,
    limits=batch_limits,
)
def test_a_tenant_that_comes_new_waits_for_one_batch_of_each_other_at_most(
    others: int, backlog: list[Operation[Any]], before: int, light: Operation[Any], limits: BatchLimits
) -> None:
    """However much the others have queued, and however much they have been served."""
    queue = Queue(limits)
    for place, item in enumerate(backlog):
        tenant = f"heavy-{place % others}"
        queue.add(
            *[
                operation(
                    item.kind, item.subject, tenant=tenant, tokens=item.tokens, sequences=item.sequences
                )
                for _ in range(5)
            ]
        )
    for _ in range(before):
        queue.next()
    newcomer = operation(light.kind, "new", tenant="light", tokens=light.tokens, sequences=light.sequences)
    queue.add(newcomer)
    assert any(newcomer in queue.next() for _ in range(others + 1))


@settings(deadline=None)
@given(
    sizes=st.tuples(*[st.integers(50, 5000)] * 2),
    kinds=st.tuples(*[st.sampled_from([FB, SAMPLE, Kind.SAVE])] * 2),
    batches=st.integers(1, 30),
)
def test_two_tenants_with_much_to_do_get_equal_shares(
    sizes: tuple[int, int], kinds: tuple[Kind, Kind], batches: int
) -> None:
    """Whatever the size and the kind of their operations: the shares differ by two batches at most."""
    queue = _queue(slots=1, tokens=1000, sequences=8)
    served = {"a": 0, "b": 0}
    largest = 0
    for _ in range(batches):
        for tenant, size, kind in zip("ab", sizes, kinds, strict=True):
            while queue.waiting(tenant) < 40:  # more than any batch takes
                queue.add(operation(kind, tenant, tenant=tenant, tokens=size, sequences=2))
        batch = queue.next()
        tokens = sum(item.tokens + OPERATION_COST for item in batch)
        served[batch[0].tenant] += tokens
        largest = max(largest, tokens)
    assert abs(served["a"] - served["b"]) <= 2 * largest


def test_riding_along_is_made_up_for_by_one_batch_at_most() -> None:
    """`b` fills the passes of `a` for long; when `c` comes, `b` does not starve behind it."""
    queue = _queue(tokens=1000)
    for _ in range(50):
        queue.add(operation(FB, "p", tenant="a"), *[operation(FB, "q", tenant="b", tokens=480)] * 2)
        queue.next()
    queue.add(*[operation(STEP, "r", tenant="c") for _ in range(100)])
    queue.add(operation(FB, "q", tenant="b", tokens=480))
    turns = next(turn for turn in range(100) if queue.next()[0].tenant == "b")
    assert turns <= 1000 / OPERATION_COST + 1


@pytest.mark.parametrize("name", ["slots", "tokens", "sequences"])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: 0 is not accepted; accepted: at least 1"):
        BatchLimits(**{"slots": 1, name: 0})


@pytest.mark.parametrize("name", ["tokens", "sequences", "size_bytes"])
def test_a_negative_size_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: -1 of forward_backward of 'adder'"):
        operation(FB, **{name: -1})
