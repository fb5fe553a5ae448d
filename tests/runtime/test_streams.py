"""What decodes token by token runs beside other work, fairly, and can be withdrawn."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from opentinker_core.config.schema import LoRAConfig, RuntimeConfig
from opentinker_core.errors import UsageError
from opentinker_core.models.source import resolve
from opentinker_core.runtime.batching import BatchLimits
from opentinker_core.runtime.engine import SharedEngine
from opentinker_core.runtime.executor import EngineExecutor
from opentinker_core.runtime.operations import ClosedError, Kind, Operation
from opentinker_core.runtime.scheduler import Scheduler
from opentinker_core.sampling.generation import Generation
from opentinker_core.sampling.protocol import BASE, SampledSequence, SampleRequest, SamplingParams
from tests.tiny import TinyEngine

Samples = list[list[SampledSequence]]


@pytest.fixture
def engine(tiny_home: Path) -> Iterator[SharedEngine]:
    engine = SharedEngine(
        resolve("tiny", tiny_home), RuntimeConfig(device="cpu"), tiny_home, lambda uri, _: Path(uri)
    )
    yield engine
    engine.close()


def sample(tokens: int, seed: int = 0, *, tenant: str = "one") -> Operation[Samples]:
    request = SampleRequest((5, 6), SamplingParams(tokens), BASE, (seed,))
    return Operation(Kind.SAMPLE, tenant, BASE, [request], tokens=tokens + 2, sequences=1)


class Paced:
    """Lets a test look between the steps of the running batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> None:
        self.steps = 0
        step = Generation.step

        def paced(generation: Generation) -> None:
            self.steps += 1
            before(self.steps)
            step(generation)

        monkeypatch.setattr(Generation, "step", paced)


def test_a_short_request_does_not_wait_for_a_long_one(
    engine: SharedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joins the running batch, and ends long before the other."""
    scheduler, joined = engine.scheduler, []

    def join(step: int) -> None:
        if step == 5:
            joined.append(scheduler.submit(sample(3, 1)))

    paced = Paced(monkeypatch, join)
    long = scheduler.submit(sample(200))
    ended: list[int] = []
    long.add_done_callback(lambda _: ended.append(paced.steps))
    long.result(60)
    joined[0].add_done_callback(lambda _: ended.append(0))
    assert joined[0].done()
    assert 200 <= ended[0] <= 202, "the batch took the other in without another pass"
    assert max(engine.scheduler.statistics().kinds[Kind.SAMPLE].batch_sizes) == 2


def test_others_work_comes_between_the_steps_of_a_long_request(
    engine: SharedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = engine.scheduler
    others: list[Future[Any]] = []
    done_at: list[int] = []

    def submit(step: int) -> None:
        if step == 5:
            others.append(scheduler.submit(create("two")))
            others[0].add_done_callback(lambda _: done_at.append(paced.steps))

    paced = Paced(monkeypatch, submit)
    scheduler.submit(sample(200)).result(60)
    others[0].result(60)
    assert done_at[0] < 20


def create(tenant: str) -> Operation[None]:
    return Operation(Kind.CREATE, tenant, f"policy of {tenant}", (LoRAConfig(rank=2), 0))


def test_within_a_tenant_what_came_first_ends_first(
    engine: SharedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, behind = engine.scheduler, []

    def submit(step: int) -> None:
        if step == 5:
            behind.append(scheduler.submit(create("one")))

    Paced(monkeypatch, submit)
    first = scheduler.submit(sample(50))
    first.add_done_callback(lambda _: behind.append(behind[0].done()))
    first.result(60)
    behind[0].result(60)
    assert behind[1] is False


def test_a_withdrawn_request_ends_early_and_leaves_nothing(
    engine: SharedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = engine.scheduler

    def withdraw(step: int) -> None:
        if step == 5:
            scheduler.withdraw(futures[0])

    alone = scheduler.call(sample(9, 3))
    paced = Paced(monkeypatch, withdraw)
    futures = [scheduler.submit(sample(300)), scheduler.submit(sample(9, 3))]
    with pytest.raises(ClosedError, match="nobody waits"):
        futures[0].result(60)
    assert paced.steps < 20
    assert futures[1].result(60)[0][0].tokens.tolist() == alone[0][0].tokens.tolist()


def test_closing_does_not_wait_for_what_decodes(
    engine: SharedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, begun = engine.scheduler, threading.Event()
    paced = Paced(monkeypatch, lambda step: begun.set() if step == 5 else None)
    future = scheduler.submit(sample(400))
    begun.wait(60)
    scheduler.close(drain=False)
    assert isinstance(future.exception(0), ClosedError)
    assert paced.steps < 400


def test_a_step_that_breaks_off_runs_each_request_alone(
    engine: SharedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = engine.scheduler
    alone = [scheduler.call(sample(12, seed)) for seed in range(3)]

    def fail(step: int) -> None:
        if step == 5:
            raise RuntimeError("out of memory")

    Paced(monkeypatch, fail)
    futures = [scheduler.submit(sample(12, seed)) for seed in range(3)]
    for future, expected in zip(futures, alone, strict=True):
        assert future.result(60)[0][0].tokens.tolist() == expected[0][0].tokens.tolist()


def test_a_refused_request_fails_alone(engine: SharedEngine) -> None:
    scheduler = engine.scheduler
    wrong: Operation[Samples] = Operation(
        Kind.SAMPLE, "one", "nobody@1", [SampleRequest((5,), SamplingParams(2), "nobody@1", (0,))]
    )
    fine, refused = scheduler.submit(sample(20)), scheduler.submit(wrong)
    with pytest.raises(UsageError, match="not served"):
        refused.result(60)
    assert len(fine.result(60)[0][0].tokens) == 20


def test_no_more_run_at_once_than_the_limits_allow(tiny_home: Path, tmp_path: Path) -> None:
    """Many clients, few places: all get their results, and the running batch never holds more."""
    tiny = TinyEngine.open(tiny_home, tmp_path)
    executor = EngineExecutor(tiny.trainer, tiny.sampler)
    most: list[int] = []
    advance = executor.advance

    def watched() -> Any:
        most.append(sum(len(ticket) for ticket in executor._tickets.values()))
        return advance()

    executor.advance = watched  # type: ignore[method-assign]
    with Scheduler(executor, BatchLimits(slots=4, sequences=3)) as scheduler:
        futures = [scheduler.submit(sample(5 + n % 7, n, tenant=f"t{n % 4}")) for n in range(30)]
        assert not wait(futures, 120).not_done
    assert max(most) == 3
    assert tiny.sampler.generation.cache.sequences == 0
