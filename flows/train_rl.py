"""The RL flow: rollout, batch, update, publish, refresh, evaluate; one flow run a training run."""

from prefect import flow

from flows.training import check_phases, evaluates_at, training_run
from opentinker_core.config.schema import TrainConfig
from tasks.batch import build_batch
from tasks.evaluate import evaluate
from tasks.open_run import OpenRun
from tasks.publish import publish_snapshot
from tasks.refresh import refresh_sampler
from tasks.report import step_done
from tasks.rollout import rollout
from tasks.update import update_policy


@flow(name="train-rl", flow_run_name="{config.name}", persist_result=False, validate_parameters=True)
def train_rl(config: TrainConfig, run_id: str | None = None) -> str:
    """Train a policy by reinforcement learning; returns the run's id.

    Args:
        config: What to train, on what, and how.
        run_id: Go on with this run, from its last published version.
    """
    check_phases("train-rl", config, "rl")
    with training_run(config, run_id) as run:
        reinforce(run)
    return run.run_id


def reinforce(run: OpenRun) -> None:
    """The remaining RL steps of `run`."""
    for step in run.rl_steps:
        episodes = rollout(run.run_id, step)  # → trajectory set (URI, digest)
        build_batch(run.run_id, step, episodes)  # → masked, shifted datums with advantages
        metrics = update_policy(run.run_id, step)
        version = publish_snapshot(run.run_id, step, metrics)  # → version + lineage
        refresh_sampler(run.run_id, version)
        if evaluates_at(run, step):
            evaluate(run.run_id, version.ref)
        step_done(run.run_id, step, metrics, "rl")
