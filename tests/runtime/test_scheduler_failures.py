"""A failing operation fails alone, and what depended on it does not run as if nothing had happened."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.runtime.batching import BatchLimits
from opentinker_core.runtime.operations import DependencyError, Kind, Operation
from opentinker_core.runtime.scheduler import Scheduler
from tests.runtime.executors import Bookkeeper, Fails, Sinks, held, operation
from tests.waiting import PATIENCE_S

FB, FORWARD, STEP = Kind.FORWARD_BACKWARD, Kind.FORWARD, Kind.OPTIM_STEP
LOAD, SAVE, PUBLISH = Kind.LOAD, Kind.SAVE, Kind.PUBLISH
DIVERGED = Fails(OpenTinkerError("diverged"))
REFUSED = Fails(UsageError("datums: [] is not accepted"))

each_way = pytest.mark.parametrize("way", [Fails, Sinks])


def _outcomes(futures: list[Future[Any]]) -> list[str]:
    """Of each future `done`, `cancelled`, `failed` or `not run`."""

    def outcome(future: Future[Any]) -> str:
        if future.cancelled():
            return "cancelled"
        error = future.exception()
        return "not run" if isinstance(error, DependencyError) else "failed" if error else "done"

    return [outcome(future) for future in futures]


def _run(submitted: list[Operation[Any]], bookkeeper: Bookkeeper | None = None) -> list[Future[Any]]:
    """Submit all before any runs."""
    with held(bookkeeper or Bookkeeper()) as scheduler:
        return [scheduler.submit(item) for item in submitted]


@each_way
def test_a_failing_operation_fails_alone(way: Callable[[Exception], object]) -> None:
    bookkeeper = Bookkeeper()
    submitted = [operation(FB, policy) for policy in "pqr"]
    submitted.insert(1, operation(FB, "bad", way(ValueError("no such token"))))
    futures = _run(submitted, bookkeeper)
    assert _outcomes(futures) == ["done", "failed", "done", "done"]
    assert str(futures[1].exception()) == "no such token"
    assert bookkeeper.gradients == {
        policy: [x] for policy, x in zip("pqr", [submitted[0], *submitted[2:]], strict=True)
    }


@each_way
@pytest.mark.parametrize("kind", [FORWARD, STEP, Kind.SAMPLE])
def test_so_it_does_in_batches_of_every_kind(way: Callable[[Exception], object], kind: Kind) -> None:
    futures = _run([operation(kind, "p"), operation(kind, "q", way(ValueError("no"))), operation(kind, "r")])
    assert _outcomes(futures) == ["done", "failed", "done"]


def test_an_executor_that_miscounts_fails_the_whole_batch() -> None:
    class Short(Bookkeeper):
        def execute(self, operations: Any) -> Any:
            return super().execute(operations)[:1]

    futures = _run([operation(FB, "p"), operation(FB, "q")], Short())
    assert _outcomes(futures) == ["failed", "failed"]
    assert str(futures[0].exception()) == "the executor gave 1 outcomes for 2 operations"


@each_way
def test_what_waits_behind_a_failed_forward_backward_is_not_run(way: Callable[[Exception], object]) -> None:
    bookkeeper = Bookkeeper()
    behind = [operation(kind) for kind in (STEP, FB, STEP, SAVE, PUBLISH, FORWARD)]
    failing = operation(FB, payload=way(ValueError("no such token")))
    futures = _run([failing, *behind, operation(STEP, "other")], bookkeeper)
    assert _outcomes(futures) == ["failed", *["not run"] * 6, "done"]
    assert [item.subject for item, _ in bookkeeper.steps] == ["other"]
    error = futures[1].exception()
    assert isinstance(error, DependencyError)
    assert str(error) == (
        "optim_step of 'adder' was not run, because the forward_backward before it failed: no such token"
    )
    assert error.cause is failing
    assert error.__cause__ is futures[0].exception()


@pytest.mark.parametrize("failure", [REFUSED, DIVERGED])
def test_a_late_step_is_not_taken_on_a_part_of_its_gradients(failure: Fails) -> None:
    """However long after the failure it comes, and whatever succeeded in between."""
    bookkeeper = Bookkeeper()
    with Scheduler(bookkeeper, BatchLimits(slots=1)) as scheduler:
        chunks = [operation(FB), operation(FB, payload=failure), operation(FB)]
        assert _outcomes([_waited(scheduler, item) for item in chunks]) == ["done", "failed", "done"]
        with pytest.raises(DependencyError, match="its gradients are discarded"):
            _waited(scheduler, operation(STEP)).result()
        assert bookkeeper.gradients == {}
        again = [operation(FB), operation(STEP)]
        assert _outcomes([_waited(scheduler, item) for item in again]) == ["done", "done"]
    assert bookkeeper.steps == [(again[1], [again[0]])]


def test_nor_on_a_part_of_those_that_waited_behind_a_failure() -> None:
    bookkeeper = Bookkeeper()
    with held(bookkeeper) as scheduler:
        failing = operation(FB, payload=REFUSED)
        futures = [scheduler.submit(x) for x in (operation(FB), failing, operation(STEP), operation(FB))]
        bookkeeper.open.set()
        assert _outcomes(futures) == ["done", "failed", "not run", "not run"]
        assert bookkeeper.gradients == {}
        late = [operation(kind) for kind in (FB, STEP, FB, STEP)]
        assert _outcomes([_waited(scheduler, x) for x in late]) == ["done", "not run", "done", "done"]
    assert bookkeeper.steps == [(late[3], [late[2]])]


def _waited(scheduler: Scheduler, item: Operation[Any]) -> Future[Any]:
    future = scheduler.submit(item)
    future.exception()
    return future


def test_a_caller_who_got_the_error_goes_on_with_what_succeeded() -> None:
    bookkeeper = Bookkeeper()
    with Scheduler(bookkeeper, BatchLimits(slots=1)) as scheduler:
        first, second, step = operation(FB), operation(FB), operation(STEP)
        scheduler.call(first)
        with pytest.raises(UsageError):
            scheduler.call(operation(FB, payload=REFUSED))
        scheduler.call(second)
        scheduler.call(step)
    assert bookkeeper.steps == [(step, [first, second])]


def test_acknowledging_another_failure_changes_nothing() -> None:
    with Scheduler(Bookkeeper(), BatchLimits(slots=1)) as scheduler:
        _waited(scheduler, operation(FB, payload=REFUSED))
        scheduler.acknowledge(operation(FB, payload=REFUSED))
        assert _outcomes([_waited(scheduler, operation(STEP))]) == ["not run"]


def test_a_step_that_fails_midway_spoils_the_policy_until_it_is_loaded() -> None:
    with Scheduler(Bookkeeper(), BatchLimits(slots=1)) as scheduler:
        with pytest.raises(OpenTinkerError, match="diverged"):
            scheduler.call(operation(STEP, payload=DIVERGED))
        for kind in (FB, FORWARD, STEP, SAVE, PUBLISH):
            with pytest.raises(DependencyError, match="optim_step before it failed: diverged; accepted now"):
                scheduler.call(operation(kind))
        scheduler.call(operation(FB, "other"))
        scheduler.call(operation(LOAD))
        for kind in (FB, FORWARD, STEP, SAVE, PUBLISH):
            scheduler.call(operation(kind))


def test_a_refused_step_may_be_asked_for_again() -> None:
    bookkeeper = Bookkeeper()
    with Scheduler(bookkeeper, BatchLimits(slots=1)) as scheduler:
        batch, step = operation(FB), operation(STEP)
        scheduler.call(batch)
        with pytest.raises(UsageError):
            scheduler.call(operation(STEP, payload=REFUSED))
        scheduler.call(step)
    assert bookkeeper.steps == [(step, [batch])]


@pytest.mark.parametrize("kind", [LOAD, Kind.CREATE])
@pytest.mark.parametrize("failure", [REFUSED, DIVERGED])
def test_nothing_trains_on_a_state_that_could_not_be_loaded(kind: Kind, failure: Fails) -> None:
    with Scheduler(Bookkeeper(), BatchLimits(slots=1)) as scheduler:
        items = [operation(kind, payload=failure), operation(FB), operation(STEP), operation(PUBLISH)]
        assert _outcomes([_waited(scheduler, item) for item in items]) == ["failed", *["not run"] * 3]
        items = [operation(kind), operation(FB), operation(STEP), operation(PUBLISH)]
        assert _outcomes([_waited(scheduler, item) for item in items]) == ["done"] * 4


def test_a_load_that_waits_behind_a_failure_is_run_and_mends_it() -> None:
    bookkeeper = Bookkeeper()
    kinds = [STEP, FB, LOAD, FB, STEP]
    submitted = [operation(kind) for kind in kinds]
    futures = _run([operation(FB, payload=REFUSED), *submitted], bookkeeper)
    assert _outcomes(futures) == ["failed", "not run", "not run", "done", "done", "done"]
    assert bookkeeper.steps == [(submitted[4], [submitted[3]])]


@pytest.mark.parametrize("kind", [FORWARD, SAVE, PUBLISH])
def test_what_changes_nothing_may_fail_without_consequences(kind: Kind) -> None:
    futures = _run([operation(FB), operation(kind, payload=DIVERGED), operation(STEP), operation(SAVE)])
    assert _outcomes(futures) == ["done", "failed", "done", "done"]


@pytest.mark.parametrize("kind", [FB, STEP, LOAD])
def test_for_what_comes_behind_it_a_cancelled_operation_failed(kind: Kind) -> None:
    with held(Bookkeeper()) as scheduler:
        futures = [scheduler.submit(operation(each)) for each in (kind, STEP, FB, SAVE)]
        futures[0].cancel()
    assert _outcomes(futures) == ["cancelled", "not run", "not run", "not run"]
    assert "failed: CancelledError" in str(futures[1].exception())


def test_operations_cancelled_behind_a_failure_stay_cancelled() -> None:
    with held(Bookkeeper()) as scheduler:
        futures = [
            scheduler.submit(x) for x in (operation(FB, payload=REFUSED), operation(STEP), operation(FB))
        ]
        futures[1].cancel()
    assert not wait(futures, timeout=PATIENCE_S).not_done
    assert _outcomes(futures) == ["failed", "cancelled", "not run"]


def test_gradients_that_cannot_be_discarded_spoil_the_policy() -> None:
    class Stubborn(Bookkeeper):
        def discard_gradients(self, policy: str) -> None:
            raise OSError("no")

    with Scheduler(Stubborn(), BatchLimits(slots=1)) as scheduler:
        items = [
            operation(FB, payload=REFUSED),
            operation(STEP),
            operation(FB),
            operation(LOAD),
            operation(FB),
        ]
        futures = [_waited(scheduler, item) for item in items]
    assert _outcomes(futures) == ["failed", "not run", "not run", "done", "done"]


kinds = st.sampled_from([FB, FB, FB, STEP, STEP, FORWARD, LOAD, SAVE])
failures = st.sampled_from([None] * 6 + [REFUSED, DIVERGED, Sinks(UsageError("no")), Sinks(OSError("full"))])


@settings(deadline=None, max_examples=200)
@example(
    [
        (FB, "q", None, "ahead"),
        (FB, "q", None, "cancel"),
        (STEP, "q", None, "wait"),
        (STEP, "q", None, "ahead"),
    ]
)
@given(
    st.lists(
        st.tuples(kinds, st.sampled_from("pq"), failures, st.sampled_from(["ahead", "cancel", "wait"])),
        max_size=40,
    )
)
def test_every_step_that_is_taken_has_all_of_its_gradients_and_no_others(
    drawn: list[tuple[Kind, str, Any, str]],
) -> None:
    """Whatever fails or is cancelled, and wherever the client waits for an answer before it goes on."""
    bookkeeper = Bookkeeper()
    submitted = [operation(kind, subject, failure) for kind, subject, failure, _ in drawn]
    futures = []
    with held(bookkeeper) as scheduler:
        for item, (*_, how) in zip(submitted, drawn, strict=True):
            futures.append(scheduler.submit(item))
            if how == "cancel":
                futures[-1].cancel()
            if how == "wait":
                bookkeeper.open.set()
                futures[-1].exception()
                bookkeeper.open.clear()
    done = {item for item, outcome in zip(submitted, _outcomes(futures), strict=True) if outcome == "done"}
    expected = []
    for policy in "pq":
        gradients: list[Operation[Any]] = []
        for item in (item for item in submitted if item.subject == policy):
            if item.kind is FB:
                gradients.append(item)
            elif item.kind is STEP:
                if item in done:
                    expected.append((item, gradients))
                gradients = []
            elif item.kind is LOAD and item in done:
                gradients = []
    assert dict(bookkeeper.steps) == dict(expected)
    for _, gradients in expected:
        assert done.issuperset(gradients)
