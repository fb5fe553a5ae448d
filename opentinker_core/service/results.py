"""Results of futures on their way to the database: written behind, many in one commit."""

import asyncio
import contextlib
import logging

from opentinker_core.service.records import Records
from opentinker_core.service.types import StoredResult

_LOG = logging.getLogger(__name__)

GROUP_SECONDS = 0.2
"""What is done within this time is written in one commit: all that a kill may lose."""
LARGEST = 16_000_000
"""Larger results are kept in memory alone."""
WAITING = 256_000_000
"""Bytes that may wait to be written; results beyond that are kept in memory alone."""


class ResultWriter:
    """See `futures.ResultStore`. Used on the event loop."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._waiting: list[tuple[str, str, str, StoredResult]] = []
        self._bytes = 0
        self._filled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to write."""
        self._task = asyncio.create_task(self._write_always())

    async def stop(self) -> None:
        """Write what waits."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._write()

    def keep(self, tenant: str, request_id: str, digest: str, result: StoredResult) -> None:
        """Take a result in, unless it is a sample, which can be asked for again; returns at once."""
        size = len(result.body)
        if ":sample:" in request_id or size > LARGEST or self._bytes + size > WAITING:
            return
        self._waiting.append((tenant, request_id, digest, result))
        self._bytes += size
        self._filled.set()

    async def find(self, tenant: str, request_id: str) -> tuple[str, StoredResult] | None:
        """The digest of the submission and its result."""
        for owner, known, digest, result in self._waiting:
            if (owner, known) == (tenant, request_id):
                return digest, result
        return await asyncio.to_thread(self._records.result, tenant, request_id)

    async def _write_always(self) -> None:
        while True:
            await self._filled.wait()
            await asyncio.sleep(GROUP_SECONDS)
            await asyncio.shield(self._write())

    async def _write(self) -> None:
        self._filled.clear()
        group, self._waiting, self._bytes = self._waiting, [], 0
        if not group:
            return
        try:
            await asyncio.to_thread(self._records.keep_results, group)
        except Exception:  # noqa: BLE001 - what failed is in memory still
            _LOG.exception("%d results could not be written; they are kept in memory alone", len(group))
