"""Supervised fine-tuning on demonstrations."""

from opentinker_core.policies.types import TrajectorySet
from tasks.phase import phase
from tasks.progress import Progress, tell
from tasks.sessions import session_of


@phase("collect-demonstrations")
def collect_demonstrations(run_id: str) -> TrajectorySet:
    """The demonstrations of the whole phase, stored once."""
    return session_of(run_id).demonstrations()


@phase("supervised-steps", "supervised-steps[{first}-{last}]")
def supervised_steps(run_id: str, first: int, last: int) -> dict[str, float]:
    """Steps `first` to `last`; a task a step would cost more than the step. Returns the last metrics."""
    session = session_of(run_id)
    run = session.run

    def report(step: int, loss: float) -> None:
        tell(Progress(run_id, run.name, step, session.config.steps, "sft", {"loss": loss}))

    return session.sft(first, last, report)
