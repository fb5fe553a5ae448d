"""Turn episodes into masked, shifted datums with advantages."""

from opentinker_core.policies.types import TrajectorySet
from tasks.phase import phase
from tasks.sessions import session_of


@phase("build-batch", "build-batch[{step}]")
def build_batch(run_id: str, step: int, episodes: TrajectorySet) -> dict[str, float]:
    """Build the batch of `step`, which stays in the session; returns what is in it, in numbers."""
    return session_of(run_id).build_batch(step, episodes)
