"""`opentinker models`: which base models are bundled, and fetching one ahead of its first use."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from opentinker_core.models.progress import Report

app = typer.Typer(help="Base models: list the bundled ones, fetch one.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the bundled base models. Local directories and hub ids are accepted too."""
    from opentinker_core.config.settings import Settings
    from opentinker_core.models.bundled import BUNDLED

    home = Settings().home
    models = [
        {
            "name": model.name,
            "description": model.description,
            "licence": model.licence,
            "fetched": model.directory(home).is_dir(),
            "path": str(model.directory(home)),
        }
        for model in BUNDLED.values()
    ]
    if as_json:
        typer.echo(json.dumps({"models": models}))
    else:
        _print_table(models)


@app.command("fetch")
def fetch_model(
    name: Annotated[str, typer.Argument(help="A bundled name, a hub id, or a local directory.")],
    as_json: AsJson = False,
) -> None:
    """Make a base model ready for use, and print where it lies and its digest."""
    from opentinker_core.config.settings import Settings
    from opentinker_core.models.source import resolve

    with progress_bar() as report:
        source = resolve(name, Settings().home, report=report)
    if as_json:
        typer.echo(json.dumps({"name": source.name, "path": str(source.path), "digest": source.digest}))
    else:
        typer.echo(f"{source.name}\n  path    {source.path}\n  digest  {source.digest}")


@contextmanager
def progress_bar() -> Iterator["Report"]:
    """A `report` that draws one progress bar on stderr, and nothing if nothing is reported."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", visible=False)

        def report(stage: str, done: int, total: int) -> None:
            progress.update(task, description=stage, completed=done, total=total or None, visible=True)

        yield report


def _print_table(models: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "description", "licence", "fetched", box=None)
    for model in models:
        table.add_row(
            model["name"], model["description"], model["licence"], "yes" if model["fetched"] else "no"
        )
    Console().print(table)
