"""`opentinker policies`, `versions`, `runs`, `rollback`, `fork`: look at the catalog and steer it."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from opentinker_core.policies.catalog import Catalog
    from opentinker_core.policies.types import PolicyVersion

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_WRAPPED = ("base model", "aliases", "error")
"""Columns of a table that may take several lines where the terminal is narrow."""
_WIDE = 1000
"""Characters a line where a table goes to a file or a pipe."""

PolicyName = Annotated[str, typer.Argument(help="Name of a policy.", metavar="POLICY", show_default=False)]


def policies(as_json: AsJson = False) -> None:
    """List the policies: base model, rank, number of versions, latest and best version."""
    with _catalog() as catalog:
        found = catalog.summaries()
    if as_json:
        listed = [{**_plain(one.policy), "versions": one.versions, "aliases": one.aliases} for one in found]
        _print_json({"policies": listed})
        return
    rows = [
        (
            one.policy.name,
            one.policy.base_model,
            one.policy.lora.rank,
            one.versions,
            one.aliases.get("latest"),
            one.aliases.get("best"),
            one.policy.forked_from,
        )
        for one in found
    ]
    print_table(("policy", "base model", "rank", "versions", "latest", "best", "forked from"), rows)


def versions(policy: PolicyName, as_json: AsJson = False) -> None:
    """List a policy's versions: where each came from, and the aliases that refer to it."""
    with _catalog() as catalog:
        found, aliases = catalog.versions(policy), catalog.aliases(policy)
    if as_json:
        listed = [_version_object(one, aliases) for one in found]
        _print_json({"policy": policy, "aliases": aliases, "versions": listed})
        return
    rows = [
        (
            one.ref,
            ", ".join(_aliases_of(one, aliases)),
            one.phase,
            one.step,
            one.parent,
            one.run_id and one.run_id[:8],
            one.sampler.digest[:8],
            f"{one.created_at.astimezone():%Y-%m-%d %H:%M}",
        )
        for one in found
    ]
    print_table(("version", "aliases", "phase", "step", "parent", "run", "digest", "published"), rows)


def runs(
    limit: Annotated[int, typer.Option(help="Show this many, the newest first.", min=1)] = 50,
    as_json: AsJson = False,
) -> None:
    """List training runs, the newest first."""
    with _catalog() as catalog:
        found = catalog.runs(limit)
        names = {policy.policy_id: policy.name for policy in catalog.policies()}
    if as_json:
        _print_json({"runs": [{**_plain(run), "policy": names[run.policy_id]} for run in found]})
        return
    rows = [
        (
            run.run_id,
            run.name,
            names[run.policy_id],
            run.status,
            f"{run.created_at.astimezone():%Y-%m-%d %H:%M}",
            run.error,
        )
        for run in found
    ]
    print_table(("run", "name", "policy", "status", "started", "error"), rows)


def rollback(
    policy: PolicyName,
    number: Annotated[int, typer.Argument(help="Number of an earlier version.", min=0, show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Make an earlier version the one that is sampled and continued from; nothing is deleted."""
    with _catalog() as catalog:
        version = catalog.rollback(policy, number)
        _report(catalog, version, as_json, f"{policy}: latest and rollout are {version.ref} now")


def fork(
    ref: Annotated[
        str, typer.Argument(help="POLICY, POLICY@VERSION or POLICY@ALIAS.", metavar="REF", show_default=False)
    ],
    new_name: Annotated[str, typer.Argument(help="Name of the new policy.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Start a new policy from a version of another one."""
    with _catalog() as catalog:
        version = catalog.fork(ref, new_name)
        _report(catalog, version, as_json, f"{version.ref} is a fork of {version.parent}")


@contextmanager
def _catalog() -> Iterator["Catalog"]:
    from opentinker_core.config.settings import Settings
    from opentinker_core.policies.catalog import Catalog

    settings = Settings()
    catalog = Catalog(settings.resolved_catalog_url, settings.tenant)
    try:
        yield catalog
    finally:
        catalog.close()


def _report(catalog: "Catalog", version: "PolicyVersion", as_json: bool, message: str) -> None:
    if as_json:
        aliases = catalog.aliases(version.policy_name)
        _print_json({"aliases": aliases, "version": _version_object(version, aliases)})
    else:
        typer.echo(message)


def _version_object(version: "PolicyVersion", aliases: dict[str, int]) -> dict[str, Any]:
    return {"ref": version.ref, **_plain(version), "aliases": _aliases_of(version, aliases)}


def _aliases_of(version: "PolicyVersion", aliases: dict[str, int]) -> list[str]:
    return [alias for alias, number in aliases.items() if number == version.number]


def _plain(value: object) -> Any:
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(value)


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(_finite(value), allow_nan=False))


def _finite(value: Any) -> Any:
    """`value` with null for what JSON has no number for (a metric may be nan)."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(columns: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> None:
    """Print rows under their columns' names."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column not in _WRAPPED)
    for row in rows:
        # Text: what users wrote is not markup.
        table.add_row(*(Text("" if value is None else str(value)) for value in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)  # what reads it, wants whole lines
    elif console.measure(table).minimum > console.width:
        for fixed in table.columns:  # rather in pieces than without its end
            fixed.no_wrap = False
    console.print(table if rows else "there is none yet")
