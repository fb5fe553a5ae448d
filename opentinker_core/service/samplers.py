"""An engine's sampler for the event loop: the same calls, awaited instead of waited for."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from opentinker_core.runtime.clients import SamplerClient
from opentinker_core.runtime.operations import BusyError, ClosedError
from opentinker_core.sampling.protocol import SampledSequence, Sampler, SampleRequest

Result = TypeVar("Result")

THREADS = 64
"""Calls at once of samplers that have a queue of their own."""
_RETRY_SECONDS = 0.05


class AsyncSampler:
    """Calls a `Sampler`: an engine's through its queue, any other on threads.

    Cancelling a call takes it out of the queue, or out of the running batch; one that runs on a thread ends
    by itself.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._queued = sampler if isinstance(sampler, SamplerClient) else None
        self._sampler = sampler
        self._threads = ThreadPoolExecutor(THREADS, "sampling") if self._queued is None else None

    async def refresh(self, version: str, snapshot_uri: str, digest: str) -> None:
        """See `Sampler.refresh`."""
        if (queued := self._queued) is not None:
            await self._through(queued, lambda: queued.submit_refresh(version, snapshot_uri, digest))
        else:
            await self._on_thread(lambda: self._sampler.refresh(version, snapshot_uri, digest))

    async def release(self, version: str) -> None:
        """See `Sampler.release`."""
        if (queued := self._queued) is not None:
            await self._through(queued, lambda: queued.submit_release(version))
        else:
            await self._on_thread(lambda: self._sampler.release(version))

    async def sample(self, request: SampleRequest) -> list[SampledSequence]:
        """See `Sampler.sample`; of one request."""
        if (queued := self._queued) is not None:
            return (await self._through(queued, lambda: queued.submit([request])))[0]
        return (await self._on_thread(lambda: self._sampler.sample([request])))[0]

    async def _through(self, queued: SamplerClient, submit: "Callable[[], Future[Result]]") -> Result:
        """Call `submit` as soon as the queue, which is everybody's, has room; give what comes of it."""
        while True:
            try:
                future = submit()
                break
            except BusyError:
                await asyncio.sleep(_RETRY_SECONDS)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if future.cancelled() and task is not None and not task.cancelling():
                raise ClosedError("the engine was closed before the request was done") from error
            queued.withdraw(future)
            raise

    async def _on_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
