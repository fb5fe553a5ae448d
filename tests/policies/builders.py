"""Short ways to fill a catalog."""

from typing import Any

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.digests import digest_json
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.types import Evaluation, Policy, PolicyVersion, Run, TrajectorySet
from opentinker_core.snapshots.protocol import Snapshot, SnapshotKind

LORA = LoRAConfig(rank=4, target_modules=("q_proj", "lm_head"))


def new_policy(catalog: Catalog, name: str = "adder") -> Policy:
    return catalog.create_policy(name, "tiny", LORA)


def new_run(catalog: Catalog, policy: Policy, name: str = "first", flow: str | None = None) -> Run:
    config = {"name": name}
    return catalog.start_run(name, policy.policy_id, config, digest_json(config), "c0ffee", flow)


def snapshot(kind: SnapshotKind, content: str) -> Snapshot:
    digest = digest_json([kind, content])
    return Snapshot(kind, f"file:///snapshots/{digest[:16]}", digest, 3 << 30)


def publish(
    catalog: Catalog, run: Run, step: int, content: str | None = None, **changes: Any
) -> PolicyVersion:
    """Reserve and publish what a run has after `step`."""
    content = content if content is not None else f"{run.run_id}/{step}"
    number = changes.pop("number", None)
    if number is None:
        number = catalog.reserve_version(run.policy_id, run.run_id, step)
    arguments: dict[str, Any] = {
        "sampler": snapshot(SnapshotKind.SAMPLER, content),
        "checkpoint": snapshot(SnapshotKind.CHECKPOINT, content),
        "parent": None,
        "run_id": run.run_id,
        "step": step,
        "phase": "rl" if step else "init",
        "metrics": {"loss": 1 / (step + 1)},
        "trained_on": (),
        **changes,
    }
    return catalog.publish_version(run.policy_id, number, **arguments)


def trajectory_set(run: Run | None, step: int, sampled_by: str = "base", **changes: Any) -> TrajectorySet:
    run_id = run.run_id if run else ""
    values: dict[str, Any] = {
        "set_id": f"{run_id or 'none'}-{step}-{sampled_by}-{changes.get('purpose', 'train')}",
        "uri": f"file:///trajectories/{run_id}/{step}",
        "digest": digest_json([run_id, step, sampled_by]),
        "episodes": 64,
        "tokens": 5 << 30,
        "environment": "arithmetic",
        "sampled_by": sampled_by,
        "run_id": run_id,
        "step": step,
        "purpose": "train",
        "reward_mean": 0.5,
        **changes,
    }
    return TrajectorySet(**values)


def evaluation(run: Run | None, subject: str, **changes: Any) -> Evaluation:
    values: dict[str, Any] = {
        "subject": subject,
        "run_id": run.run_id if run else None,
        "step": 3,
        "environment": "arithmetic",
        "mean": 0.5,
        "low": 0.4,
        "high": 0.6,
        "episodes": 64,
        "details": {"samples": 4},
        **changes,
    }
    return Evaluation(**values)
