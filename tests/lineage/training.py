"""Plays training runs against the real catalog and trajectory store, without a model."""

from dataclasses import dataclass, field
from pathlib import Path

from opentinker_core.config.schema import EnvironmentConfig, PolicyConfig, RecordConfig, RLPhase, TrainConfig
from opentinker_core.config.settings import Settings
from opentinker_core.digests import digest_json
from opentinker_core.policies.types import Evaluation, PolicyVersion, Run, RunStatus, TrajectorySet
from opentinker_core.runtime.workspace import Workspace
from opentinker_core.snapshots.protocol import Snapshot, SnapshotKind
from opentinker_core.trajectories.fsm import TrajectoryBuilder
from opentinker_core.trajectories.types import EndReason, StopReason, Trajectory


def open_workspace(home: Path, tracking_uri: str = "", **settings: str) -> Workspace:
    home.mkdir(exist_ok=True)
    return Workspace(Settings(home=home, mlflow_tracking_uri=tracking_uri, **settings))


def episode(
    index: int, version: str, *, turns: int = 1, failed: bool = False, text: bool = True
) -> Trajectory:
    """An episode of `turns` turns of two tokens each."""
    builder = TrajectoryBuilder(
        trajectory_id=f"s00001-g{index}-m0", agent="agent", environment="arithmetic", seed=index, group=index
    )
    logprobs = [0.0, 0.0] if version == "demonstration" else [-0.5, -0.25]
    for turn in range(turns):
        builder.observed([1, 2, 10 + turn])
        builder.generated([20 + turn, 3], logprobs, version, StopReason.STOP)
        if not (failed and turn == turns - 1):
            builder.rewarded(float(index % 2))
    info = {"prompt": f"{index} + 1 =", "actions": [f"answer {turn}" for turn in range(turns)]}
    end = EndReason.FAILED if failed else EndReason.DONE
    return builder.terminate(end, info if text else {})


def snapshot(kind: SnapshotKind, name: str) -> Snapshot:
    return Snapshot(kind, f"file:///snapshots/{name}/{kind}", digest_json([name, kind]), 1000)


@dataclass
class Training:
    """One run of one policy; version 0 is published at once, as a run does."""

    workspace: Workspace
    policy: str = "adder"
    name: str = "adder-rl"
    trace_episodes: int = 1
    mlflow: bool = True
    flow_run_id: str | None = None
    start: str | None = None
    """`name@number` to start from; None: the base model."""
    run: Run = field(init=False)
    version: PolicyVersion = field(init=False)

    def __post_init__(self) -> None:
        config = TrainConfig(
            name=self.name,
            policy=PolicyConfig(name=self.policy, start=self.start or "base"),
            environment=EnvironmentConfig(id="arithmetic"),
            rl=RLPhase(steps=100),
            record=RecordConfig(trace_episodes=self.trace_episodes, mlflow=self.mlflow),
        )
        values = config.model_dump(mode="json")
        catalog = self.workspace.catalog
        own = self.start is None or self.start.startswith(f"{self.policy}@")
        policy = catalog.create_policy(
            self.policy, config.policy.base_model, config.policy.lora, forked_from=None if own else self.start
        )
        self.run = catalog.start_run(
            self.name, policy.policy_id, values, digest_json(values), "abc123", self.flow_run_id
        )
        self.version = self._publish(0, "init", {}, [], self.start)

    def step(self, *, turns: int = 1, episodes: int = 4) -> PolicyVersion:
        """One RL step: sample a set with the latest version, train, publish the next version."""
        number = self.version.step + 1
        played = [episode(index, self.version.ref, turns=turns) for index in range(episodes)]
        sampled = self.sampled(number, "train", played, self.version.ref)
        metrics = {"loss": -0.1 * number, "reward_mean": 0.5, "grad_norm": 1.0}
        self.version = self._publish(number, "rl", metrics, [sampled.set_id], self.version.ref)
        return self.version

    def evaluate(self, subject: str, mean: float) -> Evaluation:
        sampled = self.sampled(self.version.step, "evaluation", [episode(7, subject)], subject)
        result = Evaluation(
            subject, self.run.run_id, self.version.step, "arithmetic", mean, mean - 0.1, mean + 0.1, 64,
            sampled,
        )  # fmt: skip
        return self.workspace.catalog.add_evaluation(result)

    def finish(self, status: RunStatus = RunStatus.COMPLETED, error: str | None = None) -> None:
        self.workspace.catalog.update_run(self.run.run_id, status=status, error=error)

    def sampled(self, step: int, purpose: str, played: list[Trajectory], by: str) -> TrajectorySet:
        key = (self.run.run_id, f"{step:05d}-{purpose}-{by.replace('@', '-')}")
        stored = self.workspace.trajectories.save(key, played)
        return self.workspace.catalog.add_trajectory_set(
            TrajectorySet(
                set_id=f"{self.run.run_id}-{step}-{purpose}-{by}",
                uri=stored.uri,
                digest=stored.digest,
                episodes=stored.episodes,
                tokens=stored.tokens,
                environment="arithmetic",
                sampled_by=by,
                run_id=self.run.run_id,
                step=step,
                purpose=purpose,
                reward_mean=0.5,
            )
        )

    def _publish(
        self, step: int, phase: str, metrics: dict[str, float], trained_on: list[str], parent: str | None
    ) -> PolicyVersion:
        catalog = self.workspace.catalog
        number = catalog.reserve_version(self.run.policy_id, self.run.run_id, step)
        return catalog.publish_version(
            self.run.policy_id,
            number,
            sampler=snapshot(SnapshotKind.SAMPLER, f"{self.policy}-{number}"),
            checkpoint=snapshot(SnapshotKind.CHECKPOINT, f"{self.policy}-{number}"),
            parent=parent,
            run_id=self.run.run_id,
            step=step,
            phase=phase,
            metrics=metrics,
            trained_on=trained_on,
        )
