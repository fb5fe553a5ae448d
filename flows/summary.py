"""The result of a run, from the catalog and the stores: as one JSON object, as tables, as a curve."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from opentinker_core.policies.types import Evaluation, PolicyVersion, Run
from opentinker_core.runtime.workspace import Workspace
from opentinker_core.sampling.protocol import BASE
from opentinker_core.trajectories.digest import token_ids_digest


def summarize(workspace: Workspace, run: Run) -> dict[str, Any]:
    """What came of `run`; equal runs give equal `token_ids_digest` and `losses`.

    `losses` has one entry a published version that was trained: its last step's loss.
    """
    versions = workspace.catalog.run_versions(run.run_id)
    last = versions[-1]
    rewards = [v.metrics["reward_mean"] for v in versions if "reward_mean" in v.metrics]
    return {
        "run": run.run_id,
        "name": run.name,
        "status": str(run.status),
        "policy": last.policy_name,
        "version": last.number,
        "ref": last.ref,
        "digest": last.sampler.digest,
        "uri": last.sampler.uri,
        "steps": last.step,
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "evaluation": _evaluation(workspace.catalog.evaluations(run_id=run.run_id), last),
        "token_ids_digest": _token_ids_digest(workspace, run),
        "losses": [v.metrics["loss"] for v in versions if "loss" in v.metrics],
        "rewards": rewards,
    }


def evaluation_object(evaluation: Evaluation) -> dict[str, Any]:
    """One evaluation as a JSON object."""
    stored = evaluation.trajectory_set
    return {
        "subject": evaluation.subject,
        "environment": evaluation.environment,
        "mean": evaluation.mean,
        "interval": [evaluation.low, evaluation.high],
        "n": evaluation.episodes,
        "details": evaluation.details,
        "trajectories": {"uri": stored.uri, "digest": stored.digest} if stored else None,
    }


def _evaluation(evaluations: Sequence[Evaluation], last: PolicyVersion) -> dict[str, Any] | None:
    """Base and trained side by side: means, 95 % intervals, episodes each."""
    by_subject = {evaluation.subject: evaluation for evaluation in evaluations}
    base, trained = by_subject.get(BASE), by_subject.get(last.ref)
    any_of_them = trained or base
    if any_of_them is None:
        return None
    return {
        "base": base.mean if base else None,
        "trained": trained.mean if trained else None,
        "n": any_of_them.episodes,
        "intervals": {
            "base": [base.low, base.high] if base else None,
            "trained": [trained.low, trained.high] if trained else None,
        },
    }


def _token_ids_digest(workspace: Workspace, run: Run) -> str:
    """One digest over the token ids of all training sets, in the order of the steps."""
    sets = workspace.catalog.trajectory_sets(run.run_id, purpose="train")
    ordered = sorted(sets, key=lambda item: item.step)
    return token_ids_digest(
        [t for item in ordered for t in workspace.trajectories.load(item.uri, item.digest)]
    )


def print_summary(console: Console, summary: dict[str, Any], png: Path | None) -> None:
    """The evaluation as a table, the curve, and where to look next."""
    console.print()
    console.print(f"[bold]{summary['ref']}[/] after {summary['steps']} steps, run {summary['run']}")
    if summary["evaluation"]:
        console.print(_evaluation_table(summary))
    if len(summary["rewards"]) > 1:
        print_curve(console, summary["rewards"], "mean reward of sampled episodes, by RL step")
    elif len(summary["losses"]) > 1:
        print_curve(console, summary["losses"], "loss, by published version")
    rows = [("curve", str(png))] if png else []
    rows += [
        ("snapshot", summary["uri"]),
        ("lineage", f"opentinker lineage {summary['ref']}"),
        ("try it", f'opentinker sample {summary["ref"]} "..."'),
        ("browse", "opentinker up  (Prefect and MLflow in the browser)"),
    ]
    print_pairs(console, rows)


def print_pairs(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Names and values, one a line; long values are neither cut nor broken, so that they can be copied."""
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        line = Text.assemble((name.ljust(width), "dim"), value)
        console.print(line, soft_wrap=True)


def _evaluation_table(summary: dict[str, Any]) -> Table:
    evaluation = summary["evaluation"]
    table = Table("held-out evaluation", "mean reward", "95 % interval", box=None, header_style="dim")
    for name, label in (("base", "base model"), ("trained", summary["ref"])):
        interval = evaluation["intervals"][name]
        if interval:
            low, high = interval
            table.add_row(label, f"[bold]{evaluation[name]:.3f}[/]", f"{low:.3f} to {high:.3f}")
    table.caption = f"n = {evaluation['n']} episodes each"
    table.caption_justify = "left"
    return table


def print_curve(console: Console, values: Sequence[float], title: str) -> None:
    """Draw a curve in the terminal."""
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(min(console.width, 80), 14)
    figure.draw(figure.signal(list(values), marker="braille").lines(True)).title(title)
    console.print(Text.from_ansi(str(figure.build())))


def save_curve(path: Path, summary: dict[str, Any]) -> Path | None:
    """Save the reward curve (or the losses of an SFT run) as PNG; None if there is nothing to draw.

    Raises:
        OSError: the file cannot be written.
    """
    values, label = (summary["rewards"], "mean reward") if summary["rewards"] else (summary["losses"], "loss")
    if len(values) < 2:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(range(1, len(values) + 1), values, color="tab:blue", linewidth=1.8)
    if label == "mean reward" and summary["evaluation"]:
        _draw_evaluations(axes, summary["evaluation"], len(values))
    axes.set(xlabel="step", ylabel=label, title=f"{summary['name']}: {summary['ref']}")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _draw_evaluations(axes: Any, evaluation: dict[str, Any], steps: int) -> None:
    """Held-out means with their intervals, at the start (base) and the end (trained)."""
    for name, at, colour in (("base", 1, "tab:gray"), ("trained", steps, "tab:orange")):
        interval = evaluation["intervals"][name]
        if interval:
            mean = evaluation[name]
            spread = [[mean - interval[0]], [interval[1] - mean]]
            axes.errorbar(
                [at], [mean], yerr=spread, fmt="o", capsize=4, color=colour, label=f"held out, {name}"
            )
    axes.legend()
