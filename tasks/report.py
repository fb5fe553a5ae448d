"""Prefect artifacts of a run: progress, a table of metrics, sampled episodes, where to look next.

Written every `record.artifact_every` steps and at the end, so that they cost little beside a step.
The rows come from the catalog: a resumed run shows the whole of itself.
"""

import re
from collections.abc import Mapping, Sequence
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from opentinker_core.lineage.tracking import tracking_target
from opentinker_core.policies.types import Evaluation, PolicyVersion, TrajectorySet
from opentinker_core.runtime.session import RunSession
from opentinker_core.trajectories.types import Trajectory
from tasks.phase import phase
from tasks.progress import Progress, tell
from tasks.sessions import session_of, wake_outbox

_ROWS = 200
_EPISODES = 4
_COLUMNS = ("loss", "reward_mean", "groups_with_signal", "kl", "grad_norm", "logprob_gap_max")
_progress_artifacts: dict[str, UUID] = {}


def step_done(run_id: str, step: int, metrics: Mapping[str, float], doing: str) -> None:
    """Tell watchers of this process that `step` is published; update the artifacts when they are due."""
    session = session_of(run_id)
    wake_outbox(run_id)
    steps = session.config.steps
    tell(Progress(run_id, session.run.name, step, steps, doing, metrics))
    if step % session.config.record.artifact_every == 0 or step == steps:
        report(run_id, step)


@phase("report", "report[{step}]")
def report(run_id: str, step: int) -> None:
    """Bring the artifacts of the run up to date with `step`."""
    session = session_of(run_id)
    key = _slug(session.policy.name)
    _progress(session, key, step)
    versions = session.workspace.catalog.run_versions(run_id)
    create_table_artifact(
        _table(versions), key=f"{key}-metrics", description=_title(session, "Metrics a step")
    )
    text = _episodes(session)
    create_markdown_artifact(text, key=f"{key}-episodes", description=_title(session, "Sampled episodes"))


@phase("link-lineage")
def link_lineage(run_id: str) -> None:
    """One page that leads from the flow run to the catalog and to MLflow."""
    session = session_of(run_id)
    key = _slug(session.policy.name)
    create_markdown_artifact(_links(session), key=f"{key}-lineage", description=_title(session, "Lineage"))


@phase("report-evaluation")
def report_evaluation(evaluation: Evaluation) -> None:
    """A table with the result of an evaluation outside of a run."""
    row = {
        "subject": evaluation.subject,
        "environment": evaluation.environment,
        "mean": _number(evaluation.mean),
        "95 % interval": f"{_number(evaluation.low)} to {_number(evaluation.high)}",
        "episodes": str(evaluation.episodes),
    }
    key = _slug(evaluation.subject.partition("@")[0])
    create_table_artifact([row], key=f"{key}-evaluation", description=f"Evaluation of {evaluation.subject}")


def _progress(session: RunSession, key: str, step: int) -> None:
    percent = 100.0 * step / session.config.steps
    run_id = session.run.run_id
    if run_id in _progress_artifacts:
        update_progress_artifact(_progress_artifacts[run_id], percent)
        return
    created = create_progress_artifact(
        percent, key=f"{key}-progress", description=_title(session, "Progress")
    )
    if isinstance(created, UUID):
        _progress_artifacts[run_id] = created


def _table(versions: Sequence[PolicyVersion]) -> list[dict[str, str]]:
    """One row a published version, the newest last; only columns that some row has."""
    shown = [version for version in versions if version.step > 0][-_ROWS:]
    columns = [name for name in _COLUMNS if any(name in version.metrics for version in shown)]
    return [
        {"step": str(version.step), "version": version.ref, "phase": version.phase}
        | {name: _number(version.metrics.get(name)) for name in columns}
        for version in shown
    ]


def _episodes(session: RunSession) -> str:
    """The last training set's first episodes: what was given, and (bold) what the policy generated."""
    sets = session.workspace.catalog.trajectory_sets(session.run.run_id, purpose="train")
    if not sets:
        return "No episodes yet."
    newest = max(sets, key=lambda item: item.step)
    trajectories = session.workspace.trajectories.load(newest.uri, newest.digest)
    return "\n".join([_set_line(newest), *(_episode(session, one) for one in _spread(trajectories))])


def _spread(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """A few episodes from different groups where there are some."""
    stride = max(1, len(trajectories) // _EPISODES)
    return list(trajectories[::stride][:_EPISODES])


def _set_line(trajectories: TrajectorySet) -> str:
    return (
        f"Step {trajectories.step}: {trajectories.episodes} episodes sampled by `{trajectories.sampled_by}`, "
        f"set `{trajectories.digest[:12]}`. **Bold** is what was generated, and trained on."
    )


def _episode(session: RunSession, trajectory: Trajectory) -> str:
    parts, at = [], 0
    for turn in trajectory.turns:
        parts.append(_text(session, trajectory, at, turn.start))
        parts.append(f"**{_text(session, trajectory, turn.start, turn.end)}**")
        at = turn.end
    parts.append(_text(session, trajectory, at, len(trajectory.tokens_T)))
    reward = "missing" if trajectory.reward is None else f"{trajectory.reward:g}"
    return f"\n---\n`{trajectory.trajectory_id}` reward {reward}, {trajectory.end_reason}\n\n{''.join(parts)}"


def _text(session: RunSession, trajectory: Trajectory, start: int, end: int) -> str:
    """Decoded tokens, with what Markdown would interpret escaped and line ends shown as such."""
    text = session.engine.tokenizer.decode(trajectory.tokens_T[start:end].tolist())
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", str(text)).replace("\n", "⏎<br>")


def _links(session: RunSession) -> str:
    run = session.workspace.catalog.run(session.run.run_id)
    target = tracking_target(session.workspace.settings)
    mlflow = f"`{target.tracking_uri}`"
    if target.over_http and run.mlflow_run_id:
        mlflow = f"[{target.tracking_uri}]({target.tracking_uri}/#/models/policy.{session.policy.name})"
    return "\n".join(
        [
            f"| run | `{run.run_id}` ({run.name}) |",
            "|---|---|",
            f"| policy | `{session.policy.name}`, from version `{session.version.ref}` on |",
            f"| base model | `{session.policy.base_model}` |",
            f"| code | `{run.code_commit or 'unknown'}` |",
            f"| config | `{run.config_digest}` |",
            f"| MLflow | {mlflow}, run `{run.mlflow_run_id or 'not yet recorded'}` |",
            f"| lineage | `opentinker lineage {session.policy.name}` |",
        ]
    )


def _title(session: RunSession, what: str) -> str:
    return f"{what} of run {session.run.name} ({session.run.run_id})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _slug(name: str) -> str:
    """An artifact key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "policy"
