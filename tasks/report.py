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

from opentinker_core.lineage.registry import model_name
from opentinker_core.lineage.tracking import tracking_target
from opentinker_core.policies.types import Evaluation, PolicyVersion, TrajectorySet
from opentinker_core.runtime.session import RunSession
from opentinker_core.trajectories.types import Trajectory
from tasks.phase import phase
from tasks.progress import Progress, tell
from tasks.sessions import session_of

_ROWS = 200
_EPISODES = 4
_COLUMNS = ("reward_mean", "loss", "groups_with_signal", "kl", "grad_norm", "logprob_gap_max")
_progress_artifacts: dict[str, UUID] = {}


def step_done(run_id: str, step: int, metrics: Mapping[str, float], doing: str) -> None:
    """Tell watchers of this process that `step` is published; update the artifacts when they are due."""
    session = session_of(run_id)
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
    """One page that leads from the flow run to the catalog and to MLflow; at the end it has the outcome."""
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
    """One row a published version, the newest first; only columns that some row has."""
    shown = [version for version in reversed(versions) if version.step > 0][:_ROWS]
    columns = [name for name in _COLUMNS if any(name in version.metrics for version in shown)]
    return [
        {"step": str(version.step), "version": version.ref, "phase": version.phase}
        | {name: _number(version.metrics.get(name)) for name in columns}
        for version in shown
    ]


def _episodes(session: RunSession) -> str:
    """Some episodes of the last training set: what was given, and (as code) what the policy generated."""
    sets = session.workspace.catalog.trajectory_sets(session.run.run_id, purpose="train")
    if not sets:
        return "No episodes yet."
    newest = max(sets, key=lambda item: item.step)
    trajectories = session.workspace.trajectories.load(newest.uri, newest.digest)
    head = ["", "| episode | reward | end | text |", "|---|--:|---|---|"]
    return "\n".join([_set_line(newest), *head, *(_episode(session, one) for one in _spread(trajectories))])


def _spread(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """A few episodes from different groups where there are some."""
    stride = max(1, len(trajectories) // _EPISODES)
    return list(trajectories[::stride][:_EPISODES])


def _set_line(trajectories: TrajectorySet) -> str:
    return (
        f"Step {trajectories.step}: {trajectories.episodes} episodes sampled by `{trajectories.sampled_by}`, "
        f"set `{trajectories.digest[:12]}`. What stands `like this` was generated, and trained on."
    )


def _episode(session: RunSession, trajectory: Trajectory) -> str:
    def text(start: int, end: int) -> str:
        return str(session.engine.tokenizer.decode(trajectory.tokens_T[start:end].tolist()))

    parts, at = [], 0
    for turn in trajectory.turns:
        parts += [_given(text(at, turn.start)), _generated(text(turn.start, turn.end))]
        at = turn.end
    parts.append(_given(text(at, len(trajectory.tokens_T))))
    reward = "missing" if trajectory.reward is None else f"{trajectory.reward:g}"
    return f"| `{trajectory.trajectory_id}` | {reward} | {trajectory.end_reason} | {''.join(parts)} |"


def _given(text: str) -> str:
    """Plain text, with what Markdown would interpret escaped and line ends shown as such."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&!])", r"\\\1", text).replace("\r", "␍").replace("\n", "⏎<br>")


def _generated(text: str) -> str:
    """Code, one span a line. Bold would not do: it is none where it begins with a space or punctuation."""
    lines = (_code(line) for line in text.replace("\r", "␍").replace("\n", "⏎\n").split("\n") if line)
    return "<br>".join(lines)


def _code(line: str) -> str:
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}".replace("|", "\\|")


def _links(session: RunSession) -> str:
    catalog, policy = session.workspace.catalog, session.policy.name
    run = catalog.run(session.run.run_id)
    versions = catalog.run_versions(run.run_id) or [session.version]
    ui_url = tracking_target(session.workspace.settings).ui_url
    model = model_name(policy, catalog.tenant)
    rows = {
        "run": f"`{run.run_id}` ({run.name})",
        "policy": f"`{policy}`, versions `{versions[0].ref}` to `{versions[-1].ref}`",
        "base model": f"`{session.policy.base_model}`",
        **{f"evaluation of `{one.subject}`": _result(one) for one in catalog.evaluations(run.run_id)},
        "MLflow": f"[{model}]({ui_url}/#/models/{model}): versions and what trained them, "
        f"run `{run.mlflow_run_id or 'not yet recorded'}`",
        "lineage": f"`opentinker lineage {versions[-1].ref}`",
        "code": f"`{run.code_commit or 'unknown'}`",
        "config": f"`{run.config_digest}`",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())])


def _result(evaluation: Evaluation) -> str:
    interval = f"{_number(evaluation.low)} to {_number(evaluation.high)}"
    return f"{_number(evaluation.mean)} ({interval} at 95 %, {evaluation.episodes} episodes)"


def _title(session: RunSession, what: str) -> str:
    return f"{what} of run {session.run.name} ({session.run.run_id})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _slug(name: str) -> str:
    """An artifact key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "policy"
