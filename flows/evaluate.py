"""The evaluation flow: one version, or the base model, on held-out problems, outside of any run."""

from prefect import flow

from opentinker_core.config.schema import TrainConfig
from opentinker_core.policies.types import Evaluation
from tasks.evaluate import evaluate_alone
from tasks.report import report_evaluation


@flow(name="evaluate", flow_run_name="evaluate {subject}", persist_result=False)
def evaluate_policy(config: TrainConfig, subject: str = "base") -> Evaluation:
    """Evaluate `subject` in the environment of `config`; the result is in the catalog too.

    Args:
        config: Environment, held-out problems and sampling; its phases do not matter here.
        subject: `policy@number`, `policy@alias`, or `base` for the config's base model.
    """
    evaluation = evaluate_alone(config, subject)
    report_evaluation(evaluation)
    return evaluation
