"""One optimizer step."""

from tasks.phase import phase
from tasks.sessions import session_of


@phase("update-policy", "update-policy[{step}]")
def update_policy(run_id: str, step: int) -> dict[str, float]:
    """Step the policy on the batch of `step`, from its last published state; returns the metrics."""
    return session_of(run_id).update(step)
