"""Saving and loading models: under names, for one sampler, and by the server itself."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from opentinker_core.errors import NotFoundError, OpenTinkerError, UsageError
from opentinker_core.policies.types import PolicyVersion, RunStatus
from opentinker_core.service.checkpoints import parse_path
from opentinker_core.service.new_models import new_run
from opentinker_core.service.sampling import SampleTarget
from opentinker_core.service.trained import Later, TrainedModel
from opentinker_core.service.types import CheckpointKind, Model, NamedCheckpoint, SamplerHandle, UsageKind

if TYPE_CHECKING:
    from opentinker_core.service.core import Service

Result = TypeVar("Result")

_LOG = logging.getLogger(__name__)

AUTO_KEPT = 2
"""Checkpoints that the server made by itself which are kept a model."""
_AUTO = "auto-"


class SavingDesk:
    """See the module. Used on the event loop."""

    def __init__(self, service: "Service") -> None:
        self._service = service
        self._background: set[asyncio.Task[None]] = set()
        self._counting: dict[str, asyncio.Lock] = {}

    async def stop(self, models: Iterable[TrainedModel], timeout: float) -> None:
        """Make the last checkpoints, where the server makes any by itself, and wait for all of them."""
        every = self._service.config.auto_checkpoint_steps
        for trained in models if every is not None else ():
            if trained.launched_steps % (every or 1):
                await self._begin_auto(trained)
        if self._background:
            await asyncio.wait(list(self._background), timeout=timeout)

    async def save(
        self,
        trained: TrainedModel,
        kind: CheckpointKind,
        name: str | None,
        *,
        expires_at: datetime | None = None,
        user_metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
    ) -> Later[NamedCheckpoint]:
        """Save what a model is now, under a name; without one, under that of its step."""
        model, records, service = trained.model, self._service.records, self._service
        if name is not None and not overwrite:
            await asyncio.to_thread(records.check_free, model.tenant, model.model_id, kind, name)

        async def named(version: PolicyVersion) -> NamedCheckpoint:
            catalog = service.catalog(model.tenant)

            def record() -> NamedCheckpoint:
                # Deletions are written by this thread too: here the files are there, or they are not.
                now = catalog.version(version.ref)
                snapshot = now.checkpoint if kind is CheckpointKind.WEIGHTS else now.sampler
                if snapshot is None or not snapshot.size:
                    raise OpenTinkerError(f"{version.ref} was deleted while it got a name; save it again")
                label = name or f"v{version.number:06d}"
                replaced = records.find_checkpoint(model.tenant, model.model_id, kind, label)
                named = records.add_checkpoint(
                    model.tenant,
                    model.model_id,
                    kind,
                    label,
                    version=(version.policy_id, version.number),
                    size_bytes=snapshot.size,
                    user_metadata=user_metadata,
                    expires_at=expires_at,
                    overwrite=overwrite or name is None,
                )
                if replaced is not None and replaced.version.ref != version.ref:
                    service.checkpoints.unnamed(model.tenant, replaced.version, kind)
                return named

            checkpoint = await service.write(record)
            trained.count(UsageKind.CHECKPOINTS, 1)
            return checkpoint

        return await self._begin(trained, kind is CheckpointKind.WEIGHTS, named)

    async def _begin(
        self, trained: TrainedModel, with_checkpoint: bool, use: Callable[[PolicyVersion], Awaitable[Result]]
    ) -> Later[Result]:
        """Ask for a save, if the tenant may store more; `use` is what becomes of the version.

        Raises:
            Forbidden: the tenant's quota of storage is reached.
        """
        service, tenant = self._service, trained.model.tenant

        async def begun() -> Later[Result]:
            later = await trained.save(with_checkpoint=with_checkpoint)
            return trained.awaited(finish_of(later))

        def finish_of(later: Later[PolicyVersion]) -> Later[Result]:
            async def finish() -> Result:
                version = await later()
                try:
                    return await use(version)
                except OpenTinkerError:
                    trained.superseded.append(version)
                    raise

            return finish

        if not service.quotas.of(tenant).storage_gb:
            return await begun()
        async with self._counting.setdefault(tenant, asyncio.Lock()):  # one after the other, each counted
            for other in service.training.models():
                if other.model.tenant == tenant:
                    await other.saved()
            stored = await asyncio.to_thread(service.records.stored_bytes, tenant)
            service.quotas.check_storage(tenant, stored)
            return await begun()

    async def save_sampler(
        self, trained: TrainedModel, sampler_id: str, *, inflight: bool = False
    ) -> Later[str]:
        """Save what a model is now for one sampler, without a name.

        Args:
            inflight: the sampler follows what later such saves save, and so do those of earlier ones.
        """
        model, service = trained.model, self._service

        async def used(version: PolicyVersion) -> str:
            def record() -> SamplerHandle:
                self._check_there(model.tenant, version)
                return service.records.add_sampler(
                    model.tenant,
                    sampler_id,
                    model.session_id,
                    base_model=model.base_model,
                    version=(version.policy_id, version.number),
                    inflight_of=model.model_id if inflight else None,
                )

            sampler = await service.write(record)
            if inflight and sampler.version is not None:
                trained.moved(sampler.version)
                await self._release_superseded(trained)
            if sampler.version is not None and sampler.version.ref != version.ref:  # it was there already
                trained.superseded.append(version)
            return sampler_id

        return await self._begin(trained, False, used)

    def _check_there(self, tenant: str, version: PolicyVersion) -> None:
        """Raise OpenTinkerError if a version lost its weights; called by the thread that deletes."""
        if not self._service.catalog(tenant).version(version.ref).sampler.size:
            raise OpenTinkerError(f"{version.ref} was deleted while it got a sampler; save it again")

    async def _release_superseded(self, trained: TrainedModel) -> None:
        """Delete the weights that inflight samplers have left, unless they are being sampled from."""
        service, model = self._service, trained.model
        users = service.sampling.leases.users
        for version in list(trained.superseded):
            if not users.get(SampleTarget(model.base_model, version).subject):
                trained.superseded.remove(version)
                await service.write(partial(service.checkpoints.release, model.tenant, version))

    async def load(self, trained: TrainedModel, path: str, *, with_optimizer: bool) -> None:
        """Replace the state of a model by a checkpoint's; a new run of its policy begins.

        Raises:
            UsageError: the checkpoint is none of this model's base model and LoRA config.
        """
        service, model = self._service, trained.model
        await trained.saved()  # the checkpoint may be one that is being saved
        source = await self.loadable(model.tenant, path)
        catalog = await asyncio.to_thread(service.catalog, model.tenant)
        mine = await asyncio.to_thread(catalog.policy, model.policy_name)
        theirs = await asyncio.to_thread(catalog.policy, source.version.policy_name)
        if (mine.base_model, mine.lora) != (theirs.base_model, theirs.lora):
            raise UsageError(
                f"path: {path:.200} is of {theirs.base_model} with rank {theirs.lora.rank}, this model of "
                f"{mine.base_model} with rank {mine.lora.rank}; accepted: a checkpoint of the same, or a new "
                "model made from it"
            )
        directory = await self.fetch(source)
        config = {"load_weights": {"path": path, "optimizer": with_optimizer, "source": source.version.ref}}
        before = trained.run_id
        # All that may fail comes before the state is replaced, or else what is saved next would be taken for
        # a version of the run before.
        run = await service.write(lambda: new_run(catalog, mine, config))
        try:
            await service.write(partial(service.records.set_run, model.tenant, model.model_id, run.run_id))
            await trained.load(directory, with_optimizer=with_optimizer)
        except BaseException:
            await self._note(partial(catalog.update_run, run.run_id, status=RunStatus.FAILED))
            await self._note(partial(service.records.set_run, model.tenant, model.model_id, before))
            raise
        trained.loaded(run, source.version.ref)
        await self._note(partial(catalog.update_run, before, status=RunStatus.COMPLETED))

    async def _note(self, change: Callable[[], object]) -> None:
        """Write what is true already; a database that does not take it leaves it untold."""
        try:
            await self._service.write(change)
        except OpenTinkerError as error:
            _LOG.warning("not recorded: %s", error)

    async def loadable(self, tenant: str, path: str) -> NamedCheckpoint:
        """The checkpoint at a path, from which training can be gone on with.

        Raises:
            UsageError: it is no training checkpoint, or is gone.
        """
        _, kind, _ = parse_path(path)
        if kind is not CheckpointKind.WEIGHTS:
            raise UsageError(f"path: {path:.200} holds no training state; accepted: tinker://.../weights/...")
        source = await asyncio.to_thread(self._service.checkpoints.resolve, tenant, path)
        if source.version.checkpoint is None:
            raise NotFoundError(f"path: the files of {path:.200} were pruned; accepted: another checkpoint")
        return source

    async def step_launched(self, trained: TrainedModel) -> None:
        """Make a checkpoint where the config asks for it: called when the engine was asked for a step."""
        every = self._service.config.auto_checkpoint_steps
        if every is not None and trained.launched_steps % every == 0:
            await self._begin_auto(trained)

    async def _begin_auto(self, trained: TrainedModel) -> None:
        name = f"{_AUTO}{trained.launched_steps:06d}"
        try:
            later = await self.save(trained, CheckpointKind.WEIGHTS, name, overwrite=True)
        except OpenTinkerError as error:
            _LOG.warning("no checkpoint %s of %s: %s", name, trained.model.model_id, error)
            return
        task = asyncio.get_running_loop().create_task(self._keep_auto(trained.model, name, later))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _keep_auto(self, model: Model, name: str, later: Later[NamedCheckpoint]) -> None:
        weights, records = CheckpointKind.WEIGHTS, self._service.records
        try:
            await later()
            mine, _ = await asyncio.to_thread(records.checkpoints, model.tenant, model.model_id)
            old = [one.name for one in mine if one.kind is weights and one.name.startswith(_AUTO)][AUTO_KEPT:]
            for name in old:
                delete = self._service.checkpoints.delete
                await self._service.write(partial(delete, model.tenant, model.model_id, weights, name))
        except OpenTinkerError as error:
            _LOG.warning("no checkpoint %s of %s: %s", name, model.model_id, error)

    async def fetch(self, source: NamedCheckpoint) -> Path:
        """The local directory of a training checkpoint."""
        snapshot = source.version.checkpoint
        if snapshot is None:
            raise NotFoundError(f"path: the files of {source.path} were pruned; accepted: another checkpoint")
        return await asyncio.to_thread(self._service.workspace.snapshots.fetch, snapshot.uri, snapshot.digest)
