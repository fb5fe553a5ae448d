"""Small joint runs for tests: tiny model, a few steps, everything through the real sessions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from opentinker_core.config.agents import AgentsConfig
from opentinker_core.config.schema import TrainConfig
from opentinker_core.policies.types import RunStatus
from opentinker_core.runtime.joint import JointSession, MemberSession
from opentinker_core.runtime.session import open_session
from tests.runtime.runs import workspace_at

CONFIG: dict[str, Any] = {
    "name": "pair",
    "base_model": "tiny",
    "lora": {"rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"]},
    "policies": {"black": {}, "white": {}},
    "environment": {"id": "gomoku_match", "args": {"size": 3, "line": 3}},
    "protocol": {"policies": {"X": "black", "O": "white"}, "order": "sequential"},
    "sft": {
        "steps": 8,
        "batch_size": 32,
        "examples": 40,
        "publish_every": 4,
        "optimizer": {"learning_rate": 2e-2},
    },
    "rl": {
        "steps": 2,
        "groups": 4,
        "group_size": 4,
        "sampling": {"max_tokens": 3},
        "optimizer": {"learning_rate": 1e-3},
    },
    "evaluation": {"episodes": 4, "samples": 2},
    "runtime": {"threads": 1},
    "record": {"mlflow": False},
}

Watch = Callable[[str, int], None]
"""Called before each phase with its name and step; what it raises stops the run there, as a kill would."""


def joint_config(**changes: Any) -> AgentsConfig:
    """The config with top-level keys replaced."""
    return AgentsConfig.model_validate(CONFIG | changes)


def open_joint(home: Path, config: AgentsConfig, joint_id: str = "j1") -> JointSession:
    """The sessions of a new joint run, or of one that was begun."""
    workspace = workspace_at(home)
    begun = {run.config["policy"]["name"]: run for run in workspace.catalog.joint_runs(joint_id)}
    members = [
        _member(begun[name].run_id if name in begun else None, one, workspace)
        for name, one in config.members(joint_id).items()
    ]
    return JointSession(members)


def _member(run_id: str | None, config: TrainConfig, workspace: Any) -> MemberSession:
    session = open_session(config, workspace, run_id=run_id, kind=MemberSession)
    assert isinstance(session, MemberSession)
    return session


def run_jointly(joint: JointSession, watch: Watch = lambda *_: None) -> JointSession:
    """All remaining phases, in the order of the flow."""
    members = list(joint.members.values())
    for member in members:
        phase = member.config.sft
        while phase is not None and member.next_step <= member.sft_steps:
            start = member.next_step
            stop = min(start + phase.publish_every - 1, member.sft_steps)
            watch("sft", stop)
            member.publish(stop, member.sft(start, stop))
            member.refresh(member.version)
    for step in range(max(joint.next_step, members[0].sft_steps + 1), members[0].config.steps + 1):
        watch("rollout", step)
        sets = joint.rollout(step)
        watch("update", step)
        for name, member in joint.members.items():
            member.build_batch(step, sets[name])
        metrics = {name: member.update(step) for name, member in joint.members.items()}
        for name, member in joint.members.items():
            watch(f"publish {name}", step)
            member.publish(step, metrics[name])
        watch("refresh", step)
        for member in members:
            member.refresh(member.version)
        joint.check(step)
    watch("evaluate", members[0].config.steps)
    joint.evaluate("latest")
    for member in members:
        member.finish(RunStatus.COMPLETED)
    return joint


def outcome(joint: JointSession) -> dict[str, Any]:
    """What must not depend on kills: token ids, snapshots and metrics of each policy."""
    found = {}
    for name, member in joint.members.items():
        versions = member.workspace.catalog.run_versions(member.run.run_id)
        found[name] = (
            member.token_ids_digest(),
            [(one.step, one.number, one.sampler.digest, one.metrics) for one in versions],
        )
    return found
