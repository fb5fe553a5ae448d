"""Environments in threads: limits, turns, and whose threads stay."""

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from envs.adapters.hosting import HostedMulti, HostedSingle
from envs.adapters.openenv_adapter import OpenEnvironment
from envs.serving.remote import RemoteEnvironment, RemoteMultiEnvironment
from opentinker_core.agents.stepping import Stepper
from tests.waiting import PATIENCE_S, wait_until

SOON_S = 0.05


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "environment"}


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    before = threads()
    yield
    wait_until(lambda: threads() <= before, "the end of the threads")


class Counting:
    """Notes how many are inside at the same time."""

    concurrent = False
    inside = 0
    most = 0

    def step(self, argument: Any) -> Any:
        cls = type(self)
        cls.inside += 1
        cls.most = max(cls.most, cls.inside)
        random.seed(argument)
        found = [random.random() for _ in range(200)]
        cls.inside -= 1
        return found


def test_environments_that_share_global_random_numbers_do_not_disturb_each_other() -> None:
    class Alone(Counting):
        pass

    async def main() -> list[Any]:
        stepper = Stepper(PATIENCE_S)
        try:
            return await asyncio.gather(*(stepper.call(Alone().step, seed) for seed in range(100)))
        finally:
            stepper.close()

    found = asyncio.run(main())
    assert Alone.most == 1
    assert found == [Alone().step(seed) for seed in range(100)]


def test_those_that_wait_elsewhere_overlap_as_many_as_may() -> None:
    class Meeting:
        """Goes on when so many are there."""

        concurrent = True
        barrier = threading.Barrier(4, timeout=PATIENCE_S)

        def step(self, argument: Any) -> int:
            return self.barrier.wait()

    async def main(concurrent: int) -> list[int]:
        stepper = Stepper(PATIENCE_S, concurrent)
        try:
            return await asyncio.gather(*(stepper.call(Meeting().step, None) for _ in range(8)))
        finally:
            stepper.close()

    assert sorted(asyncio.run(main(4))) == sorted(2 * [0, 1, 2, 3])

    async def after_one() -> list[int]:
        stepper = Stepper(PATIENCE_S, 4)
        assert await stepper.call(abs, -1, of=Meeting()) == 1  # its thread waits for more
        try:
            return await asyncio.gather(*(stepper.call(Meeting().step, None) for _ in range(4)))
        finally:
            stepper.close()

    assert sorted(asyncio.run(after_one())) == [0, 1, 2, 3]

    class Crowd(Counting):
        concurrent = True

    async def crowd() -> None:
        stepper = Stepper(PATIENCE_S, concurrent=1)
        await asyncio.gather(*(stepper.call(Crowd().step, seed) for seed in range(20)))
        stepper.close()

    asyncio.run(crowd())
    assert Crowd.most == 1


def test_whose_method_it_is_can_be_said() -> None:
    class Elsewhere:
        concurrent = True

    barrier = threading.Barrier(2, timeout=PATIENCE_S)

    async def main() -> None:
        stepper = Stepper(PATIENCE_S)
        both = (stepper.call(lambda _: barrier.wait(), None, of=Elsewhere()) for _ in range(2))
        await asyncio.gather(*both)
        stepper.close()

    asyncio.run(main())


def test_what_takes_too_long_is_given_up_and_others_go_on() -> None:
    release = threading.Event()

    class Wedged:
        def step(self, argument: Any) -> bool:
            return release.wait(PATIENCE_S)

    async def main() -> None:
        hasty, patient = Stepper(SOON_S), Stepper(PATIENCE_S)
        with pytest.raises(TimeoutError, match=r"^step took longer than 0\.05 s$"):
            await hasty.call(Wedged().step, None)
        assert await patient.call(abs, -1) == 1
        hasty.close()
        patient.close()

    before = threads()
    asyncio.run(main())
    wait_until(lambda: len(threads() - before) == 1, "the end of all threads but the wedged one")
    release.set()  # its loop is closed by now: the thread ends all the same


def test_each_call_has_its_own_time_whatever_was_before_it() -> None:
    release = threading.Event()
    done: list[str] = []

    def step(name: str) -> str:
        if name == "wedged":
            release.wait(PATIENCE_S)
        done.append(name)
        return name

    async def main() -> list[str | BaseException]:
        stepper = Stepper(SOON_S)
        names = ["a", "wedged", "b", "wedged", "c"]
        found = await asyncio.gather(*(stepper.call(step, name) for name in names), return_exceptions=True)
        stepper.close()
        return found

    a, first, b, second, c = asyncio.run(main())
    assert (a, b, c) == ("a", "b", "c")
    assert isinstance(first, TimeoutError)
    assert isinstance(second, TimeoutError)
    assert done == ["a", "b", "c"]
    release.set()


def test_what_is_cancelled_before_its_turn_is_never_called() -> None:
    entered, release = threading.Event(), threading.Event()
    called: list[int] = []

    def wait(argument: Any) -> None:
        entered.set()
        assert release.wait(PATIENCE_S)

    async def main() -> None:
        stepper = Stepper(PATIENCE_S)
        first = asyncio.create_task(stepper.call(wait, None))
        await asyncio.to_thread(entered.wait, PATIENCE_S)
        second, third = (asyncio.create_task(stepper.call(called.append, number)) for number in (2, 3))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        release.set()
        await asyncio.gather(first, third)
        stepper.close()

    asyncio.run(main())
    assert called == [3]


def test_threads_are_used_again_and_end_with_the_stepper() -> None:
    async def main() -> set[str]:
        stepper = Stepper(PATIENCE_S)
        names = {await stepper.call(lambda _: str(threading.get_ident()), None) for _ in range(20)}
        stepper.close()
        return names

    assert len(asyncio.run(main())) == 1


def test_a_call_that_is_cancelled_leaves_no_thread_behind_once_it_comes_back() -> None:
    entered, release = threading.Event(), threading.Event()

    def wait(argument: Any) -> None:
        entered.set()
        assert release.wait(PATIENCE_S)

    async def main() -> None:
        stepper = Stepper(PATIENCE_S)
        task = asyncio.create_task(stepper.call(wait, None))
        await asyncio.to_thread(entered.wait, PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        other = asyncio.create_task(stepper.call(abs, -2))  # does not wait for the one that was left
        assert await other == 2
        stepper.close()

    asyncio.run(main())
    release.set()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        SystemExit("no"),
        StopIteration("no"),
        KeyboardInterrupt("no"),
        asyncio.CancelledError("no"),
        GeneratorExit("no"),
    ],
    ids=repr,
)
def test_what_it_raises_is_raised_where_it_is_waited_for(error: BaseException) -> None:
    def fail(argument: Any) -> None:
        raise error

    async def main() -> None:
        stepper = Stepper(PATIENCE_S)
        expected = type(error) if isinstance(error, ValueError | SystemExit) else RuntimeError
        with pytest.raises(expected, match="no"):
            await stepper.call(fail, None)
        assert await stepper.call(abs, -1) == 1
        stepper.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "kind", [RemoteEnvironment, RemoteMultiEnvironment, OpenEnvironment, HostedSingle, HostedMulti]
)
def test_environments_that_run_elsewhere_say_so(kind: type) -> None:
    assert kind.concurrent
