"""`opentinker lineage`, `opentinker sync`: what the catalog knows of a version, and its mirror."""

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from opentinker_core.lineage.outbox import Delivery, OutboxDispatcher
    from opentinker_core.lineage.report import EvaluationPart, LineageReport, SetPart, SnapshotPart

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_SHOWN = 30
"""Versions of the chain shown to people unless all are asked for."""


def lineage(
    policy: Annotated[str, typer.Argument(help="POLICY, POLICY@VERSION or POLICY@ALIAS.")],
    show_all: Annotated[bool, typer.Option("--all", help="Show the whole chain, however long.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what trained a version, back to the base model, and what it generated."""
    from opentinker_core.lineage.report import build_report
    from opentinker_core.runtime.workspace import Workspace

    report = build_report(Workspace().catalog, policy)
    if as_json:
        typer.echo(report.model_dump_json())
        return
    from rich.console import Console

    _print_report(report, Console(), show_all)


def sync(
    retry: Annotated[bool, typer.Option("--retry", help="Try events again that were given up.")] = False,
    as_json: AsJson = False,
) -> None:
    """Send MLflow what it has not yet received: after an outage, or when an alias was moved."""
    from opentinker_core.errors import OpenTinkerError
    from opentinker_core.lineage.outbox import Outcome, open_dispatcher
    from opentinker_core.runtime.workspace import Workspace

    dispatcher = open_dispatcher(Workspace())
    delivery, delivered = _deliver_all(dispatcher, retry)
    if delivery.outcome is Outcome.DRAINED:
        dispatcher.mirror_aliases()
    pending = dispatcher.pending()
    if as_json:
        events = [{"id": e.id, "kind": e.kind, "attempts": e.attempts, "payload": e.payload} for e in pending]
        typer.echo(json.dumps({"delivered": delivered, "outcome": delivery.outcome, "pending": events}))
    else:
        typer.echo(f"{delivered} events delivered to {dispatcher.tracking_uri}, {len(pending)} pending")
        for event in pending:
            typer.echo(f"  {event.id} {event.kind} {event.payload} ({event.attempts} failed attempts)")
    if delivery.error:
        raise OpenTinkerError(delivery.error)


def _deliver_all(dispatcher: "OutboxDispatcher", retry: bool) -> tuple["Delivery", int]:
    """Deliver until nothing is left but what an outage or another process keeps."""
    from opentinker_core.lineage.outbox import Outcome

    delivery = dispatcher.deliver_pending(retry_given_up=retry)
    delivered = delivery.delivered
    while delivery.outcome is Outcome.RETRY:
        time.sleep(0.5)
        delivery = dispatcher.deliver_pending()
        delivered += delivery.delivered
    return delivery, delivered


def _print_report(report: "LineageReport", console: "Console", show_all: bool) -> None:
    version, run, policy = report.version, report.run, report.policy
    facts: dict[str, Any] = {
        "policy": f"{policy.name} (LoRA rank {policy.lora.rank} on {policy.base_model})",
        "parent": version.parent or "base model",
        "step": f"{version.step} ({version.phase})",
        "sampler": _snapshot(version.sampler),
        "checkpoint": _snapshot(version.checkpoint) if version.checkpoint else "pruned",
    }
    if run is not None:
        facts |= {
            "run": f"{run.name} {run.run_id} ({run.status})",
            "config": run.config_digest[:12],
            "code": run.code_commit or "unknown",
            "flow run": run.flow_run_id or "none",
            "MLflow run": run.mlflow_run_id or "not recorded",
        }
    console.print(f"[bold]{version.ref}[/bold]")
    for name, value in facts.items():
        console.print(f"  {name:<11} {value}", highlight=False, soft_wrap=True)
    _print_ancestry(report, console, show_all)
    _print_generated(report, console)
    for evaluation in report.evaluations:
        console.print(f"  evaluation  {_evaluation(evaluation)}", highlight=False, soft_wrap=True)


def _print_ancestry(report: "LineageReport", console: "Console", show_all: bool) -> None:
    from rich.table import Table

    chain = report.ancestry if show_all else report.ancestry[:_SHOWN]
    table = Table("version", "step", "trained on", "episodes", "tokens", "sampled by", "reward", box=None)
    for version in chain:
        rows = [_set_cells(one) for one in version.trained_on] or [["", "", "", "", ""]]
        for index, cells in enumerate(rows):
            head = [version.ref, f"{version.step} {version.phase}"] if index == 0 else ["", ""]
            table.add_row(*head, *cells)
    console.print("\n[bold]Ancestry[/bold]")
    console.print(table)
    if len(chain) < len(report.ancestry):
        console.print(f"  and {len(report.ancestry) - len(chain)} older ones (--all)")


def _print_generated(report: "LineageReport", console: "Console") -> None:
    from rich.table import Table

    table = Table("set", "purpose", "episodes", "reward", "trained", box=None)
    for one in report.generated:
        name, episodes, _, _, reward = _set_cells(one)
        table.add_row(name, one.purpose, episodes, reward, ", ".join(one.trained))
    console.print("\n[bold]Generated[/bold]")
    if report.generated:
        console.print(table)
    else:
        console.print("  nothing yet")


def _snapshot(one: "SnapshotPart") -> str:
    return f"{one.uri}  {one.digest[:12]}"


def _set_cells(one: "SetPart") -> list[str]:
    reward = "" if one.reward_mean is None else f"{one.reward_mean:.3f}"
    return [f"{one.uri} {one.digest[:12]}", str(one.episodes), str(one.tokens), one.sampled_by, reward]


def _evaluation(evaluation: "EvaluationPart") -> str:
    interval = f"{evaluation.mean:.3f} (95 %: {evaluation.low:.3f} to {evaluation.high:.3f})"
    return f"{evaluation.subject}: {interval} on {evaluation.environment}, {evaluation.episodes} episodes"
