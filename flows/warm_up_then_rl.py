"""SFT and then RL of the same policy, in one run."""

from prefect import flow

from flows.train_rl import reinforce
from flows.train_sft import imitate
from flows.training import check_phases, training_run
from opentinker_core.config.schema import TrainConfig


@flow(name="warm-up-then-rl", flow_run_name="{config.name}", persist_result=False, validate_parameters=True)
def warm_up_then_rl(config: TrainConfig, run_id: str | None = None) -> str:
    """Warm a policy up on demonstrations, then train it by RL; returns the run's id.

    Args:
        config: What to train, on what, and how, with both phases.
        run_id: Go on with this run, from its last published version.
    """
    check_phases("warm-up-then-rl", config, "sft", "rl")
    with training_run(config, run_id) as run:
        imitate(run)
        reinforce(run)
    return run.run_id
