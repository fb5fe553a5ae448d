"""Training for tenants: requests of the Tinker API, in the order of each model's numbers, as futures."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.policies.tables import utc_now
from opentinker_core.policies.types import PolicyVersion, RunStatus
from opentinker_core.runtime.operations import Operation
from opentinker_core.service.errors import QuotaError, RefusedAgain, answer_for
from opentinker_core.service.new_models import NewModel, record
from opentinker_core.service.trained import Later, TrainedModel
from opentinker_core.service.types import (
    Model,
    ModelStatus,
    SamplerHandle,
    StoredResult,
)

if TYPE_CHECKING:
    from opentinker_core.service.core import Service

_LOG = logging.getLogger(__name__)

EARLY = 4096
"""Requests of one model that may wait for one before them."""

Start = Callable[[TrainedModel, list[Operation[Any]]], Awaitable[Later[StoredResult]]]
"""Asks the engine for what a request needs, and gives what waits for it."""


@dataclass
class _Turn:
    """A request that waits for its turn."""

    started: "asyncio.Future[Later[StoredResult]]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    asked: list[Operation[Any]] = field(default_factory=list)


class TrainingDesk:
    """The models in training, of all tenants. Used on the event loop."""

    def __init__(self, service: "Service") -> None:
        self._service = service
        self._models: dict[str, TrainedModel] = {}
        self._making: dict[str, str] = {}
        """Ids of models that are being made → tenant."""
        self._used: dict[str, datetime] = {}
        self._held: dict[str, int] = {}
        """Tenant → bytes of its requests that wait or run."""
        self._most_held = int(service.config.limits.waiting_mb * 10**6)

    def models(self) -> list[TrainedModel]:
        """Those in training."""
        return list(self._models.values())

    @property
    def resident(self) -> int:
        """Models in training."""
        return len(self._models)

    async def trains(self, tenant: str, session_id: str) -> bool:
        """Whether models were made, or are being made, in a session of the tenant."""
        mine = {key for key, owner in self._making.items() if owner == tenant}
        mine.update(key for key, one in self._models.items() if one.model.tenant == tenant)
        if any(key.startswith(f"{session_id}:") for key in mine):
            return True
        models = self._service.records.models
        return (await asyncio.to_thread(models, tenant, 1, 0, session_id))[1] > 0

    async def make(self, tenant: str, new: NewModel, answer: Callable[[Model], StoredResult]) -> str:
        """Make a model; gives the id of the request, whose result is `answer`.

        Raises:
            NotFoundError, Gone: the tenant has no such session, or it has ended.
            Forbidden: the tenant's quota of policies is reached.
            UsageError: the number was used for another request.
        """
        await self._service.sessions.check_live(tenant, new.session_id)
        request_id = f"{new.model_id}:0"
        futures = self._service.futures
        if futures.known(tenant, request_id, new.digest):
            return request_id
        if await self._stored(tenant, request_id) == new.digest:
            return request_id
        if futures.known(tenant, request_id, new.digest):  # it may have come while this one waited
            return request_id
        mine = [one for one in self._models.values() if one.model.tenant == tenant]
        making = sum(owner == tenant for owner in self._making.values())
        self._service.quotas.check_policies(tenant, len(mine) + making)
        hold = self._service.quotas.admit(tenant)
        self._making[new.model_id] = tenant

        async def work() -> StoredResult:
            return answer(await self._make(tenant, new))

        def ended() -> None:
            self._making.pop(new.model_id, None)
            hold.end()

        return futures.submit(tenant, request_id, "create_model", new.digest, work, on_end=ended)

    async def _make(self, tenant: str, new: NewModel) -> Model:
        service, records = self._service, self._service.records
        engine = await asyncio.to_thread(service.engine, new.served.name, tenant)
        await asyncio.to_thread(engine.check_targets, new.lora)
        directory = None
        if new.source is not None:
            directory = await service.saving.fetch(new.source)
        catalog = await asyncio.to_thread(service.catalog, tenant)
        policy, run = await service.write(lambda: record(catalog, new))
        model = await service.write(
            lambda: records.add_model(
                tenant,
                new.model_id,
                new.session_id,
                policy_id=policy.policy_id,
                run_id=run.run_id,
                base_model=new.served.name,
                lora=new.wire_lora,
                user_metadata=new.user_metadata,
                digest=new.digest,
            )
        )
        head = new.source.version.ref if new.source else None
        trained = TrainedModel(service, model, run, engine, head)
        try:
            if directory is None:
                await trained.create(new.lora, new.seed)
            else:
                await trained.load(directory, with_optimizer=new.with_optimizer)
            await service.sessions.check_live(tenant, new.session_id)  # it may have ended meanwhile
        except BaseException:
            await asyncio.shield(self._abandon(trained))
            raise
        self._models[new.model_id] = trained
        return model

    async def _abandon(self, trained: TrainedModel) -> None:
        model, service = trained.model, self._service
        await trained.unload()
        await service.write(
            lambda: service.records.set_model_status(model.tenant, model.model_id, ModelStatus.RELEASED)
        )

    async def model(self, tenant: str, model_id: str) -> Model:
        """The model of this id, in training or not.

        Raises:
            NotFoundError: the tenant has none.
        """
        trained = self.find(tenant, model_id)
        if trained is not None:
            return trained.model
        return await asyncio.to_thread(self._service.records.model, tenant, model_id)

    def find(self, tenant: str, model_id: str) -> TrainedModel | None:
        """A model in training; None: there is none of this id that is the tenant's."""
        found = self._models.get(model_id)
        return found if found is not None and found.model.tenant == tenant else None

    def sampled(self, sampler: SamplerHandle) -> PolicyVersion | None:
        """What a sampler samples from now; None: the base model."""
        trained = self.find(sampler.tenant, sampler.inflight_of) if sampler.inflight_of else None
        return sampler.version if trained is None else trained.inflight

    async def release(self, session_id: str, status: RunStatus) -> None:
        """Free the states of the models of a session that ended."""
        ended = [one for one in self._models.values() if one.model.session_id == session_id]
        for trained in ended:  # at once: nothing comes between
            del self._models[trained.model.model_id]
        for trained in ended:
            self._used.pop(trained.model.model_id, None)
            await trained.unload()
            for version in trained.superseded:
                await self._service.write(
                    partial(self._service.checkpoints.release, trained.model.tenant, version)
                )
            catalog, run_id = self._service.catalog(trained.model.tenant), trained.run_id
            await self._service.write(partial(catalog.update_run, run_id, status=status))

    def stop(self) -> None:
        """Launch nothing more."""
        for trained in self._models.values():
            trained.sequencer.close()

    async def note_used(self) -> None:
        """Record when models were last used."""
        used, self._used = self._used, {}
        await self._service.write(lambda: self._service.records.note_used(used))

    async def submit(
        self,
        tenant: str,
        model_id: str,
        seq: int,
        kind: str,
        digest: str,
        start: Start,
        *,
        tokens: int = 0,
        size_bytes: int = 0,
    ) -> str:
        """Take a request of a model; `start` is called when its turn comes. Gives the id of the request.

        Args:
            size_bytes: what is kept of it until it is done.

        Raises:
            NotFoundError: the tenant has no such model.
            UsageError: the number was used for another request, which nothing follows from.
            QuotaError: too much of the tenant is running; the number is free still.
        """
        futures, request_id = self._service.futures, f"{model_id}:{seq}"
        if futures.known(tenant, request_id, digest):
            return request_id
        trained = self.find(tenant, model_id)
        if trained is None:
            if await self._stored(tenant, request_id) == digest:
                return request_id
            error = await self._absence(tenant, model_id)
            return futures.submit(tenant, request_id, kind, digest, lambda: _raise(error))
        self._used[model_id] = utc_now()
        self._service.sessions.touch(tenant, trained.model.session_id)
        if seq in trained.refusals:
            raise RefusedAgain(trained.refusals[seq])
        if trained.sequencer.is_past(seq):
            if (found := await self._stored(tenant, request_id)) == digest:
                return request_id
            used = "was used before" if found is None else f"was used for another {kind} request"
            raise UsageError(f"seq_id: {seq} {used}; accepted: the next is {trained.sequencer.next}")
        if trained.sequencer.waiting >= EARLY:
            raise QuotaError(f"seq_id: {trained.sequencer.waiting} requests wait for one before them", 1.0)
        held = self._held.get(tenant, 0)
        if size_bytes and held + size_bytes > self._most_held and seq != trained.sequencer.next:
            raise QuotaError(f"limits.waiting_mb: {held / 1e6:.1f} MB of this tenant's requests wait", 1.0)
        hold = self._service.quotas.admit(tenant, tokens)
        turn = _Turn()
        self._held[tenant] = held + size_bytes

        def ended() -> None:
            hold.end()
            self._held[tenant] -= size_bytes

        async def launch() -> None:
            try:
                later = await start(trained, turn.asked)
            except Exception as error:  # noqa: BLE001 - it is the outcome of the request
                if not turn.started.done():
                    turn.started.set_exception(error)
            else:
                if not turn.started.done():
                    turn.started.set_result(later)

        known: list[ref[Operation[Any]]] = []
        """Weak, since operations hold their data, and the future is kept for long."""

        async def work() -> StoredResult:
            try:
                return await (await turn.started)()
            finally:
                known.extend(map(ref, turn.asked))

        futures.submit(
            tenant,
            request_id,
            kind,
            digest,
            work,
            on_failure_seen=lambda: trained.acknowledge([one for it in known if (one := it()) is not None]),
            on_end=ended,
        )
        trained.sequencer.put(seq, launch)
        return request_id

    def refuse(self, tenant: str, model_id: str, seq: int, error: Exception) -> None:
        """Note that a request was refused for good: its number is consumed, and refused again if repeated."""
        trained = self.find(tenant, model_id)
        if (
            trained is not None
            and not trained.sequencer.is_past(seq)
            and seq < trained.sequencer.next + EARLY
        ):
            trained.refusals[seq] = answer_for(error)
            if len(trained.refusals) > EARLY:
                del trained.refusals[min(trained.refusals)]
            trained.sequencer.consume(seq)

    async def absence(self, tenant: str, request_id: str) -> OpenTinkerError:
        """Why there is no future of this id.

        Raises:
            NotFoundError: there never was one for this tenant.
        """
        model_id, _, _ = request_id.rpartition(":")
        return await self._absence(tenant, model_id)

    async def _absence(self, tenant: str, model_id: str) -> OpenTinkerError:
        service = self._service
        model = await asyncio.to_thread(service.records.model, tenant, model_id)
        latest = await asyncio.to_thread(service.checkpoints.latest, tenant, model_id)
        resume = (
            f"resume from {latest.path} (create_training_client_from_state_with_optimizer)"
            if latest
            else "no checkpoint of it was saved: start again from the base model"
        )
        if model.status is ModelStatus.LOST:
            return UsageError(
                f"model_id: the server was restarted, and the state of {model_id} is lost; {resume}"
            )
        if model.status is ModelStatus.RELEASED:
            return UsageError(f"model_id: {model_id} was released when its session ended; {resume}")
        if not service.sessions.has(model.session_id):
            return UsageError(f"model_id: {model_id} is in training at another server; {resume}")
        return UsageError(f"request_id: the result is not kept any more; model {model_id} goes on")

    async def _stored(self, tenant: str, request_id: str) -> str | None:
        found = await self._service.stored_result(tenant, request_id)
        return None if found is None else found[0]


async def _raise(error: Exception) -> StoredResult:
    raise error


def json_result(value: Mapping[str, Any]) -> StoredResult:
    """A result that is answered as JSON."""
    return StoredResult(json.dumps(value).encode())
