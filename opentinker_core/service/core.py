"""The service: base models with their engines, the desks that serve tenants, and what is kept of it."""

import asyncio
import contextlib
import logging
import secrets
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from opentinker_core.config.serving import ServeConfig
from opentinker_core.config.settings import Settings
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.tables import utc_now
from opentinker_core.policies.types import RunStatus
from opentinker_core.runtime.engine import Engine, open_engine
from opentinker_core.runtime.scheduler_statistics import Statistics
from opentinker_core.runtime.workspace import Workspace
from opentinker_core.service import holdings
from opentinker_core.service.checkpoints import Checkpoints
from opentinker_core.service.errors import NotFound
from opentinker_core.service.futures import FutureBook
from opentinker_core.service.metrics import Metrics
from opentinker_core.service.quotas import Quotas
from opentinker_core.service.records import Records
from opentinker_core.service.results import ResultWriter
from opentinker_core.service.sampling import SamplingDesk
from opentinker_core.service.saving import SavingDesk
from opentinker_core.service.sessions import Sessions
from opentinker_core.service.training import TrainingDesk
from opentinker_core.service.types import StoredResult
from opentinker_core.service.usage import UsageMeter

_LOG = logging.getLogger(__name__)

Result = TypeVar("Result")

SWEEP_SECONDS = 5.0
RESULT_HOURS = 1
"""How long the database keeps results of futures, if their session does not end before."""
EMPTY_SESSION_DAYS = 7
"""How long the database keeps a session that ended and left nothing behind."""
SAVING = "saving"
"""The folder below `home/serve` in which states are written before they are published."""


@dataclass(frozen=True)
class ServedModel:
    """A base model as clients see it."""

    name: str
    model: str
    """As policies record it: what `models.source.resolve` finds."""
    context: int
    """Tokens of a sequence at most."""
    tokenizer: str
    """What a client loads the tokenizer by."""


class Service:
    """Everything that a server serves. `start` and `stop` are called on its event loop."""

    def __init__(self, config: ServeConfig, settings: Settings | None = None) -> None:
        """Opens the database; models are loaded by `start`.

        Raises:
            OpenTinkerError: the database cannot be opened.
        """
        self.config = config
        self.settings = settings or Settings()
        self.metrics = Metrics()
        self.quotas = Quotas(config.quotas)
        self.records = Records(self.settings.resolved_catalog_url, _installation(self.settings.home))
        self.workspace = Workspace(self.settings)
        self.checkpoints = Checkpoints(self.records, self.catalog, lambda: self.workspace.snapshots)
        self.usage = UsageMeter(self.records.add_usage)
        self._results = ResultWriter(self.records)
        self.futures = FutureBook(self._results)
        self.sampling = SamplingDesk(self.engine)
        self.training = TrainingDesk(self)
        self.saving = SavingDesk(self)
        self.sessions = Sessions(self)
        self._catalogs = {self.settings.tenant: self.workspace.catalog}
        self._engines: dict[tuple[str, str], Engine] = {}
        self._models: dict[str, ServedModel] = {}
        self._writes = ThreadPoolExecutor(1, "opentinker-records")
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the models and take up what the last server left."""
        for served in self.config.models:
            engine = await asyncio.to_thread(self._open, served.model, self.settings.tenant)
            self._engines[served.served_name, self.settings.tenant] = engine
            path = str(engine.source.path)
            tokenizer = served.tokenizer or (path if path.count("/") > 2 else served.model)
            self._models[served.served_name] = ServedModel(
                served.served_name, engine.source.name, engine.max_context, tokenizer
            )
            _LOG.info("loaded %s", served.served_name)
        await asyncio.to_thread(shutil.rmtree, self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        if lost := await self.write(self.records.mark_lost):
            _LOG.warning("%d models were in training when the last server ended", len(lost))
        for model in lost:
            end = partial(self.catalog(model.tenant).update_run, model.run_id, status=RunStatus.FAILED)
            await self.write(partial(end, error="the server ended"))
        await self.sessions.start()
        self._results.start()
        self._sweeper = asyncio.create_task(self._sweep_always())
        self.metrics.watch(self.statistics)
        holdings.show(self.metrics, self)

    async def stop(self) -> None:
        """End what runs, and keep what is done; call it when nothing more is asked."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        self.training.stop()
        await self.saving.stop(self.training.models(), self.config.drain_timeout_s)
        self.futures.close()
        await self.sessions.stop()
        await self._results.stop()
        await self.write(self.usage.keep)
        engines = {id(engine.shared): engine.shared for engine in self._engines.values()}
        for shared in engines.values():
            await asyncio.to_thread(shared.close)
        self._writes.shutdown()
        self.workspace.catalog.close()
        self.records.close()

    def catalog(self, tenant: str) -> Catalog:
        """A tenant's view of the catalog."""
        if tenant not in self._catalogs:
            self._catalogs[tenant] = self.workspace.catalog.seen_by(tenant)
        return self._catalogs[tenant]

    def models(self) -> list[ServedModel]:
        """The base models, in the order of the config."""
        return list(self._models.values())

    def model(self, name: str) -> ServedModel:
        """The base model of this name.

        Raises:
            NotFound: it is not served.
        """
        if name not in self._models:
            raise NotFound(f"base_model: {name!r:.100} is not served; accepted: {', '.join(self._models)}")
        return self._models[name]

    def engine(self, base_model: str, tenant: str) -> Engine:
        """A tenant's view of the engine of a base model, by the name that clients use.

        Raises:
            NotFound: it is not served.
        """
        served = self.model(base_model)
        key = (base_model, tenant)
        if key not in self._engines:
            self._engines[key] = self._open(served.model, tenant)
        return self._engines[key]

    def statistics(self) -> Mapping[str, Statistics]:
        """Of each base model what its engine did."""
        tenant = self.settings.tenant
        return {name: self._engines[name, tenant].statistics() for name in self._models}

    async def stored_result(self, tenant: str, request_id: str) -> tuple[str, StoredResult] | None:
        """The digest of a submission and its result, from before a restart or from long ago."""
        return await self._results.find(tenant, request_id)

    async def read(self, query: Callable[[], Result]) -> Result:
        """Do something that waits for the database or the disk and changes nothing."""
        return await asyncio.to_thread(query)

    async def write(self, change: Callable[[], Result]) -> Result:
        """Do something that waits for the database, one such thing after the other."""
        return await asyncio.get_running_loop().run_in_executor(self._writes, change)

    @cached_property
    def scratch(self) -> Path:
        """Where states are written before they are published; emptied when the server starts."""
        return self.settings.home / "serve" / SAVING

    def _open(self, model: str, tenant: str) -> Engine:
        home, fetch = self.settings.home, self.workspace.snapshots.fetch
        return open_engine(model, self.config.runtime, home, fetch, tenant)

    async def _sweep_always(self) -> None:
        swept_results: datetime | None = None
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self.config.session_timeout_s / 4))
            try:
                await self.sessions.sweep()
                await self.training.note_used()
                await self.write(self.usage.keep)
                self.futures.sweep()
                await self.write(self.checkpoints.delete_expired)
                now = utc_now()
                if swept_results is None or now - swept_results > timedelta(minutes=5):
                    before, swept_results = now - timedelta(hours=RESULT_HOURS), now
                    await self.write(partial(self.records.forget_results, before=before))
                    kept = timedelta(days=self.config.audit_days)
                    await self.write(partial(self.records.forget_usage, now - kept))
                    empty = now - timedelta(days=EMPTY_SESSION_DAYS)
                    await self.write(partial(self.records.forget_sessions, empty))
            except Exception:  # noqa: BLE001 - nothing may end the sweep
                _LOG.exception("the sweep failed; it is tried again")


def _installation(home: Path) -> str:
    """The name by which this installation's sessions are told from those of others on the same database."""
    file = home / "serve" / "installation"
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        new = file.with_suffix(".new")
        new.write_text(secrets.token_hex(8), encoding="ascii")
        new.replace(file)
    return file.read_text(encoding="ascii")
