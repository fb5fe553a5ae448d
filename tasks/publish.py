"""Publish a step's state as an immutable version, with its lineage."""

from opentinker_core.policies.types import PolicyVersion
from tasks.phase import phase
from tasks.sessions import session_of


@phase("publish-snapshot", "publish-snapshot[{step}]")
def publish_snapshot(run_id: str, step: int, metrics: dict[str, float]) -> PolicyVersion:
    """Publish the state after `step`; repeated, it gives the version that was published."""
    return session_of(run_id).publish(step, metrics)
