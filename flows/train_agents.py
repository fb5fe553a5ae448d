"""The flow of several policies that play together: all phases as tasks, all policies in each phase."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prefect import Task, flow

from flows.training import evaluates_at
from opentinker_core.config.agents import AgentsConfig
from opentinker_core.policies.types import RunStatus
from opentinker_core.sampling.protocol import BASE
from tasks.batch import build_batch
from tasks.evaluate import evaluate
from tasks.joint import (
    OpenJointRun,
    check_coordination,
    end_joint_run,
    evaluate_jointly,
    open_joint_run,
    play,
    sessions_of,
)
from tasks.open_run import OpenRun
from tasks.publish import publish_snapshot
from tasks.refresh import refresh_sampler
from tasks.report import link_lineage, step_done
from tasks.sft import collect_demonstrations, supervised_steps
from tasks.update import update_policy


@flow(name="train-agents", persist_result=False, validate_parameters=True)
def train_agents(config: AgentsConfig | None = None, joint_id: str | None = None) -> list[str]:
    """Train the policies of several agents together; returns the ids of their runs.

    Args:
        config: Who plays what with whom, and how they are trained.
        joint_id: Go on with this joint run, from what all its policies have published.
    """
    with joint_run(config, joint_id) as run:
        imitate_all(run)
        for step in run.rl_steps:
            episodes = play(run.joint_id, step)  # → a trajectory set a policy, of its own agents' turns
            _all(run.runs, build_batch, step, episodes)
            metrics = _all(run.runs, update_policy, step)  # in one pass through the base model
            versions = _all(run.runs, publish_snapshot, step, metrics)
            _all(run.runs, refresh_sampler, versions)
            check_coordination(run.joint_id, step)
            evaluate_all(run, step)
            for one in run.runs:
                step_done(one.run_id, step, metrics[one.run_id], "rl")
    return [one.run_id for one in run.runs]


def imitate_all(run: OpenJointRun) -> None:
    """The remaining SFT steps of all policies, a version of each every `sft.publish_every` steps."""
    chunks = dict.fromkeys(chunk for one in run.runs for chunk in one.sft_chunks)
    if chunks:
        _all(run.runs, collect_demonstrations)
    for first, last in chunks:
        behind = [one for one in run.runs if (first, last) in one.sft_chunks]
        metrics = _all(behind, supervised_steps, first, last)
        versions = _all(behind, publish_snapshot, last, metrics)
        _all(behind, refresh_sampler, versions)
        evaluate_all(run, last)
        for one in behind:
            step_done(one.run_id, last, metrics[one.run_id], "sft")


def evaluate_all(run: OpenJointRun, step: int) -> None:
    """Evaluate the policies as they are after `step`, if that is due."""
    if not evaluates_at(run.runs[0], step):
        return
    for one, session in zip(run.runs, sessions_of(run.joint_id), strict=True):
        if one in run.alone:
            evaluate(one.run_id, session.version.ref)
    if len(run.alone) < len(run.runs):
        evaluate_jointly(run.joint_id, "latest")


@contextmanager
def joint_run(config: AgentsConfig | None, joint_id: str | None) -> Iterator[OpenJointRun]:
    """Open the runs; at the end record each as completed, or all as failed with the reason."""
    run = open_joint_run(config, joint_id)
    sessions = sessions_of(run.joint_id)

    def finish(status: RunStatus, error: str | None = None) -> None:
        for session in sessions:
            session.finish(status, error)

    try:
        for one in run.alone:
            evaluate(one.run_id, BASE)
        if len(run.alone) < len(run.runs):
            evaluate_jointly(run.joint_id, BASE)
        if run.next_step > 1 and all(one.next_step == run.next_step for one in run.runs):
            evaluate_all(run, run.next_step - 1)  # a kill may have come between it and the versions
        for one in run.runs:
            link_lineage(one.run_id)
        yield run
        for one in run.runs:
            link_lineage(one.run_id)
        finish(RunStatus.COMPLETED)
    except Exception as error:
        finish(RunStatus.FAILED, f"{type(error).__name__}: {error}")
        raise
    except BaseException:  # Ctrl-C, or Prefect cancels the flow run
        finish(RunStatus.FAILED, "interrupted")
        raise
    finally:
        end_joint_run(run.joint_id)


def _all(runs: Sequence[OpenRun], task: Task[..., Any], *arguments: Any) -> dict[str, Any]:
    """Run a task for all policies at once, and wait for all of them: the barrier. Results by run id.

    Of an argument that is a dict by run id, each gets its own.
    """
    begun = {}
    for one in runs:
        own = [given[one.run_id] if isinstance(given, dict) else given for given in arguments]
        begun[one.run_id] = task.submit(one.run_id, *own)
    for future in begun.values():
        future.wait()
    return {run_id: future.result() for run_id, future in begun.items()}
