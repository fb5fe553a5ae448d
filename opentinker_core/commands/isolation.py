"""`opentinker isolation-report`: do policies that train together leave each other alone, on this machine?"""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from opentinker_core.config.schema import RuntimeConfig
    from opentinker_core.evaluation.isolation import Bench, Verdict
    from opentinker_core.evaluation.participants import Participant
    from opentinker_core.evaluation.solo import Deviation
    from opentinker_core.models.placement import Placement
    from opentinker_core.models.source import ModelSource

LIMIT = 1e-5
"""Largest relative difference of a float32 loss from that of PEFT and torch.optim.AdamW."""
_NARROW = 96
"""Tokens of a pass in the layout that cuts batches to pieces."""


def isolation_report(
    model: Annotated[str, typer.Option(help="A bundled name, a hub id, or a local directory.")] = "tiny",
    policies: Annotated[int, typer.Option(min=2, max=64, help="How many train together.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each comparison.")] = 3,
    idle_steps: Annotated[int, typer.Option(min=2, help="Steps of others while a policy idles.")] = 100,
    solo_steps: Annotated[int, typer.Option(min=1, help="Steps compared with training alone.")] = 20,
    device: Annotated[str, typer.Option(help="auto, cpu, or cuda:N.")] = "auto",
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option()] = "float32",
    threads: Annotated[int, typer.Option(min=0, max=1024, help="0: the physical cores.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train policies of ranks 1 to 64 together, change what is none of a policy's business, compare bits.

    Then compare each with PEFT and torch.optim.AdamW alone. Exit code 1 if anything differs.
    """
    from opentinker_core.commands.models import progress_bar
    from opentinker_core.config.schema import RuntimeConfig

    began = time.monotonic()
    lengths = _Lengths(steps, idle_steps, solo_steps)
    with progress_bar() as report:
        runtime = RuntimeConfig(device=device, dtype=dtype, threads=threads)
        result = _measure(model, runtime, policies, lengths, lambda stage: report(stage, 0, 0))
    if as_json:
        typer.echo(json.dumps(result.summary() | {"seconds": round(time.monotonic() - began, 1)}))
    else:
        _print(result)
    if not result.isolated:
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Lengths:
    """Numbers of optimizer steps."""

    compared: int
    idle: int
    solo: int


@dataclass(frozen=True)
class _Result:
    source: "ModelSource"
    place: "Placement"
    participants: "Sequence[Participant]"
    verdicts: "dict[str, list[Verdict]]"
    """By layout."""
    deviations: "list[Deviation]"
    limit: float | None
    """Of the loss; None: the number format is too coarse to say."""

    @property
    def isolated(self) -> bool:
        bitwise = all(verdict.isolated for found in self.verdicts.values() for verdict in found)
        return bitwise and all(self.agrees(deviation) for deviation in self.deviations)

    def agrees(self, deviation: "Deviation") -> bool:
        """Whether the policy came out as trained alone."""
        return self.limit is None or deviation.loss <= self.limit

    def summary(self) -> dict[str, Any]:
        """Everything, for JSON."""
        import torch

        return {
            "isolated": self.isolated,
            "model": self.source.name,
            "digest": self.source.digest,
            "device": self.place.device,
            "dtype": str(self.place.dtype).removeprefix("torch."),
            "threads": self.place.threads,
            "torch": torch.__version__,
            "policies": [_described(participant) for participant in self.participants],
            "layouts": {
                layout: [
                    {
                        "change": verdict.change,
                        "compared": verdict.compared,
                        "equal": {name: not differing for name, differing in verdict.differing.items()},
                        "differing": {name: found for name, found in verdict.differing.items() if found},
                    }
                    for verdict in verdicts
                ]
                for layout, verdicts in self.verdicts.items()
            },
            "alone": [
                {"policy": d.policy, "loss": d.loss, "weights": d.weights, "agrees": self.agrees(d)}
                for d in self.deviations
            ],
            "limit": self.limit,
        }


def _described(participant: "Participant") -> dict[str, Any]:
    return {
        "policy": participant.name,
        "lora": participant.lora.model_dump(mode="json"),
        "objective": participant.objective_name,
        "normalizer": str(participant.normalizer),
        "optimizer": participant.optimizer.model_dump(mode="json"),
    }


def _measure(
    model: str, runtime: "RuntimeConfig", count: int, lengths: _Lengths, started: Callable[[str], None]
) -> _Result:
    import torch

    from opentinker_core.config.settings import Settings
    from opentinker_core.evaluation.isolation import Bench
    from opentinker_core.evaluation.participants import participants
    from opentinker_core.models.loading import load_model
    from opentinker_core.models.placement import placement
    from opentinker_core.models.source import resolve

    place = placement(runtime)
    source = resolve(model, Settings().home, report=lambda stage, *_: started(stage))
    bench = Bench(load_model(source, place.device, place.dtype), source.name)
    trained = participants(count, bench.layout)
    found = _compare(bench, trained, lengths, started)
    apart = _alone(bench, source, place, trained, lengths, started)
    limit = LIMIT if place.dtype == torch.float32 else None
    return _Result(source, place, trained, found, apart, limit)


def _compare(
    bench: "Bench", trained: "Sequence[Participant]", lengths: _Lengths, started: Callable[[str], None]
) -> "dict[str, list[Verdict]]":
    from opentinker_core.evaluation.isolation import Setting, comparisons, idling, verdicts
    from opentinker_core.training.trainer import LayoutSettings

    wide = Setting(tuple(trained), lengths.compared)
    narrow = replace(wide, layout=LayoutSettings(_NARROW, pack=True))
    return {
        "rows share prefixes": verdicts(bench, [*comparisons(wide), idling(wide, lengths.idle)], started),
        f"rows are packed, passes have {_NARROW} tokens": verdicts(bench, comparisons(narrow), started),
    }


def _alone(
    bench: "Bench",
    source: "ModelSource",
    place: "Placement",
    trained: "Sequence[Participant]",
    lengths: _Lengths,
    started: Callable[[str], None],
) -> "list[Deviation]":
    from opentinker_core.evaluation.solo import deviations
    from opentinker_core.models.loading import load_model

    base = load_model(source, place.device, place.dtype)
    with tempfile.TemporaryDirectory(prefix="opentinker-") as scratch:
        return deviations(bench, base, trained, lengths.solo, Path(scratch), started)


def _print(result: _Result) -> None:
    from rich.console import Console

    from opentinker_core.evaluation.isolation import FIELDS

    console = Console()
    for layout, found in result.verdicts.items():
        table = _table(f"Bits, where {layout}", "changed", "policies", *FIELDS)
        for verdict in found:
            cells = [_cell(len(verdict.differing[name])) for name in FIELDS]
            table.add_row(verdict.change, str(verdict.compared), *cells)
        console.print(table)
    limit = f"accepted: {result.limit:.0e}" if result.limit else "not judged in this number format"
    title = f"Relative difference from PEFT and torch.optim.AdamW alone ({limit})"
    table = _table(title, "policy", "rank", "alpha", "targets", "objective", "loss", "weights")
    for participant, deviation in zip(result.participants, result.deviations, strict=True):
        colour = "green" if result.agrees(deviation) else "red"
        table.add_row(*_cells(participant), f"[{colour}]{deviation.loss:.1e}", f"{deviation.weights:.1e}")
    console.print(table)
    place = (
        f"{result.source.name}, {result.place.device}, {result.place.dtype}, {result.place.threads} threads"
    )
    answer = "[green]isolated" if result.isolated else "[red]not isolated"
    console.print(f"{answer}[/]: {len(result.participants)} policies on {place}")


def _table(title: str, *columns: str) -> "Table":
    from rich.table import Table

    return Table(*columns, title=f"\n{title}", title_justify="left", box=None, padding=(0, 1, 0, 0))


def _cell(differing: int) -> str:
    return f"[red]{differing} differ" if differing else "[green]equal"


def _cells(participant: "Participant") -> list[str]:
    lora, targets = participant.lora, participant.lora.target_modules
    named = targets if isinstance(targets, str) else " ".join(targets)
    return [participant.name, str(lora.rank), f"{lora.alpha:g}", named, participant.objective_name]
