"""One model in training: its operations on the shared engine, in order, and the versions it publishes."""

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from opentinker_core.config.schema import LoRAConfig, OptimizerConfig
from opentinker_core.policies.types import PolicyVersion, Run
from opentinker_core.runtime.engine import Engine
from opentinker_core.runtime.operations import BusyError, Kind, Operation
from opentinker_core.service.errors import Answer
from opentinker_core.service.sequencer import Sequencer
from opentinker_core.service.types import Model, UsageKind
from opentinker_core.snapshots.protocol import Snapshot, SnapshotKind
from opentinker_core.training.trainer import ForwardBackward, PolicyBatch

if TYPE_CHECKING:
    from opentinker_core.service.core import Service

Result = TypeVar("Result")
Later = Callable[[], Awaitable[Result]]
"""The result of something that the engine was asked for; others can be asked for meanwhile."""

_RETRY_SECONDS = 0.02
_REMEMBERED = 64
"""Steps of which the published version is remembered."""


@dataclass(eq=False)
class _Progress:
    """What was done of one run of the model. A load begins another while saves of this one may go on."""

    run: Run
    head: str | None
    """The last version, `name@number`."""
    steps: int = 0
    """Optimizer steps that were taken; changed by the engine's thread alone."""
    phase: str = "init"
    metrics: dict[str, float] = field(default_factory=dict)
    published: dict[int, PolicyVersion] = field(default_factory=dict)
    """By step, what was published."""

    def stepped(self, future: "Future[Any]") -> None:
        """Count a step that was taken."""
        if not future.cancelled() and future.exception() is None:
            self.steps += 1

    def remember(self, step: int, version: PolicyVersion) -> None:
        """Note what was published of a step."""
        self.head = version.ref if step not in self.published else self.head
        self.published[step] = version
        while len(self.published) > _REMEMBERED:
            del self.published[next(iter(self.published))]


class TrainedModel:
    """See the module. The engine holds the state under the policy's id. Used on the event loop."""

    def __init__(self, service: "Service", model: Model, run: Run, engine: Engine, head: str | None) -> None:
        """`head`: the version that the state comes from, `name@number`; None: a fresh adapter."""
        self.model, self.engine = model, engine
        self.sequencer = Sequencer()
        self.refusals: dict[int, Answer] = {}
        """By number, how a request was refused for good."""
        self.launched_steps = 0
        """Optimizer steps that the engine was asked for."""
        self.inflight: PolicyVersion | None = None
        """What its inflight samplers sample from."""
        self.superseded: list[PolicyVersion] = []
        """What they sampled from before, and may still; and what was saved for nobody in the end."""
        self._service = service
        self._progress = _Progress(run, head)
        self._publishing = asyncio.Lock()
        self._saves: set[asyncio.Future[None]] = set()
        """One for each save that was asked for and has not come to its end."""

    @property
    def subject(self) -> str:
        """The name by which the engine knows the state."""
        return self.model.policy_id

    @property
    def run_id(self) -> str:
        """The run that trains it now."""
        return self._progress.run.run_id

    async def create(self, lora: LoRAConfig, seed: int) -> None:
        """Give the model a fresh state."""
        await asyncio.wrap_future(await self._submitted(Kind.CREATE, (lora, seed)))

    async def load(self, directory: Path, *, with_optimizer: bool) -> None:
        """Give the model the state of a checkpoint directory."""
        await asyncio.wrap_future(await self._submitted(Kind.LOAD, (directory, with_optimizer)))

    def loaded(self, run: Run, head: str) -> None:
        """Note that what follows is of another run, which goes on from the version `head`."""
        self._progress = _Progress(run, head)

    async def unload(self) -> None:
        """Free the state."""
        self.sequencer.close()
        for save in list(self._saves):  # one whose request was just launched may never be called
            self._end(save)
        await asyncio.wrap_future(await self._submitted(Kind.UNLOAD))

    async def forward_backward(
        self, batch: PolicyBatch, asked: list[Operation[Any]]
    ) -> Later[ForwardBackward]:
        """Ask for gradients; what was asked for is added to `asked`."""
        progress = self._progress
        progress.phase = "sft" if batch.datums[0].weights_N is not None else "rl"
        future = await self._submitted(Kind.FORWARD_BACKWARD, batch, _tokens(batch), asked=asked)

        async def finish() -> ForwardBackward:
            result: ForwardBackward = await asyncio.wrap_future(future)
            progress.metrics["loss"] = result.loss
            self.count(UsageKind.TRAINING, _tokens(batch))
            return result

        return finish

    async def forward(self, batch: PolicyBatch, asked: list[Operation[Any]]) -> Later[list[Any]]:
        """Ask for logprobs alone."""
        future = await self._submitted(Kind.FORWARD, batch.datums, _tokens(batch), asked=asked)

        async def finish() -> list[Any]:
            logprobs: list[Any] = await asyncio.wrap_future(future)
            self.count(UsageKind.TRAINING, _tokens(batch))
            return logprobs

        return finish

    async def optim_step(
        self, config: OptimizerConfig, asked: list[Operation[Any]]
    ) -> Later[dict[str, float]]:
        """Ask for an optimizer step."""
        future = await self._submitted(Kind.OPTIM_STEP, config, asked=asked)
        progress = self._progress
        future.add_done_callback(progress.stepped)
        self.launched_steps += 1

        async def finish() -> dict[str, float]:
            metrics: dict[str, float] = await asyncio.wrap_future(future)
            progress.metrics |= {**metrics, "learning_rate": config.learning_rate}
            return metrics

        return finish

    async def save(self, *, with_checkpoint: bool) -> Later[PolicyVersion]:
        """Ask for the state as it is behind what was asked for before; published when the engine gave it."""
        folder = Path(tempfile.mkdtemp(dir=self._service.scratch))
        progress, steps = self._progress, list[int]()
        futures = [await self._submitted(Kind.PUBLISH, folder / "sampler")]
        if with_checkpoint:
            futures.append(await self._submitted(Kind.SAVE, folder / "checkpoint"))
        # By the engine's thread, between the steps before and those after.
        futures[0].add_done_callback(lambda _: steps.append(progress.steps))

        async def finish() -> PolicyVersion:
            try:
                for future in futures:
                    await asyncio.wrap_future(future)
                async with self._publishing:
                    return await self._publish(progress, folder, steps[0], with_checkpoint)
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

        return finish

    def count(self, kind: UsageKind, amount: int) -> None:
        """Count what was done for the session."""
        model = self.model
        self._service.usage.add(
            model.tenant, kind, amount, base_model=model.base_model, session_id=model.session_id
        )

    def moved(self, version: PolicyVersion) -> None:
        """Note what the inflight samplers sample from from now on."""
        before, self.inflight = self.inflight, version
        if before is not None and before.ref != version.ref:
            self.superseded.append(before)

    def awaited(self, save: Later[Result]) -> Later[Result]:
        """The same save, which `saved` waits for from now on; it must be called."""
        end = asyncio.get_running_loop().create_future()
        self._saves.add(end)

        async def finish() -> Result:
            try:
                return await save()
            finally:
                self._end(end)

        return finish

    def _end(self, save: asyncio.Future[None]) -> None:
        self._saves.discard(save)
        if not save.done():
            save.set_result(None)

    async def saved(self) -> None:
        """Wait for the ends of all saves that were asked for."""
        while self._saves:
            await asyncio.wait(list(self._saves))

    def acknowledge(self, asked: list[Operation[Any]]) -> None:
        """Note that the client knows that one of these failed (see `runtime.chains`)."""
        for operation in asked:
            self.engine.shared.scheduler.acknowledge(operation)

    async def _submitted(
        self, kind: Kind, payload: Any = None, tokens: int = 0, asked: list[Operation[Any]] | None = None
    ) -> "Future[Any]":
        """Hand an operation to the engine as soon as its queue, which is everybody's, has room."""
        operation = Operation[Any](
            kind, self.model.tenant, self.subject, payload, tokens=tokens, size_bytes=29 * tokens
        )
        while True:
            try:
                future = self.engine.shared.scheduler.submit(operation)
                break
            except BusyError:
                await asyncio.sleep(_RETRY_SECONDS)
        if asked is not None:
            asked.append(operation)
        return future

    async def _publish(
        self, progress: _Progress, folder: Path, step: int, with_checkpoint: bool
    ) -> PolicyVersion:
        """The version of a step, with a checkpoint if asked for; published once."""
        service, catalog = self._service, self._service.catalog(self.model.tenant)
        model, run_id = self.model, progress.run.run_id
        known = progress.published.get(step)
        if known is not None:  # its checkpoint may have been deleted
            known = await asyncio.to_thread(catalog.version, known.ref)
        if known is not None and (known.checkpoint is not None or not with_checkpoint):
            return known
        number = (
            known.number
            if known
            else await service.write(lambda: catalog.reserve_version(model.policy_id, run_id, step))
        )
        checkpoint = None
        if with_checkpoint:
            kind = SnapshotKind.CHECKPOINT
            checkpoint = await asyncio.to_thread(self._upload, number, kind, folder / "checkpoint")
        if known is None:
            sampler = await asyncio.to_thread(self._upload, number, SnapshotKind.SAMPLER, folder / "sampler")
            head, metrics = progress.head, dict(progress.metrics)
            phase = progress.phase if step else "init"
            version = await service.write(
                lambda: catalog.publish_version(
                    model.policy_id,
                    number,
                    sampler=sampler,
                    checkpoint=checkpoint,
                    parent=head,
                    run_id=run_id,
                    step=step,
                    phase=phase,
                    metrics=metrics,
                )
            )
        else:
            assert checkpoint is not None
            added = checkpoint
            version = await service.write(lambda: catalog.add_checkpoint(model.policy_id, number, added))
        progress.remember(step, version)
        return version

    def _upload(self, number: int, kind: SnapshotKind, directory: Path) -> Snapshot:
        name = f"{self.model.policy_name[:40]}-{self.model.policy_id[:8]}"
        key = (self.model.tenant, name, f"v{number:06d}", str(kind))
        return self._service.workspace.snapshots.publish(key, kind, directory)


def _tokens(batch: PolicyBatch) -> int:
    return sum(len(datum) for datum in batch.datums)
