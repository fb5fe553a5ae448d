"""`opentinker validate`: does what is checked here catch what it must?"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from opentinker_core.agents.coordination.trial import Verdict

app = typer.Typer(no_args_is_help=True, help="Try the checks of this installation on what is broken.")


@app.callback()
def _validate() -> None:
    """Try the checks of this installation on what is broken."""


@app.command()
def coordinator(
    generations: Annotated[int, typer.Option(min=2, max=100, help="Rollouts of each training.")] = 3,
    episodes: Annotated[int, typer.Option(min=4, max=10_000, help="Of each rollout.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Of all draws.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the coordinator and broken ones through the same trainings, and check their logs.

    No model takes part: scripted agents play gomoku and `collect` on a virtual clock; some crash
    or are late. Exit code 1 if a broken coordinator is not caught, or the right one is accused.
    """
    from rich.console import Console

    from opentinker_core.agents.coordination.trial import verdicts

    with Console(stderr=True).status("") as status:
        found = verdicts(generations, episodes, seed, lambda name: status.update(f"playing: {name}"))
    right = all(verdict.right for verdict in found)
    if as_json:
        typer.echo(json.dumps({"right": right, "coordinators": [_described(one) for one in found]}))
    else:
        _print(found)
    if not right:
        raise typer.Exit(1)


def _described(verdict: "Verdict") -> dict[str, Any]:
    return {
        "name": verdict.name,
        "summary": verdict.summary,
        "must_be_caught_by": verdict.expected,
        "right": verdict.right,
        "violations": {str(check): count for check, count in verdict.counts.items()},
        "first": verdict.violations[0].detail if verdict.violations else None,
        "win_rate": verdict.wins,
        "games": verdict.games,
        "seen_by_win_rate": verdict.seen_by_win_rate,
    }


def _print(found: "Sequence[Verdict]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("coordinator", "what is wrong with it", "violations", "win rate", "", title="Coordinators")
    for verdict in found:
        counts = sorted(verdict.counts.items(), key=lambda item: item[0] != verdict.expected)
        rate = f"{verdict.wins:.2f}{' [yellow]differs[/]' if verdict.seen_by_win_rate else ''}"
        table.add_row(
            verdict.name,
            verdict.summary,
            "\n".join(f"{check} {count}" for check, count in counts) or "none",
            rate,
            "[green]ok[/]" if verdict.right else "[red]WRONG[/]",
        )
    console = Console()
    console.print(table)
    mutants = [verdict for verdict in found if verdict.expected is not None]
    caught, seen = sum(one.caught for one in mutants), sum(one.seen_by_win_rate for one in mutants)
    console.print(
        f"The log gives away {caught} of {len(mutants)} broken coordinators, "
        f"the win rate of the better of two players (in {found[0].games} games, at 95 %) {seen}."
    )
