"""The dispatcher: order, outages, poison events, deadlines, and that one process delivers at a time."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from opentinker_core.errors import OpenTinkerError
from opentinker_core.lineage.errors import EventError, MirrorOutageError
from opentinker_core.lineage.lease import delivery_lease
from opentinker_core.lineage.outbox import OutboxDispatcher, Outcome
from opentinker_core.lineage.recorder import MLflowRecorder
from opentinker_core.lineage.tracking import Tracking, TrackingTarget
from opentinker_core.policies.outbox import OutboxEvent
from opentinker_core.runtime.workspace import Workspace
from tests.forked import Forks, forks
from tests.lineage.training import Training
from tests.servers import postgres_binaries, postgres_server
from tests.waiting import PATIENCE_S, wait_until


class Switchable(MLflowRecorder):
    """A recorder whose MLflow can be out, which refuses some events, and remembers the order.

    Events that are recorded together pass together, or not at all.
    """

    def __init__(
        self, workspace: Workspace, refuses: Callable[[OutboxEvent], bool] = lambda event: False
    ) -> None:
        target = TrackingTarget("sqlite://", None)
        super().__init__(target, workspace.catalog, workspace.trajectories)
        self.out = False
        self.refuses = refuses
        self.recorded: list[int] = []
        self.attempted: list[list[int]] = []

    def record(self, events: Sequence[OutboxEvent]) -> None:
        ids = [event.id for event in events]
        self.attempted.append(ids)
        if self.out:
            raise MirrorOutageError("MLflow is out")
        if any(self.refuses(event) for event in events):
            raise EventError("one of them is wrong")
        self.recorded += ids


def make(workspace: Workspace, recorder: MLflowRecorder, **options: int) -> OutboxDispatcher:
    return OutboxDispatcher(workspace.catalog, recorder, backoff_s=(0.02, 0.1), poll_s=0.05, **options)


def steps(workspace: Workspace, count: int) -> Training:
    training = Training(workspace)
    for _ in range(count):
        training.step(episodes=1)
    return training


def test_events_are_delivered_in_order_and_once(workspace: Workspace) -> None:
    recorder = Switchable(workspace)
    dispatcher = make(workspace, recorder)
    steps(workspace, 3)
    ids = [event.id for event in dispatcher.pending()]
    assert dispatcher.deliver_pending().delivered == len(ids) == 5
    assert dispatcher.deliver_pending().delivered == 0
    assert recorder.recorded == ids
    assert recorder.attempted == [ids]


def test_no_more_than_so_many_are_delivered_at_once(workspace: Workspace) -> None:
    recorder = Switchable(workspace)
    dispatcher = make(workspace, recorder, together=2)
    steps(workspace, 3)
    ids = [event.id for event in dispatcher.pending()]
    assert dispatcher.deliver_pending().delivered == 5
    assert recorder.attempted == [ids[:2], ids[2:4], ids[4:]]


def test_an_outage_loses_nothing_and_later_all_arrives_in_order(workspace: Workspace) -> None:
    recorder = Switchable(workspace)
    recorder.out = True
    dispatcher = make(workspace, recorder)
    dispatcher.start()
    started = time.monotonic()
    training = steps(workspace, 5)
    assert time.monotonic() - started < 5
    ids = [event.id for event in dispatcher.pending()]
    wait_until(lambda: len(recorder.attempted) > 2)
    assert {attempt[0] for attempt in recorder.attempted} == {ids[0]}
    assert recorder.recorded == []
    assert all(event.attempts == 0 for event in dispatcher.pending())
    recorder.out = False
    training.step()
    assert dispatcher.close(10) == 0
    assert recorder.recorded == [*ids, ids[-1] + 1]


def test_an_outage_does_not_delay_the_end(workspace: Workspace) -> None:
    recorder = Switchable(workspace)
    recorder.out = True
    dispatcher = OutboxDispatcher(workspace.catalog, recorder, backoff_s=(60, 60))
    steps(workspace, 1)
    dispatcher.start()
    wait_until(lambda: len(recorder.attempted) == 1)
    started = time.monotonic()
    assert dispatcher.close(30) == 3
    assert time.monotonic() - started < 5


def test_between_deliveries_events_gather(workspace: Workspace) -> None:
    recorder = Switchable(workspace)
    dispatcher = OutboxDispatcher(workspace.catalog, recorder, poll_s=60)
    training = steps(workspace, 1)
    dispatcher.start()
    wait_until(lambda: len(recorder.recorded) == 3)
    for _ in range(4):
        training.step(episodes=1)
    assert dispatcher.close(10) == 0
    assert [len(attempt) for attempt in recorder.attempted] == [3, 4]


def test_a_poison_event_is_kept_with_its_error_and_the_others_pass(workspace: Workspace) -> None:
    poison: list[int] = []
    recorder = Switchable(workspace, refuses=lambda event: event.id in poison)
    dispatcher = make(workspace, recorder, max_attempts=3)
    steps(workspace, 3)
    ids = [event.id for event in dispatcher.pending()]
    poison.append(ids[2])
    outcomes = [dispatcher.deliver_pending().outcome for _ in range(3)]
    assert outcomes == [Outcome.RETRY, Outcome.RETRY, Outcome.DRAINED]
    assert recorder.recorded == [one for one in ids if one not in poison]
    (kept,) = dispatcher.pending()
    assert (kept.id, kept.attempts) == (ids[2], 3)
    assert dispatcher.deliver_pending().delivered == 0
    assert recorder.attempted.count([ids[2]]) == 3
    poison.clear()
    assert dispatcher.deliver_pending(retry_given_up=True).delivered == 1
    assert dispatcher.pending() == []


def test_many_given_up_events_do_not_hide_what_follows(workspace: Workspace) -> None:
    recorder = Switchable(workspace, refuses=lambda event: event.kind == "version.published")
    dispatcher = make(workspace, recorder, max_attempts=1)
    training = steps(workspace, 120)
    training.finish()
    assert dispatcher.deliver_pending().outcome is Outcome.DRAINED
    assert len(recorder.recorded) == 2
    assert len(dispatcher.pending()) == 121


def test_the_thread_sees_events_of_others_without_being_woken(workspace: Workspace) -> None:
    recorder = Switchable(workspace)
    dispatcher = make(workspace, recorder)
    dispatcher.start()
    time.sleep(0.1)
    steps(workspace, 1)
    wait_until(lambda: len(recorder.recorded) == 3)
    assert dispatcher.close() == 0


def test_close_keeps_to_its_deadline(workspace: Workspace) -> None:
    release = threading.Event()

    class Slow(Switchable):
        def record(self, events: Sequence[OutboxEvent]) -> None:
            release.wait(PATIENCE_S)
            super().record(events)

    dispatcher = make(workspace, Slow(workspace))
    steps(workspace, 2)
    dispatcher.start()
    assert dispatcher.close(0.3) == 4  # `Slow` still waits
    release.set()


def test_starting_twice_starts_one_thread(workspace: Workspace) -> None:
    dispatcher = make(workspace, Switchable(workspace))
    dispatcher.start()
    dispatcher.start()
    assert [thread.name for thread in threading.enumerate()].count("outbox") == 1
    dispatcher.close()


def test_two_dispatchers_at_once_deliver_each_event_once(workspace: Workspace) -> None:
    recorders = [Switchable(workspace), Switchable(workspace)]
    dispatchers = [make(workspace, recorder) for recorder in recorders]
    for dispatcher in dispatchers:
        dispatcher.start()
    training = Training(workspace)
    for _ in range(20):
        training.step()
    assert [dispatcher.close(PATIENCE_S) for dispatcher in dispatchers] == [0, 0]
    recorded = recorders[0].recorded + recorders[1].recorded
    assert len(recorded) == len(set(recorded)) == 22


def test_a_held_lease_makes_others_busy(workspace: Workspace) -> None:
    steps(workspace, 1)
    dispatcher = make(workspace, Switchable(workspace))
    with delivery_lease(workspace.catalog.url, "default") as held:
        assert held
        assert dispatcher.deliver_pending().outcome is Outcome.BUSY
        with delivery_lease(workspace.catalog.url, "another-tenant") as other:
            assert other
    assert dispatcher.deliver_pending().outcome is Outcome.DRAINED


_HOLDER = """
import sys, time
from opentinker_core.lineage.lease import delivery_lease
with delivery_lease(sys.argv[1], "default") as held:
    print("held" if held else "busy", flush=True)
    time.sleep(600)
"""


def _is_free_after_kill(url: str) -> None:
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, url], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline().strip() == "held"
    with delivery_lease(url, "default") as held:
        assert not held
    holder.send_signal(signal.SIGKILL)
    holder.wait(PATIENCE_S)

    def free() -> bool:
        with delivery_lease(url, "default") as held:
            return held

    wait_until(free)


@pytest.mark.processes
def test_the_lease_of_a_killed_process_is_free(workspace: Workspace) -> None:
    _is_free_after_kill(workspace.catalog.url)


@pytest.mark.servers
def test_the_lease_on_postgres_too() -> None:
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL here")
    with postgres_server(binaries) as url:
        _is_free_after_kill(url)


def test_an_unreachable_postgres_is_one_clear_error() -> None:
    with (
        pytest.raises(OpenTinkerError, match="port 9"),
        delivery_lease("postgresql://nobody@127.0.0.1:9/none", "default"),
    ):
        pass


@pytest.fixture(scope="module")
def python() -> Iterator[Forks]:
    variables = {key: value for key, value in os.environ.items() if not key.startswith("OPENTINKER")}
    with forks("mlflow.tracing.client", "opentinker_core.lineage.outbox", environment=variables) as python:
        yield python


@pytest.mark.processes
@pytest.mark.parametrize(
    ("call", "count"),
    [
        ("mark_delivered", 1),
        ("create_run", 1),
        ("log_batch", 3),
        ("log_inputs", 2),
        ("create_model_version", 2),
        ("set_registered_model_alias", 2),
        ("start_trace", 3),
        ("log_spans", 1),
        ("set_terminated", 1),
    ],
)
def test_a_delivery_that_is_killed_is_repeated_without_a_trace_of_it(
    workspace: Workspace,
    dispatcher: OutboxDispatcher,
    tracking: Tracking,
    python: Forks,
    call: str,
    count: int,
) -> None:
    from tests.lineage.test_recorder import contents, everything

    training = everything(workspace)
    killed = python.run("tests.lineage.deliverer", workspace.home, call, count)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(dispatcher.pending()) == 7
    assert dispatcher.deliver_pending().outcome is Outcome.DRAINED
    shown = contents(tracking, training)
    assert shown["runs"] == 1
    assert sorted(shown["versions"]) == ["0", "1", "2"]
    assert shown["aliases"] == {"0": "0", "1": "1", "2": "2", "rollout": "2"}
    assert shown["metrics"]["loss"] == 2
    assert sorted(spans for _, spans, _ in shown["traces"]) == [2, 2, 3, 3]
    assert [rewards for _, _, rewards in shown["traces"]] == [1, 1, 1, 1]
    assert len(shown["datasets"]) == 4
    assert shown["status"] == "FINISHED"


@pytest.mark.processes
def test_a_locked_mlflow_database_is_an_outage(workspace: Workspace) -> None:
    import sqlite3

    target = TrackingTarget(f"sqlite:///{workspace.home}/mlflow.db?timeout=0.1", None)
    dispatcher = make(workspace, MLflowRecorder(target, workspace.catalog, workspace.trajectories))
    Training(workspace)
    lock = sqlite3.connect(workspace.home / "mlflow.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    delivery = dispatcher.deliver_pending()
    assert (delivery.outcome, delivery.delivered) == (Outcome.OUTAGE, 0)
    assert "locked" in str(delivery.error)
    lock.execute("ROLLBACK")
    assert dispatcher.deliver_pending().outcome is Outcome.DRAINED
