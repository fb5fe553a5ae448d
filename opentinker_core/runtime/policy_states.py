"""The policy's state in the trainer and its published versions: reserve, publish, restore."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from opentinker_core.config.schema import TrainConfig
from opentinker_core.errors import UsageError
from opentinker_core.policies.types import Policy, PolicyVersion, Run
from opentinker_core.runtime import opening
from opentinker_core.runtime.protocol import RunEngine
from opentinker_core.runtime.workspace import Workspace
from opentinker_core.seeds import derive_seed
from opentinker_core.snapshots.protocol import Snapshot, SnapshotKind


class PolicyStates:
    """Keeps the trainer's state of one run in step with the versions the run publishes."""

    def __init__(
        self, workspace: Workspace, run: Run, config: TrainConfig, policy: Policy, engine: RunEngine
    ) -> None:
        self._workspace = workspace
        self._run = run
        self._config = config
        self._policy = policy
        self._trainer = engine.trainer
        self._attempt, self._forget = engine.attempt, engine.forget
        self._resident: str | None = None
        self._has_reference = False
        self._reserved: tuple[int, int] | None = None
        """The last step for which a number was reserved, and the number."""

    def first_version(self) -> PolicyVersion:
        """The last version the run published; if there is none, the state it starts from, published."""
        published = self._workspace.catalog.run_versions(self._run.run_id)
        if published:
            return published[-1]
        start = opening.starting_version(self._workspace.catalog, self._config)
        if start is not None:
            assert start.checkpoint is not None
            return self._record(
                self.reserve(0), 0, "init", {}, [], start.sampler, start.checkpoint, start.ref
            )
        seed = derive_seed(self._config.seed, "adapter")
        self._trainer.create(self._run.run_id, self._config.policy.lora, seed)
        return self.publish(0, "init", {}, [], parent=None)

    def restore(self, version: PolicyVersion) -> None:
        """Make the trainer hold exactly the state of `version`.

        Raises:
            UsageError: its checkpoint was pruned.
        """
        if self.holds(version):
            return
        self._trainer.load_checkpoint(self._run.run_id, self._fetch(version))
        self._resident = version.ref

    def holds(self, version: PolicyVersion) -> bool:
        """Whether the trainer's state is that of `version` right now."""
        return self._resident == version.ref

    def touched(self) -> None:
        """Say that the trainer's state is about to leave the restored version."""
        self._resident = None

    def reference(self) -> str:
        """The name by which the trainer has the weights of the version that the RL phase began with.

        Raises:
            UsageError: its checkpoint was pruned.
        """
        name = f"{self._run.run_id}-reference"
        if not self._has_reference:
            versions = self._workspace.catalog.run_versions(self._run.run_id)
            version = next(one for one in versions if one.step == self._config.sft_steps)
            self._trainer.load_checkpoint(name, self._fetch(version), with_optimizer=False)
            self._has_reference = True
        return name

    @property
    def _reference_step(self) -> int | None:
        rl = self._config.rl
        return self._config.sft_steps if rl is not None and rl.objective.needs_start else None

    def _fetch(self, version: PolicyVersion) -> Path:
        if version.checkpoint is None:
            raise UsageError(f"{version.ref}: its checkpoint was pruned; the run cannot go on from it")
        return self._workspace.snapshots.fetch(version.checkpoint.uri, version.checkpoint.digest)

    def reserve(self, step: int) -> int:
        """The number of the version that will be published after `step`."""
        if self._reserved is None or self._reserved[0] != step:
            number = self._workspace.catalog.reserve_version(self._policy.policy_id, self._run.run_id, step)
            self._reserved = (step, number)
        return self._reserved[1]

    def publish(
        self, step: int, phase: str, metrics: dict[str, float], trained_on: Sequence[str], parent: str | None
    ) -> PolicyVersion:
        """Publish the trainer's state as the version of `step`: snapshots first, then the record.

        The run's checkpoints that are neither recent nor needed by another version are deleted.
        """
        number = self.reserve(step)
        with tempfile.TemporaryDirectory(prefix="opentinker-") as scratch:
            written = Path(scratch) / "sampler", Path(scratch) / "checkpoint"
            self._trainer.publish_snapshot(self._run.run_id, written[0])
            self._trainer.save_checkpoint(self._run.run_id, written[1])
            sampler = self._upload(number, SnapshotKind.SAMPLER, written[0])
            checkpoint = self._upload(number, SnapshotKind.CHECKPOINT, written[1])
        catalog = self._workspace.catalog
        with catalog.transaction():
            version = self._record(number, step, phase, metrics, trained_on, sampler, checkpoint, parent)
            forgotten = catalog.prune_checkpoints(
                self._run.run_id, self._config.record.keep_checkpoints, self._reference_step
            )
        for snapshot in forgotten:
            self._forget(snapshot.uri, snapshot.digest)
            self._workspace.snapshots.delete(snapshot.uri)
        self._resident = version.ref
        return version

    def _upload(self, number: int, kind: SnapshotKind, directory: Path) -> Snapshot:
        # The id keeps stores shared by several catalogs apart; the name is for those who browse them.
        name = f"{self._policy.name[:40]}-{self._policy.policy_id[:8]}"
        key = (self._policy.tenant, name, f"v{number:06d}{self._attempt}", str(kind))
        return self._workspace.snapshots.publish(key, kind, directory)

    def _record(
        self,
        number: int,
        step: int,
        phase: str,
        metrics: dict[str, float],
        trained_on: Sequence[str],
        sampler: Snapshot,
        checkpoint: Snapshot,
        parent: str | None,
    ) -> PolicyVersion:
        return self._workspace.catalog.publish_version(
            self._policy.policy_id,
            number,
            sampler=sampler,
            checkpoint=checkpoint,
            parent=parent,
            run_id=self._run.run_id,
            step=step,
            phase=phase,
            metrics=metrics,
            trained_on=trained_on,
        )
