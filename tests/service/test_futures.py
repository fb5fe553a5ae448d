"""Futures by themselves: kept within bounds, ended in every way."""

import asyncio

import pytest

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.service.futures import Failure, FutureBook, Work
from opentinker_core.service.sequencer import Sequencer
from opentinker_core.service.types import StoredResult


def giving(body: bytes) -> Work:
    async def work() -> StoredResult:
        return StoredResult(body)

    return work


def failing(error: Exception) -> Work:
    async def work() -> StoredResult:
        raise error

    return work


async def forever() -> StoredResult:
    await asyncio.Event().wait()
    raise AssertionError


def test_outcomes_say_whose_fault_a_failure_is_and_nothing_of_defects() -> None:
    async def run() -> None:
        book = FutureBook()
        for name, error in (
            ("user", UsageError("wrong")),
            ("server", OpenTinkerError("full")),
            ("defect", KeyError("secret")),
        ):
            book.submit("t", name, "x", "d", failing(error))
            outcome = await book.retrieve("t", name, 1)
            assert isinstance(outcome, Failure)
            assert outcome.category == ("user" if name == "user" else "server")
            assert "secret" not in outcome.message

    asyncio.run(run())


def test_what_is_read_goes_soon_what_is_not_goes_later_and_the_oldest_go_first() -> None:
    async def run() -> None:
        book = FutureBook(keep_seconds=600, read_seconds=0, keep_bytes=25_000)
        for name in ("read", "old", "middle", "new"):
            book.submit("t", name, "x", "d", giving(bytes(10_000)))
            await asyncio.sleep(0.01)
        await book.retrieve("t", "read", 1)
        book.submit("t", "runs", "x", "d", forever)
        book.sweep()
        assert set(book._futures) == {"middle", "new", "runs"}
        book.close()

    asyncio.run(run())


def test_the_end_of_a_future_is_told_once_even_if_it_never_began() -> None:
    async def run() -> None:
        book, ended = FutureBook(), []
        book.submit("t", "s:train:0:1", "x", "d", forever, on_end=lambda: ended.append("first"))
        book.submit("t", "s:train:0:1", "x", "d", forever, on_end=lambda: ended.append("retry"))
        waiting = asyncio.ensure_future(book.retrieve("t", "s:train:0:1", 5))
        book.forget("s")  # before its task ran at all
        await asyncio.sleep(0.01)
        assert (ended, len(book)) == (["retry", "first"], 0)
        with pytest.raises(KeyError):
            await waiting

    asyncio.run(run())


def test_numbers_are_launched_in_order_and_a_slow_one_holds_up_those_behind() -> None:
    async def run() -> None:
        order: list[int] = []
        sequencer = Sequencer()

        async def launch(number: int) -> None:
            await asyncio.sleep(0.02 if number == 1 else 0)
            order.append(number)

        for number in (3, 5, 1):
            sequencer.put(number, lambda number=number: launch(number))  # type: ignore[misc]
        sequencer.consume(2)
        await asyncio.sleep(0.1)
        assert order == [1, 3]
        assert (sequencer.next, sequencer.is_past(5), sequencer.is_past(4)) == (4, True, False)
        sequencer.put(4, lambda: launch(4))
        await asyncio.sleep(0.05)
        assert order == [1, 3, 4, 5]

    asyncio.run(run())
