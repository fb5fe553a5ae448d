"""The nouns of the catalog: Policy, PolicyVersion, TrajectorySet, Run, Evaluation."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.snapshots.protocol import Snapshot


@dataclass(frozen=True)
class Policy:
    """Logical identity of a policy: tenant, name, base model, LoRA config."""

    policy_id: str
    tenant: str
    name: str
    base_model: str
    lora: LoRAConfig
    created_at: datetime
    forked_from: str | None = None
    """`name@number` of the version this policy was forked from."""


@dataclass(frozen=True)
class PolicyVersion:
    """One published, immutable state of a policy. Numbers only grow and are never reused."""

    policy_id: str
    policy_name: str
    number: int
    sampler: Snapshot
    checkpoint: Snapshot | None
    """None once pruned."""
    parent: str | None
    """`name@number`, of this or (fork) another policy; None: fresh adapter on the base model."""
    run_id: str | None
    step: int
    """Optimizer steps of the run when it was published; 0: before the first."""
    phase: str
    """`init`, `sft` or `rl`."""
    metrics: dict[str, float]
    created_at: datetime

    @property
    def ref(self) -> str:
        """`name@number`, the name under which samplers and turns know this version."""
        return f"{self.policy_name}@{self.number}"


@dataclass(frozen=True)
class TrajectorySet:
    """A stored set of trajectories, by URI and digest."""

    set_id: str
    uri: str
    digest: str
    episodes: int
    tokens: int
    """Trained (mask = 1) tokens."""
    environment: str
    sampled_by: str
    """`policy@number`, `base` or `demonstration`."""
    run_id: str
    step: int
    purpose: str
    """`train` or `evaluation`."""
    reward_mean: float | None
    created_at: datetime | None = None


class RunStatus(StrEnum):
    """Where a run stands."""

    RUNNING = "running"
    """Started; a killed run stays so until it is resumed."""
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True)
class Run:
    """One training run: a config applied to a policy."""

    run_id: str
    name: str
    tenant: str
    policy_id: str
    config: dict[str, Any]
    config_digest: str
    code_commit: str | None
    status: RunStatus
    flow_run_id: str | None
    mlflow_run_id: str | None
    created_at: datetime
    updated_at: datetime
    error: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """The result of evaluating a version, or the base, on held-out problems."""

    subject: str
    """`policy@number` or `base`."""
    run_id: str | None
    step: int
    environment: str
    mean: float
    low: float
    high: float
    """Bounds of the 95 % confidence interval."""
    episodes: int
    trajectory_set: TrajectorySet | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class VersionLineage:
    """A version with what it came from and what came of it."""

    version: PolicyVersion
    trained_on: list[TrajectorySet]
    """What it was trained on since its parent."""
    generated: list[TrajectorySet]
    """What it sampled."""
    consumers: dict[str, list[str]]
    """For each of these sets, by id: the versions trained on it, `name@number`, oldest first."""
    evaluations: list[Evaluation]
