"""The lineage of a policy version, answered from the catalog alone: what it came from and what came of it.

`LineageReport` is a documented format: its JSON schema is `docs/lineage.schema.json`.
"""

import json
from collections.abc import Iterable
from datetime import datetime
from math import isfinite
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.types import Evaluation, Policy, PolicyVersion, Run, TrajectorySet
from opentinker_core.sampling.protocol import BASE
from opentinker_core.snapshots.protocol import Snapshot


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SnapshotPart(_Part):
    """Immutable files of one policy state."""

    uri: str
    digest: str
    """SHA-256 over the kind, names, sizes and SHA-256 of the files, as hex."""
    size: int
    """Bytes of all files."""


class SetPart(_Part):
    """A stored set of trajectories."""

    set_id: str
    uri: str
    digest: str
    """SHA-256 of the stored file, as hex."""
    episodes: int
    tokens: int
    """Tokens that the policy generated (those that carry a learning signal)."""
    environment: str
    sampled_by: str
    """`name@number` of the version that sampled it, `base`, or `demonstration`."""
    run_id: str
    step: int
    """The step of that run for which it was sampled."""
    purpose: str
    """`train` or `evaluation`."""
    reward_mean: float | None
    """Mean reward of the episodes that have one."""


class GeneratedPart(SetPart):
    """A set of trajectories that the version sampled."""

    trained: list[str]
    """`name@number` of the versions that were trained with it."""


class VersionPart(_Part):
    """One version of the chain, and what trained it."""

    ref: str
    """`name@number`."""
    policy: str
    number: int
    parent: str | None
    """`name@number` of the version it was trained from, of another policy at a fork; null: the base model."""
    run_id: str | None
    step: int
    """Optimizer steps of its run when it was published."""
    phase: str
    """`init`, `sft` or `rl`."""
    created_at: datetime
    sampler: SnapshotPart
    checkpoint: SnapshotPart | None
    """null: pruned."""
    metrics: dict[str, float | None]
    """Of the update that led to it; null: not a number."""
    trained_on: list[SetPart]


class RunPart(_Part):
    """A training run that published versions of the chain."""

    run_id: str
    name: str
    status: str
    config_digest: str
    """SHA-256 of the canonical JSON of the config, as hex."""
    code_commit: str | None
    flow_run_id: str | None
    """Of the Prefect flow run that last worked on it."""
    mlflow_run_id: str | None


class PolicyPart(_Part):
    """The policy that the version belongs to."""

    policy_id: str
    tenant: str
    name: str
    base_model: str
    lora: LoRAConfig
    forked_from: str | None
    """`name@number` of the version it was forked from."""


class EvaluationPart(_Part):
    """An evaluation on held-out problems."""

    subject: str
    """`name@number` or `base`."""
    run_id: str | None
    step: int
    environment: str
    mean: float
    low: float
    """Lower bound of the 95 % confidence interval of the mean."""
    high: float
    episodes: int
    trajectory_set: SetPart | None


class LineageReport(_Part):
    """Where a policy version comes from, and what it generated."""

    format: Literal["opentinker.lineage/1"] = "opentinker.lineage/1"
    policy: PolicyPart
    version: VersionPart
    """The version asked for."""
    run: RunPart | None
    """The run that published it; null: a fork."""
    ancestry: list[VersionPart]
    """The chain from the version asked for (first) back to the one that stands on the base model (last)."""
    runs: list[RunPart]
    """Every run of the chain, the newest first."""
    generated: list[GeneratedPart]
    """What the version asked for sampled, for training and evaluation."""
    evaluations: list[EvaluationPart]
    """Of the version asked for, and of the base model in the runs of the chain."""


def report_schema() -> dict[str, Any]:
    """The JSON schema of a report, as `opentinker lineage --json` prints it."""
    schema = LineageReport.model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def build_report(catalog: Catalog, ref: str) -> LineageReport:
    """The lineage of `ref` (`name`, `name@3`, `name@best`).

    Takes a handful of queries a policy and run of the chain, however many versions it has.

    Raises:
        NotFoundError: there is no such version.
    """
    version = catalog.version(ref)
    (lineage,) = catalog.lineages([version.ref])
    chain = _chain(catalog, version)
    trained_on: dict[str, list[TrajectorySet]] = {}
    for policy_name in dict.fromkeys(one.policy_name for one in chain):
        trained_on |= catalog.trained_on_by_version(policy_name)
    ancestry = [_version_part(one, trained_on.get(one.ref, [])) for one in chain]
    run_ids = dict.fromkeys(one.run_id for one in chain if one.run_id)
    runs = [_run_part(catalog.run(run_id)) for run_id in run_ids]
    evaluations = [
        *lineage.evaluations,
        *(found for run_id in run_ids for found in catalog.evaluations(run_id=run_id, subject=BASE)),
    ]
    return LineageReport(
        policy=_policy_part(catalog.policy(version.policy_name)),
        version=ancestry[0],
        run=next((run for run in runs if run.run_id == version.run_id), None),
        ancestry=ancestry,
        runs=runs,
        generated=[
            GeneratedPart(**_set_fields(one), trained=lineage.consumers[one.set_id])
            for one in lineage.generated
        ],
        evaluations=[_evaluation_part(one) for one in evaluations],
    )


def _chain(catalog: Catalog, version: PolicyVersion) -> list[PolicyVersion]:
    """`version` and its ancestors; the versions of each policy on the way are read once."""
    chain = [version]
    known: dict[str, PolicyVersion] = {}
    while (parent := chain[-1].parent) is not None:
        if parent not in known:
            known |= {one.ref: one for one in catalog.versions(parent.rpartition("@")[0])}
        chain.append(known[parent])
    return chain


def _version_part(version: PolicyVersion, trained_on: Iterable[TrajectorySet]) -> VersionPart:
    return VersionPart(
        ref=version.ref,
        policy=version.policy_name,
        number=version.number,
        parent=version.parent,
        run_id=version.run_id,
        step=version.step,
        phase=version.phase,
        created_at=version.created_at,
        sampler=_snapshot_part(version.sampler),
        checkpoint=_snapshot_part(version.checkpoint) if version.checkpoint else None,
        metrics={name: value if isfinite(value) else None for name, value in version.metrics.items()},
        trained_on=[SetPart(**_set_fields(one)) for one in trained_on],
    )


def _snapshot_part(snapshot: Snapshot) -> SnapshotPart:
    return SnapshotPart(uri=snapshot.uri, digest=snapshot.digest, size=snapshot.size)


def _set_fields(one: TrajectorySet) -> dict[str, Any]:
    return {name: getattr(one, name) for name in SetPart.model_fields}


def _run_part(run: Run) -> RunPart:
    return RunPart(**{name: getattr(run, name) for name in RunPart.model_fields})


def _policy_part(policy: Policy) -> PolicyPart:
    return PolicyPart(**{name: getattr(policy, name) for name in PolicyPart.model_fields})


def _evaluation_part(evaluation: Evaluation) -> EvaluationPart:
    fields = {name: getattr(evaluation, name) for name in EvaluationPart.model_fields}
    if evaluation.trajectory_set is not None:
        fields["trajectory_set"] = SetPart(**_set_fields(evaluation.trajectory_set))
    return EvaluationPart(**fields)


if __name__ == "__main__":
    print(json.dumps(report_schema(), indent=2))
