"""The broker: what is asked about the same time goes in one call; errors and cancelled requests."""

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from opentinker_core.agents.broker import Broker
from opentinker_core.errors import OpenTinkerError
from opentinker_core.sampling.protocol import SampledSequence, SampleRequest, SamplingParams
from opentinker_core.trajectories.types import StopReason
from tests.waiting import PATIENCE_S

PARAMS = SamplingParams(max_tokens=2)


class Echo:
    """Answers the last token of the prompt and the seed; notes its calls, and can be held up."""

    def __init__(self, error: Exception | None = None, held: bool = False, lost: int = 0) -> None:
        self.calls: list[list[SampleRequest]] = []
        self.entered, self.released = threading.Event(), threading.Event()
        self._error, self._lost = error, lost
        if not held:
            self.released.set()

    def refresh(self, version: str, snapshot_uri: str, digest: str) -> None:
        raise AssertionError

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[SampledSequence]]:
        self.calls.append(list(requests))
        self.entered.set()
        assert self.released.wait(PATIENCE_S)
        if self._error is not None:
            raise self._error
        answers = [[_sequence(one.prompt_tokens[-1], seed) for seed in one.seeds] for one in requests]
        return answers[: len(answers) - self._lost]


def _sequence(token: int, seed: int) -> SampledSequence:
    return SampledSequence(np.array([token, seed], np.int32), np.zeros(2, np.float32), StopReason.STOP, "p@1")


async def ask(broker: Broker, episode: str, token: int, seed: int = 0, version: str = "p@1") -> list[int]:
    sequence = await broker.sample(episode, (1, token), PARAMS, version, seed)
    found: list[int] = sequence.tokens.tolist()
    return found


async def turn(broker: Broker, episode: str, token: int) -> list[int]:
    with broker.playing(episode):
        return await ask(broker, episode, token)


def test_requests_of_a_tick_share_a_call_and_the_same_prompts_a_prefill() -> None:
    sampler = Echo()

    async def main() -> list[list[int]]:
        broker = Broker(sampler)
        with broker.playing("a"), broker.playing("b"), broker.playing("c"):
            asked = (ask(broker, "a", 5, 1), ask(broker, "b", 6, 2), ask(broker, "c", 5, 3))
            return await asyncio.gather(*asked)

    assert asyncio.run(main()) == [[5, 1], [6, 2], [5, 3]]
    (call,) = sampler.calls
    assert sorted((one.prompt_tokens, one.seeds) for one in call) == [((1, 5), (1, 3)), ((1, 6), (2,))]


def test_versions_are_not_mixed() -> None:
    sampler = Echo()

    async def main() -> None:
        broker = Broker(sampler)
        with broker.playing("a"), broker.playing("b"):
            await asyncio.gather(ask(broker, "a", 5), ask(broker, "b", 5, version="q@2"))

    asyncio.run(main())
    assert sorted(one.version for one in sampler.calls[0]) == ["p@1", "q@2"]


def test_a_call_waits_a_little_for_an_episode_that_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opentinker_core.agents.broker._LINGER_S", PATIENCE_S)
    sampler = Echo()

    async def main() -> None:
        broker = Broker(sampler)

        async def busy_first() -> list[int]:
            with broker.playing("b"):
                for _ in range(20):  # its environment takes its time
                    await asyncio.sleep(0)
                assert sampler.calls == []
                return await ask(broker, "b", 6)

        assert await asyncio.gather(busy_first(), turn(broker, "a", 5)) == [[6, 0], [5, 0]]

    asyncio.run(main())
    assert len(sampler.calls) == 1


def test_it_does_not_wait_for_an_episode_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opentinker_core.agents.broker._LINGER_S", PATIENCE_S)

    async def main() -> None:
        broker = Broker(Echo())

        async def over() -> None:
            with broker.playing("b"):
                for _ in range(20):
                    await asyncio.sleep(0)

        assert (await asyncio.gather(over(), turn(broker, "a", 5)))[1] == [5, 0]

    asyncio.run(main())


def test_nor_longer_than_a_little() -> None:
    async def main() -> None:
        broker = Broker(Echo())
        with broker.playing("busy all the time"):
            assert await turn(broker, "a", 5) == [5, 0]

    asyncio.run(main())


def test_a_call_does_not_wait_for_one_that_runs() -> None:
    sampler = Echo(held=True)

    async def main() -> None:
        broker = Broker(sampler)
        first = asyncio.create_task(turn(broker, "a", 5))
        await asyncio.to_thread(sampler.entered.wait, PATIENCE_S)
        sampler.entered.clear()
        second = asyncio.create_task(turn(broker, "b", 6))
        await asyncio.to_thread(sampler.entered.wait, PATIENCE_S)
        assert len(sampler.calls) == 2
        sampler.released.set()
        assert await asyncio.gather(first, second) == [[5, 0], [6, 0]]

    asyncio.run(main())


def test_an_error_reaches_all_of_its_call_and_no_later_one() -> None:
    sampler = Echo(ConnectionError("the sampler is gone"))

    async def main() -> None:
        broker = Broker(sampler)
        both = await asyncio.gather(turn(broker, "a", 5), turn(broker, "b", 6), return_exceptions=True)
        assert [str(error) for error in both] == ["the sampler is gone"] * 2
        sampler._error = None
        assert await turn(broker, "a", 7) == [7, 0]

    asyncio.run(main())


def test_a_sampler_that_gives_too_little_is_an_error_and_nobody_waits_for_ever() -> None:
    async def main() -> None:
        broker = Broker(Echo(lost=1))
        both = await asyncio.gather(turn(broker, "a", 5), turn(broker, "b", 6), return_exceptions=True)
        assert [type(error) for error in both] == [OpenTinkerError] * 2

    asyncio.run(main())


def test_requests_that_were_cancelled_are_not_sampled_and_do_not_disturb_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("opentinker_core.agents.broker._LINGER_S", PATIENCE_S)
    sampler = Echo()

    async def main() -> None:
        broker = Broker(sampler)
        with broker.playing("a"), broker.playing("b"), broker.playing("c"):
            gone = asyncio.create_task(ask(broker, "a", 5))
            stays = asyncio.create_task(ask(broker, "b", 6))
            await asyncio.sleep(0)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            again = asyncio.create_task(ask(broker, "a", 7))  # the next attempt
            third = asyncio.create_task(ask(broker, "c", 8))
            assert await asyncio.gather(stays, again, third) == [[6, 0], [7, 0], [8, 0]]

    asyncio.run(main())
    (call,) = sampler.calls
    assert sorted(one.prompt_tokens for one in call) == [(1, 6), (1, 7), (1, 8)]


def test_an_answer_that_nobody_waits_for_any_more_is_dropped() -> None:
    sampler = Echo(held=True)

    async def main() -> None:
        broker = Broker(sampler)
        with broker.playing("a"), broker.playing("b"):
            gone = asyncio.create_task(ask(broker, "a", 5))
            stays = asyncio.create_task(ask(broker, "b", 6))
            await asyncio.to_thread(sampler.entered.wait, PATIENCE_S)
            gone.cancel()
            sampler.released.set()
            assert await stays == [6, 0]
            with pytest.raises(asyncio.CancelledError):
                await gone

    asyncio.run(main())


def test_where_all_were_cancelled_nothing_is_called() -> None:
    sampler = Echo()

    async def main() -> None:
        broker = Broker(sampler)
        with broker.playing("a"):
            gone = asyncio.create_task(ask(broker, "a", 5))
            await asyncio.sleep(0)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            for _ in range(5):
                await asyncio.sleep(0)

    asyncio.run(main())
    assert sampler.calls == []


def test_a_call_that_comes_back_after_the_loop_was_closed_is_of_no_consequence() -> None:
    sampler = Echo(held=True)

    async def main() -> None:
        broker = Broker(sampler)
        with broker.playing("a"):
            task = asyncio.create_task(ask(broker, "a", 5))
            await asyncio.to_thread(sampler.entered.wait, PATIENCE_S)
            task.cancel()

    before = set(threading.enumerate())
    asyncio.run(main())
    (thread,) = (one for one in set(threading.enumerate()) - before if one.name == "sampling")
    sampler.released.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
