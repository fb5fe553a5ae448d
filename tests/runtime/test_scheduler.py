"""The engine's queue with its thread: order, company, room, cancellation, closing, statistics."""

import asyncio
import gc
import random
import threading
import weakref
from concurrent.futures import CancelledError, Future, wait
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.runtime.batching import BatchLimits
from opentinker_core.runtime.operation_queue import Bound, Entry, OperationQueue, QueueBounds
from opentinker_core.runtime.operations import BusyError, ClosedError, Kind, Operation
from opentinker_core.runtime.scheduler import Scheduler
from tests.runtime.executors import Bookkeeper, Fails, held, operation

FB, STEP, SAMPLE = Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP, Kind.SAMPLE
ALONG = Bound(1000, 1000)
"""A bound that does not matter."""


def test_each_operation_gets_its_own_result() -> None:
    submitted = [operation(FB, f"p{i % 3}") for i in range(20)]
    with Scheduler(Bookkeeper(), BatchLimits(slots=2)) as scheduler:
        futures = [scheduler.submit(item) for item in submitted]
        assert [future.result() for future in futures] == submitted


def test_call_gives_the_result_or_the_error() -> None:
    with Scheduler(Bookkeeper(), BatchLimits(slots=2)) as scheduler:
        item = operation(FB)
        assert scheduler.call(item) is item
        with pytest.raises(ValueError, match="too many"):
            scheduler.call(operation(FB, payload=Fails(ValueError("too many"))))


def test_a_version_is_refreshed_before_it_is_sampled() -> None:
    bookkeeper = Bookkeeper()
    submitted = [operation(kind, "p@1") for kind in (Kind.REFRESH, SAMPLE, Kind.REFRESH, SAMPLE)]
    with held(bookkeeper) as scheduler:
        for item in submitted:
            scheduler.submit(item)
    assert bookkeeper.executed[1:] == submitted


def test_sampling_does_not_wait_for_training() -> None:
    """Nor does anything that is of another lane: the oldest operations of both run in one turn each."""
    bookkeeper = Bookkeeper()
    training = [operation(kind, "p") for kind in (FB, STEP) * 10]
    sample = operation(SAMPLE, "p@1", tenant="other")
    with held(bookkeeper) as scheduler:
        for item in [*training, sample]:
            scheduler.submit(item)
    assert sample in bookkeeper.executed[1:3]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([FB, STEP, Kind.FORWARD, Kind.SAVE, SAMPLE]),
            st.sampled_from("pqr"),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_nothing_is_lost_run_twice_or_run_although_cancelled(
    drawn: list[tuple[Kind, str, bool]],
) -> None:
    bookkeeper = Bookkeeper()
    with held(bookkeeper) as scheduler:
        submitted = [operation(kind, subject) for kind, subject, _ in drawn]
        futures = [scheduler.submit(item) for item in submitted]
        cancelled = [future.cancel() for future, (*_, wish) in zip(futures, drawn, strict=True) if wish]
    assert all(cancelled)
    ran = [future.result() for future in futures if not future.cancelled() and not future.exception()]
    assert sorted(map(id, ran)) == sorted(map(id, bookkeeper.executed[1:]))
    for lane in {item.lane for item in submitted}:
        order = [submitted.index(item) for item in bookkeeper.executed[1:] if item.lane == lane]
        assert order == sorted(order)
    kinds = scheduler.statistics().kinds.values()
    assert sum(kind.done for kind in kinds) == len(ran) + 1
    assert sum(kind.cancelled for kind in kinds) == sum(future.cancelled() for future in futures)
    assert sum(kind.done + kind.failed + kind.cancelled for kind in kinds) == len(drawn) + 1


def test_many_threads_that_submit_and_cancel_at_any_moment() -> None:
    bookkeeper = Bookkeeper()
    outcomes: list[tuple[Operation[Any], Future[Any]]] = []

    def client(number: int) -> None:
        rng = random.Random(number)
        mine = []
        for turn in range(60):
            kind, subject = rng.choice([(FB, "p"), (Kind.FORWARD, "q"), (SAMPLE, f"q@{turn % 3}")])
            item = operation(kind, subject, tenant=f"t{number}")
            mine.append((item, scheduler.submit(item, timeout=None)))
            if rng.random() < 0.4:
                rng.choice(mine)[1].cancel()
        outcomes.extend(mine)

    bounds = QueueBounds(lane=ALONG, tenant=Bound(5, 1000), total=Bound(12, 1000))
    with Scheduler(bookkeeper, BatchLimits(slots=2), bounds) as scheduler:
        threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    executed = set(bookkeeper.executed)
    assert len(outcomes) == 360
    assert len(executed) == len(bookkeeper.executed)
    for item, future in outcomes:
        assert future.done()
        ran = not future.cancelled() and future.exception() is None
        assert ran == (item in executed)
        assert ran or future.cancelled() or item.kind is FB


def test_clients_that_wait_for_their_results_share_their_passes() -> None:
    """Each submits only after it was answered: they keep in step because a batch waits for company."""
    bookkeeper, ready = Bookkeeper(), threading.Barrier(3)
    with held(bookkeeper, operation(Kind.SAVE, "p"), company_seconds=60.0) as scheduler:

        def client(policy: str) -> None:
            futures = [scheduler.submit(operation(FB, policy))]
            ready.wait()
            futures[0].result()
            for _ in range(10):
                scheduler.call(operation(STEP, policy))
                scheduler.call(operation(FB, policy))

        threads = [threading.Thread(target=client, args=(policy,)) for policy in "pq"]
        for thread in threads:
            thread.start()
        ready.wait()
        bookkeeper.open.set()
        for thread in threads:
            thread.join()
    assert [len(batch) for batch in bookkeeper.batches[1:]] == [2] * 21


def test_a_client_that_is_alone_is_not_kept_waiting() -> None:
    with Scheduler(Bookkeeper(), BatchLimits(slots=2), company_seconds=3600.0) as scheduler:
        for _ in range(20):
            scheduler.call(operation(FB))
            scheduler.call(operation(STEP))


def test_a_client_that_does_not_come_back_is_waited_for_once() -> None:
    bookkeeper = Bookkeeper()
    with held(bookkeeper, company_seconds=0.01) as scheduler:
        gone = scheduler.submit(operation(FB, "gone"))
        scheduler.submit(operation(FB, "p"))
        bookkeeper.open.set()
        gone.result()
        for _ in range(5):
            scheduler.call(operation(FB, "p"))
    assert [len(batch) for batch in bookkeeper.batches[1:]] == [2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (
            QueueBounds(Bound(2, 1000), ALONG, ALONG),
            "'p' of tenant 'a': 2 operations wait; accepted: at most 2",
        ),
        (QueueBounds(ALONG, Bound(2, 1000), ALONG), "tenant 'a': 2 operations wait; accepted: at most 2"),
        (QueueBounds(ALONG, ALONG, Bound(2, 1000)), "all tenants: 2 operations wait; accepted: at most 2"),
        (
            QueueBounds(Bound(1000, 15), ALONG, ALONG),
            "'p' of tenant 'a': 12 bytes wait, 6 more do not fit; accepted: at most 15",
        ),
        (
            QueueBounds(ALONG, Bound(1000, 15), ALONG),
            "tenant 'a': 12 bytes wait, 6 more do not fit; accepted: at most 15",
        ),
        (
            QueueBounds(ALONG, ALONG, Bound(1000, 15)),
            "all tenants: 12 bytes wait, 6 more do not fit; accepted: at most 15",
        ),
    ],
)
@pytest.mark.parametrize("timeout", [0.0, 0.01])
def test_a_full_queue_refuses_and_says_why(bounds: QueueBounds, message: str, timeout: float) -> None:
    bookkeeper = Bookkeeper()
    submitted = [operation(FB, "p", tenant="a", size_bytes=6) for _ in range(3)]
    with held(bookkeeper, bounds=bounds) as scheduler:
        scheduler.submit(submitted[0])
        scheduler.submit(submitted[1])
        with pytest.raises(BusyError, match=f"^forward_backward of 'p' is too much now; {message}$"):
            scheduler.submit(submitted[2], timeout=timeout)
    assert bookkeeper.executed[1:] == submitted[:2]


def test_others_have_room_when_one_tenant_has_none() -> None:
    bounds = QueueBounds(ALONG, Bound(1, 1000), ALONG)
    with held(Bookkeeper(), bounds=bounds) as scheduler:
        scheduler.submit(operation(FB, "p", tenant="a"))
        scheduler.submit(operation(FB, "q", tenant="b"))
        with pytest.raises(BusyError):
            scheduler.submit(operation(FB, "q", tenant="b"))


def test_what_was_taken_makes_room() -> None:
    queue = OperationQueue(QueueBounds(ALONG, ALONG, Bound(10, 10)))
    entries = [Entry(number, operation(FB, size_bytes=5)) for number in range(2)]
    for entry in entries:
        queue.add(entry)
    assert queue.full(operation(FB, size_bytes=1)) is not None
    queue.take(entries[:1])
    assert queue.full(operation(FB, size_bytes=5)) is None
    assert queue.full(operation(FB, size_bytes=6)) is not None


@pytest.mark.parametrize("bound", [Bound(1, 1000), Bound(1000, 9)])
def test_submit_waits_for_room(bound: Bound) -> None:
    bookkeeper = Bookkeeper()
    bounds = QueueBounds(ALONG, bound, ALONG)
    submitted = [operation(FB, "p", size_bytes=5) for _ in range(5)]
    with held(bookkeeper, bounds=bounds) as scheduler:
        scheduler.submit(submitted[0])
        thread = threading.Thread(target=lambda: [scheduler.submit(x, timeout=None) for x in submitted[1:]])
        thread.start()
        bookkeeper.open.set()
        thread.join()
    assert bookkeeper.executed[1:] == submitted


def test_what_no_queue_could_take_is_a_usage_error() -> None:
    bounds = QueueBounds(ALONG, ALONG, Bound(10, 99))
    with (
        Scheduler(Bookkeeper(), BatchLimits(slots=1), bounds) as scheduler,
        pytest.raises(UsageError, match=r"size_bytes: 100 of sample of 'adder' .* accepted: at most 99"),
    ):
        scheduler.submit(operation(SAMPLE, size_bytes=100), timeout=None)


def test_a_running_operation_cannot_be_cancelled() -> None:
    bookkeeper = Bookkeeper()
    bookkeeper.open.clear()
    with Scheduler(bookkeeper, BatchLimits(slots=1)) as scheduler:
        item = operation(FB)
        future = scheduler.submit(item)
        bookkeeper.started.wait()
        assert not future.cancel()
        bookkeeper.open.set()
        assert future.result() is item


def test_close_runs_what_waits() -> None:
    bookkeeper = Bookkeeper()
    with held(bookkeeper) as scheduler:
        futures = [scheduler.submit(operation(FB, f"p{i}")) for i in range(9)]
        bookkeeper.open.set()
        scheduler.close()
        assert all(future.result() for future in futures)


def test_close_without_draining_cancels_what_waits_and_lets_what_runs_end() -> None:
    bookkeeper = Bookkeeper()
    with held(bookkeeper) as scheduler:
        futures = [scheduler.submit(operation(FB, f"p{i}")) for i in range(9)]
        closing = threading.Thread(target=scheduler.close, kwargs={"drain": False})
        closing.start()
        assert not wait(futures).not_done
        bookkeeper.open.set()
        closing.join()
    assert all(future.cancelled() for future in futures)
    assert [item.subject for item in bookkeeper.executed] == ["plug"]
    assert scheduler.statistics().kinds[FB].cancelled == 9


def test_an_error_in_the_block_cancels_what_waits() -> None:
    bookkeeper, futures = Bookkeeper(), []

    def block() -> None:
        with Scheduler(bookkeeper, BatchLimits(slots=1)) as scheduler:
            bookkeeper.open.clear()
            futures.append(scheduler.submit(operation(FB)))
            bookkeeper.started.wait()
            futures.append(scheduler.submit(operation(STEP)))
            futures[1].add_done_callback(lambda _: bookkeeper.open.set())
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert futures[0].result()
    assert futures[1].cancelled()


def test_a_closed_scheduler_takes_nothing_and_leaves_no_thread() -> None:
    before = threading.active_count()
    scheduler = Scheduler(Bookkeeper(), BatchLimits(slots=1))
    scheduler.call(operation(FB))
    scheduler.close()
    scheduler.close()
    assert threading.active_count() == before
    with pytest.raises(ClosedError, match="sample of 'adder': the engine is closed"):
        scheduler.submit(operation(SAMPLE))


def test_nothing_keeps_a_closed_scheduler_alive() -> None:
    bookkeeper = Bookkeeper()
    scheduler = Scheduler(bookkeeper, BatchLimits(slots=1))
    scheduler.call(operation(FB))
    scheduler.close()
    alive = weakref.ref(scheduler)
    del scheduler
    gc.collect()
    assert alive() is None


def test_closing_ends_the_wait_for_room() -> None:
    bookkeeper, errors = Bookkeeper(), []
    bounds = QueueBounds(ALONG, ALONG, Bound(1, 1000))
    with held(bookkeeper, bounds=bounds) as scheduler:
        scheduler.submit(operation(FB))

        def client() -> None:
            try:
                scheduler.submit(operation(FB), timeout=None)
            except ClosedError as error:
                errors.append(error)

        threads = [threading.Thread(target=client), threading.Thread(target=scheduler.close)]
        for thread in threads:
            thread.start()
        threads[0].join()
        bookkeeper.open.set()
        threads[1].join()
    assert len(errors) == 1


class _Exit(BaseException):
    """What no executor should raise."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_thread_ends_by_a_defect_everybody_is_told() -> None:
    class Broken(Bookkeeper):
        def execute(self, operations: Any) -> Any:
            if operations[0].subject == "broken":
                raise _Exit("out of luck")
            return super().execute(operations)

    bookkeeper = Broken()
    with held(bookkeeper) as scheduler:
        futures = [scheduler.submit(operation(FB, "broken")), scheduler.submit(operation(Kind.SAVE, "p"))]
        bookkeeper.open.set()
        for future in futures:
            with pytest.raises(ClosedError, match="the engine stopped: _Exit: out of luck"):
                future.result()
        with pytest.raises(ClosedError, match="the engine stopped: _Exit: out of luck"):
            scheduler.submit(operation(FB))


def test_a_callback_that_raises_harms_nobody() -> None:
    with Scheduler(Bookkeeper(), BatchLimits(slots=1)) as scheduler:
        scheduler.submit(operation(FB)).add_done_callback(lambda _: 1 / 0)
        scheduler.call(operation(STEP))


def test_callbacks_may_submit_but_not_wait() -> None:
    errors: list[Exception] = []
    followed = threading.Event()
    bookkeeper = Bookkeeper()

    def go_on(_: Future[Any]) -> None:
        try:
            scheduler.call(operation(STEP))
        except OpenTinkerError as error:
            errors.append(error)
        scheduler.submit(operation(STEP)).add_done_callback(lambda _: followed.set())

    with held(bookkeeper) as scheduler:
        scheduler.submit(operation(FB)).add_done_callback(go_on)
        bookkeeper.open.set()
        followed.wait()
    assert "accepted: submit" in str(errors[0])
    assert [item.kind for item in bookkeeper.executed[1:]] == [FB, STEP]


def test_what_a_tenant_was_served_while_nobody_waited_is_not_held_against_it() -> None:
    bookkeeper = Bookkeeper()
    with held(bookkeeper) as scheduler:
        bookkeeper.open.set()
        for _ in range(5):
            scheduler.call(operation(Kind.SAVE, tenant="a"))
        bookkeeper.open.clear()
        bookkeeper.started.clear()
        scheduler.submit(operation(Kind.SAVE, "plug", tenant="plug"))
        bookkeeper.started.wait()
        submitted = [operation(Kind.SAVE, tenant=tenant) for tenant in "abbb"]
        for item in submitted:
            scheduler.submit(item)
    assert bookkeeper.executed[-4:] == submitted


def test_a_callback_may_close() -> None:
    bookkeeper = Bookkeeper()
    with held(bookkeeper) as scheduler:
        scheduler.submit(operation(FB)).add_done_callback(lambda _: scheduler.close(drain=False))
        late = scheduler.submit(operation(STEP))
        bookkeeper.open.set()
        with pytest.raises(CancelledError):
            late.result()


def test_futures_can_be_awaited() -> None:
    async def train(scheduler: Scheduler) -> list[Any]:
        pending = [asyncio.wrap_future(scheduler.submit(operation(kind))) for kind in (FB, STEP)]
        return await asyncio.gather(*pending)

    with Scheduler(Bookkeeper(), BatchLimits(slots=1)) as scheduler:
        assert [item.kind for item in asyncio.run(train(scheduler))] == [FB, STEP]


def test_statistics_count_what_waits_runs_and_ran() -> None:
    bookkeeper = Bookkeeper()
    with held(bookkeeper) as scheduler:
        futures = [scheduler.submit(operation(FB, policy)) for policy in "pqr"]
        futures.append(scheduler.submit(operation(SAMPLE, payload=Fails(ValueError("no")))))
        before = scheduler.statistics()
        assert before.waiting == 4
        assert before.kinds[FB].waiting == 3
        assert before.kinds[Kind.SAVE].running == 1
        futures[1].cancel()
        bookkeeper.open.set()
        wait(futures)
        scheduler.close()
    after = scheduler.statistics()
    fb, sample = after.kinds[FB], after.kinds[SAMPLE]
    assert (after.waiting, fb.done, fb.cancelled) == (0, 2, 1)
    assert not any(kind.running for kind in after.kinds.values())
    assert (sample.done, sample.failed) == (0, 1)
    assert fb.batch_sizes == {2: 1}
    assert before.kinds[FB].waiting == 3


def test_statistics_count_the_tokens_of_what_was_done() -> None:
    with Scheduler(Bookkeeper(), BatchLimits(slots=2)) as scheduler:
        wait([scheduler.submit(operation(FB, policy, tokens=7)) for policy in "pqr"])
        wait([scheduler.submit(operation(FB, "s", tokens=100, payload=Fails(ValueError("no"))))])
        scheduler.close()
    kinds = scheduler.statistics().kinds
    assert (kinds[FB].tokens, kinds[STEP].tokens) == (21, 0)


def test_an_interrupted_call_takes_its_operation_back(monkeypatch: pytest.MonkeyPatch) -> None:
    bookkeeper = Bookkeeper()

    def interrupted(self: Future[Any], timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    with held(bookkeeper) as scheduler, monkeypatch.context() as patched:
        patched.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scheduler.call(operation(FB))
    assert [item.subject for item in bookkeeper.executed] == ["plug"]


def test_a_cancelled_future_raises_at_once() -> None:
    with held(Bookkeeper()) as scheduler:
        future = scheduler.submit(operation(FB))
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result()
