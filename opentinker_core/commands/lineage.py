"""`opentinker lineage`, `opentinker sync`: what the catalog knows of a version, and its mirror."""

import json
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from opentinker_core.lineage.outbox import Delivery, OutboxDispatcher
    from opentinker_core.lineage.report import (
        EvaluationPart,
        LineageReport,
        SetPart,
        SnapshotPart,
        VersionPart,
    )

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_SET_HEADER = ("episodes", "tokens", "reward", "digest", "set")
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
        if delivery.outcome is Outcome.BUSY:
            typer.echo("another process is delivering them just now")
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
    _section(console, version.ref, [[name, value] for name, value in facts.items()])
    # a row of its own says more than that there is one
    chain = report.ancestry if show_all or len(report.ancestry) == _SHOWN + 1 else report.ancestry[:_SHOWN]
    _section(console, "Ancestry", _ancestry(chain), header=True)
    if len(chain) < len(report.ancestry):
        console.print(f"  and {len(report.ancestry) - len(chain)} older ones (--all)")
    generated = [[one.purpose, ", ".join(one.trained) or "-", *_set_cells(one)] for one in report.generated]
    if generated:
        _section(console, "Generated", [["purpose", "trained", *_SET_HEADER], *generated], header=True)
    if report.evaluations:
        _section(console, "Evaluations", [_evaluation(one) for one in report.evaluations])


def _ancestry(chain: Sequence["VersionPart"]) -> list[list[str]]:
    """A row a trajectory set; only the first of a version repeats its name."""
    rows = [["version", "step", "sampled by", *_SET_HEADER]]
    for version in chain:
        head = [version.ref, f"{version.step} {version.phase}"]
        for one in version.trained_on:
            rows.append([*head, one.sampled_by, *_set_cells(one)])
            head = ["", ""]
        if not version.trained_on:
            rows.append([*head, "-"])
    return rows


def _section(console: "Console", title: str, rows: Sequence[Sequence[str]], header: bool = False) -> None:
    """Print aligned columns; a long last one is left to the terminal to wrap, so that it can be copied."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    console.print(f"\n[bold]{title}[/bold]")
    for index, row in enumerate(rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        style = "dim" if header and index == 0 else None
        console.print(
            "  " + "  ".join(cells).rstrip(), style=style, soft_wrap=True, highlight=False, markup=False
        )


def _set_cells(one: "SetPart") -> list[str]:
    reward = "-" if one.reward_mean is None else f"{one.reward_mean:.3f}"
    return [str(one.episodes), str(one.tokens), reward, one.digest[:12], one.uri]


def _snapshot(one: "SnapshotPart") -> str:
    return f"{one.digest[:12]}  {one.uri}"


def _evaluation(one: "EvaluationPart") -> list[str]:
    interval = f"{one.mean:.3f}  (95 %: {one.low:.3f} to {one.high:.3f})"
    return [one.subject, interval, f"{one.episodes} episodes of {one.environment}"]
