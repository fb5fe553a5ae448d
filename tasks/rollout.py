"""Sample the episodes of one RL step with the current version."""

from opentinker_core.policies.types import TrajectorySet
from tasks.phase import phase
from tasks.sessions import session_of


@phase("rollout", "rollout[{step}]")
def rollout(run_id: str, step: int) -> TrajectorySet:
    """Episodes of `step`; those that were sampled before a crash are found again, not sampled anew."""
    return session_of(run_id).rollout(step)
