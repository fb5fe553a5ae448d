"""`opentinker trajectories`: which sets a run recorded, and what stands in them, token by token."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from opentinker_core.config.settings import Settings
    from opentinker_core.policies.catalog import Catalog
    from opentinker_core.policies.types import Run, TrajectorySet
    from opentinker_core.trajectories.show import Decode
    from opentinker_core.trajectories.types import Trajectory

app = typer.Typer(help="Recorded trajectories: list a run's sets, show their tokens.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_ALL_RUNS = 2**31 - 1


@app.command("list")
def list_sets(
    run: Annotated[str, typer.Argument(help="A run's id (or its beginning), or its name (the newest).")],
    as_json: AsJson = False,
) -> None:
    """List the trajectory sets that a run recorded: what it trained on, and its evaluations."""
    from opentinker_core.runtime.workspace import Workspace

    catalog = Workspace().catalog
    found = catalog.run(run)
    sets = sorted(catalog.trajectory_sets(found.run_id), key=lambda item: (item.step, item.purpose, item.uri))
    if as_json:
        typer.echo(json.dumps({"run": found.run_id, "sets": [_set_summary(item) for item in sets]}))
    else:
        _print_sets(sets)


@app.command("show")
def show_set(
    target: Annotated[str, typer.Argument(help="A set's URI or id, or a run (its newest training set).")],
    limit: Annotated[int, typer.Option(min=0, help="Trajectories shown; 0: all.")] = 4,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show token ids instead of text.")] = False,
    model: Annotated[
        str,
        typer.Option(help="Decode with this model's tokenizer; default: the base model of the set's run."),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show trajectories: context dim, trained tokens coloured by turn, versions, rewards, stop reasons."""
    from opentinker_core.config.settings import Settings
    from opentinker_core.trajectories.show import mean_reward, summary

    settings = Settings()
    uri, digest, base_model = _locate(settings, target)
    trajectories = _load(settings, uri, digest)
    shown = trajectories[: limit or None]
    base_model = model or base_model
    decode = _decoder(settings.home, base_model) if base_model and not tokens else None
    if as_json:
        value = {
            "uri": uri,
            "digest": digest,
            "episodes": len(trajectories),
            "reward_mean": mean_reward(trajectories),
            "trajectories": [summary(trajectory, decode, tokens=tokens) for trajectory in shown],
        }
        typer.echo(json.dumps(value))
    else:
        _print_trajectories(uri, trajectories, shown, decode)


def find_set(catalog: "Catalog", target: str) -> tuple["TrajectorySet", "Run"]:
    """The newest training set of the run `target`, or the set whose id (or its beginning) is `target`.

    Raises:
        NotFoundError: there is neither, or the run recorded nothing yet.
        UsageError: the beginning of an id fits several sets.
    """
    from opentinker_core.errors import NotFoundError, UsageError

    try:
        run = catalog.run(target)
    except NotFoundError:
        run = None
    if run is not None:
        sets = catalog.trajectory_sets(run.run_id, purpose="train") or catalog.trajectory_sets(run.run_id)
        if not sets:
            raise NotFoundError(f"run {target!r} has recorded no trajectories yet")
        return max(sets, key=lambda item: item.step), run
    fitting = [
        (item, owner)
        for owner in catalog.runs(limit=_ALL_RUNS)
        for item in catalog.trajectory_sets(owner.run_id)
        if item.set_id.startswith(target)
    ]
    if not fitting:
        raise NotFoundError(
            f"{target!r:.80} is neither a run nor a trajectory set; "
            "accepted: the name or id of a run (`opentinker runs`), the id or URI of a set"
        )
    if len(fitting) > 1:
        raise UsageError(f"{target!r} fits {len(fitting)} trajectory sets; accepted: more of the id")
    return fitting[0]


def _locate(settings: "Settings", target: str) -> tuple[str, str | None, str]:
    """URI, digest and base model (empty where unknown) of what `target` names."""
    if "://" in target:
        return target, None, ""
    from opentinker_core.runtime.workspace import Workspace

    item, run = find_set(Workspace(settings).catalog, target)
    return item.uri, item.digest, str(run.config["policy"]["base_model"])


def _load(settings: "Settings", uri: str, digest: str | None) -> "list[Trajectory]":
    from opentinker_core.trajectories.store import TrajectoryStore

    # Any set can be shown, also one of another installation: its folder is opened as a store.
    folder = uri.rpartition("/")[0]
    cache = settings.home / "cache" / "trajectories"
    return TrajectoryStore(folder, cache, settings.s3_endpoint_url).load(uri, digest)


def _decoder(home: "Path", base_model: str) -> "Decode":
    from opentinker_core.models.loading import load_tokenizer
    from opentinker_core.models.source import resolve

    tokenizer = load_tokenizer(resolve(base_model, home))
    return lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _set_summary(item: "TrajectorySet") -> dict[str, Any]:
    value = asdict(item)
    value["created_at"] = item.created_at.isoformat() if item.created_at else None
    return value


def _print_sets(sets: "list[TrajectorySet]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("set", "step", "purpose", "sampled by", "episodes", "tokens", "reward", box=None)
    for item in sets:
        reward = "missing" if item.reward_mean is None else f"{item.reward_mean:.3f}"
        numbers = (str(item.episodes), str(item.tokens), reward)
        table.add_row(item.set_id, str(item.step), item.purpose, item.sampled_by, *numbers)
    Console().print(table)


def _print_trajectories(
    uri: str, trajectories: "list[Trajectory]", shown: "list[Trajectory]", decode: "Decode | None"
) -> None:
    from rich.console import Console

    from opentinker_core.trajectories.show import legend, mean_reward, render

    console = Console()
    reward = mean_reward(trajectories)
    console.print(uri, style="dim", soft_wrap=True, markup=False, highlight=False)
    console.print(
        f"{len(trajectories)} episodes, mean reward {'missing' if reward is None else f'{reward:.3f}'}"
    )
    brackets = console.color_system is None
    console.print(legend(brackets=brackets))
    for trajectory in shown:
        console.print(render(trajectory, decode, brackets=brackets))
    if len(shown) < len(trajectories):
        console.print(f"... and {len(trajectories) - len(shown)} more (--limit 0 shows all)", style="dim")
