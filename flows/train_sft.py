"""The SFT flow: demonstrations, supervised steps, publish, refresh, evaluate."""

from prefect import flow

from flows.training import check_phases, evaluates_at, training_run
from opentinker_core.config.schema import TrainConfig
from tasks.evaluate import evaluate
from tasks.open_run import OpenRun
from tasks.publish import publish_snapshot
from tasks.refresh import refresh_sampler
from tasks.report import step_done
from tasks.sft import collect_demonstrations, supervised_steps


@flow(name="train-sft", flow_run_name="{config.name}", persist_result=False, validate_parameters=True)
def train_sft(config: TrainConfig, run_id: str | None = None) -> str:
    """Train a policy on demonstrations; returns the run's id.

    Args:
        config: What to train, on what, and how.
        run_id: Go on with this run, from its last published version.
    """
    check_phases("train-sft", config, "sft")
    with training_run(config, run_id) as run:
        imitate(run)
    return run.run_id


def imitate(run: OpenRun) -> None:
    """The remaining SFT steps of `run`, a version every `sft.publish_every` steps."""
    collect_demonstrations(run.run_id)
    for first, last in run.sft_chunks:
        metrics = supervised_steps(run.run_id, first, last)
        version = publish_snapshot(run.run_id, last, metrics)  # → version + lineage
        refresh_sampler(run.run_id, version)
        if evaluates_at(run, last):
            evaluate(run.run_id, version.ref)
        step_done(run.run_id, last, metrics, "sft")
