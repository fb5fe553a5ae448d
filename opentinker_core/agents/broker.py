"""Asks a sampler for many agents at once: what is asked about the same time goes in one call."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from opentinker_core.errors import OpenTinkerError
from opentinker_core.sampling.protocol import SampledSequence, Sampler, SampleRequest, SamplingParams

_LINGER_S = 0.02
"""How long a request waits at least for those of episodes that are busy elsewhere."""
_LINGER_SHARE = 0.25
"""How long it waits, as a share of what the last call took: a larger call saves more than that."""


@dataclass(frozen=True, eq=False)
class _Asked:
    prompt: tuple[int, ...]
    params: SamplingParams
    version: str
    seed: int
    answer: "asyncio.Future[SampledSequence]"

    @property
    def shared(self) -> tuple[object, ...]:
        """Requests that have this in common share the prefill."""
        return self.prompt, self.params, self.version


class Broker:
    """Used within one event loop. Which requests share a call changes the speed, and no token.

    A call is made when every episode waits for tokens, or the first request has waited for a little;
    it does not wait for calls that run. The sampler is called in threads of its own.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._waiting: list[_Asked] = []
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._asked: dict[str, int] = {}
        """By episode: requests that are not answered."""
        self._busy = 0
        """Episodes that wait for no answer, and may ask."""
        self._call_s = 0.0
        """What the last call took."""

    @contextmanager
    def playing(self, episode: str) -> Iterator[None]:
        """While an episode is being played, others' requests wait for its own a little."""
        self._asked[episode] = 0
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= self._asked.pop(episode) == 0
            self._consider()

    async def sample(
        self, episode: str, prompt: tuple[int, ...], params: SamplingParams, version: str, seed: int
    ) -> SampledSequence:
        """One completion.

        Raises:
            Exception: what the sampler raised; all requests of that call get it.
        """
        answer: asyncio.Future[SampledSequence] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Asked(prompt, params, version, seed, answer))
        self._busy -= self._asked[episode] == 0
        self._asked[episode] += 1
        self._consider()
        try:
            return await answer
        finally:
            if episode in self._asked:
                self._asked[episode] -= 1
                self._busy += self._asked[episode] == 0

    def _consider(self) -> None:
        """Make the call soon if nobody else will ask before an answer comes, else in a while."""
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        if not self._busy:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_soon(self._call)
        elif self._timer is None:
            self._timer = loop.call_later(max(_LINGER_S, _LINGER_SHARE * self._call_s), self._call)

    def _call(self) -> None:
        asked = [one for one in self._waiting if not one.answer.done()]
        self._waiting, self._timer = [], None
        if asked:
            arguments = (asked, asyncio.get_running_loop())
            threading.Thread(target=self._sample, args=arguments, name="sampling", daemon=True).start()

    def _sample(self, asked: Sequence[_Asked], loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: one request for all that share a prompt."""
        groups: dict[tuple[object, ...], list[_Asked]] = {}
        for one in asked:
            groups.setdefault(one.shared, []).append(one)
        requests = [
            SampleRequest(
                group[0].prompt, group[0].params, group[0].version, tuple(one.seed for one in group)
            )
            for group in groups.values()
        ]
        began = monotonic()
        try:
            answers, error = self._sampler.sample(requests), None
        except BaseException as raised:  # noqa: BLE001 - it is raised again where it is waited for
            answers, error = [], raised
        self._call_s = monotonic() - began
        settled = [one for group in groups.values() for one in group]
        found = [sequence for sequences in answers for sequence in sequences]
        if error is None and len(found) != len(settled):
            error = OpenTinkerError(f"the sampler gave {len(found)} sequences; accepted: {len(settled)}")
        try:
            loop.call_soon_threadsafe(_settle, settled, found, error)
        except RuntimeError:
            return  # the loop was closed: nobody waits any more


def _settle(asked: Sequence[_Asked], found: Sequence[SampledSequence], error: BaseException | None) -> None:
    for index, one in enumerate(asked):
        if one.answer.done():
            continue
        if error is not None:
            one.answer.set_exception(error)
        else:
            one.answer.set_result(found[index])
