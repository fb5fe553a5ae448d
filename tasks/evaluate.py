"""Evaluate a version, or the base model, on held-out problems."""

from opentinker_core.config.schema import TrainConfig
from opentinker_core.policies.types import Evaluation
from opentinker_core.runtime.held_out import evaluate_version
from opentinker_core.runtime.workspace import Workspace
from tasks.phase import phase
from tasks.progress import Progress, tell
from tasks.sessions import session_of


@phase("evaluate", "evaluate[{subject}]")
def evaluate(run_id: str, subject: str) -> Evaluation:
    """Evaluate `subject` (`policy@number` or `base`); an evaluation that the run already has is returned."""
    session = session_of(run_id)
    done = session.version.step
    tell(Progress(run_id, session.run.name, done, session.config.steps, f"evaluating {subject}"))
    return session.evaluate(subject)


@phase("evaluate-alone", "evaluate-alone[{subject}]")
def evaluate_alone(config: TrainConfig, subject: str) -> Evaluation:
    """Evaluate `subject` outside of any run, in the environment of `config`; loads the model itself."""
    return evaluate_version(config, Workspace(), subject)
