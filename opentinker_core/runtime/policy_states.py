"""The policy's state in the trainer and its published versions: restore, publish, prune."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from opentinker_core.config.schema import TrainConfig
from opentinker_core.errors import UsageError
from opentinker_core.policies.types import Policy, PolicyVersion, Run
from opentinker_core.runtime import opening
from opentinker_core.runtime.engine import Engine
from opentinker_core.runtime.workspace import Workspace
from opentinker_core.seeds import derive_seed
from opentinker_core.snapshots.protocol import Snapshot, SnapshotKind


class PolicyStates:
    """Keeps the trainer's state of one run in step with the versions the run publishes."""

    def __init__(
        self, workspace: Workspace, run: Run, config: TrainConfig, policy: Policy, engine: Engine
    ) -> None:
        self._workspace = workspace
        self._run = run
        self._config = config
        self._policy = policy
        self._trainer = engine.trainer
        self._resident: str | None = None

    def first_version(self) -> PolicyVersion:
        """The last version the run published; if there is none, the state it starts from, published."""
        published = self._workspace.catalog.run_versions(self._run.run_id)
        if published:
            return published[-1]
        start = opening.starting_version(self._workspace.catalog, self._config)
        if start is not None:
            assert start.checkpoint is not None
            number = self._workspace.catalog.reserve_version(self._policy.policy_id, self._run.run_id, 0)
            return self._record(number, 0, "init", {}, [], start.sampler, start.checkpoint, start.ref)
        seed = derive_seed(self._config.seed, "adapter")
        self._trainer.create(self._run.run_id, self._config.policy.lora, seed)
        return self.publish(0, "init", {}, [], parent=None)

    def restore(self, version: PolicyVersion) -> None:
        """Make the trainer hold exactly the state of `version`.

        Raises:
            UsageError: its checkpoint was pruned.
        """
        if self._resident == version.ref:
            return
        if version.checkpoint is None:
            raise UsageError(f"{version.ref}: its checkpoint was pruned; the run cannot go on from it")
        directory = self._workspace.snapshots.fetch(version.checkpoint.uri, version.checkpoint.digest)
        self._trainer.load_checkpoint(self._run.run_id, directory)
        self._resident = version.ref

    def touched(self) -> None:
        """Say that the trainer's state is about to leave the restored version."""
        self._resident = None

    def publish(
        self, step: int, phase: str, metrics: dict[str, float], trained_on: Sequence[str], parent: str | None
    ) -> PolicyVersion:
        """Publish the trainer's state as the version of `step`: snapshots first, then the record."""
        number = self._workspace.catalog.reserve_version(self._policy.policy_id, self._run.run_id, step)
        with tempfile.TemporaryDirectory(prefix="opentinker-") as scratch:
            sampler, checkpoint = Path(scratch) / "sampler", Path(scratch) / "checkpoint"
            self._trainer.publish_snapshot(self._run.run_id, sampler)
            self._trainer.save_checkpoint(self._run.run_id, checkpoint)
            version = self._record(
                number,
                step,
                phase,
                metrics,
                trained_on,
                self._upload(number, SnapshotKind.SAMPLER, sampler),
                self._upload(number, SnapshotKind.CHECKPOINT, checkpoint),
                parent,
            )
        self._resident = version.ref
        return version

    def prune(self) -> None:
        """Delete the run's checkpoints that are neither recent nor needed by another version."""
        catalog = self._workspace.catalog
        for version in catalog.prunable_checkpoints(self._run.run_id, self._config.record.keep_checkpoints):
            assert version.checkpoint is not None
            # Forgotten first: a crash in between leaves a file too many, not a version without its file.
            catalog.forget_checkpoint(version)
            self._workspace.snapshots.delete(version.checkpoint.uri)

    def _upload(self, number: int, kind: SnapshotKind, directory: Path) -> Snapshot:
        # The id keeps stores shared by several catalogs apart; the name is for those who browse them.
        name = f"{self._policy.name[:40]}-{self._policy.policy_id[:8]}"
        key = (self._policy.tenant, name, f"v{number:06d}", str(kind))
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
