"""`opentinker env`: which environments there are, and whether one keeps the protocol's promises."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opentinker_core.commands.environment_server import serve

if TYPE_CHECKING:
    from envs.registry import EnvironmentInfo

app = typer.Typer(help="Environments: list, check, serve.", no_args_is_help=True)
_CALL_S = 10.0
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("list")
def list_environments(
    wanted: Annotated[
        str, typer.Argument(metavar="[FILTER]", help="Only this id, or ids that contain this.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the environments and their arguments. Classes of other packages go by `module:ClassName`."""
    from envs.registry import available

    known = available()
    found = [info for info in known if info.id == wanted]
    found = found or [info for info in known if wanted.lower() in info.id.lower()]
    if as_json:
        typer.echo(json.dumps({"environments": [_as_dict(info) for info in found]}))
        return
    for info in found:
        several = "[several agents] " if info.kind == "multi" else ""
        typer.echo(f"{info.id:<40} {several}{info.summary}")
        if len(found) <= 3:
            for one in info.arguments:
                typer.echo(f"    {one.name}: {one.kind}{f' = {one.default}' if one.default else ''}")
    if not found:
        typer.echo(f"no environment has {wanted!r} in its id")
    elif len(found) > 3:
        typer.echo(f"{len(found)} environments; `opentinker env list ID` shows the arguments of one")


@app.command("check")
def check(
    environment: Annotated[str, typer.Argument(metavar="ID", help="An id, or `module:ClassName`.")],
    arg: Annotated[
        list[str] | None, typer.Option("--arg", metavar="KEY=VALUE", help="An argument; repeatable.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=2, help="Episodes a script.")] = 8,
    max_turns: Annotated[int, typer.Option(min=1, help="After which an episode does not end.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Play scripted episodes, of one agent or of several, and report every broken promise.

    Exit code 1 if there is one.
    """
    from envs.conformance import check_environment
    from opentinker_core.agents.making import check_makeable
    from opentinker_core.config.schema import EnvironmentConfig
    from opentinker_core.errors import UsageError

    args = dict(_parsed(text) for text in arg or [])
    check_makeable(EnvironmentConfig(id=environment, args=args))
    try:
        report = check_environment(
            environment, args, seeds=seeds, max_turns=max_turns, tools={"calculator": _calculate}
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    typer.echo(json.dumps(report.as_dict()) if as_json else str(report))
    if not report.ok:
        raise typer.Exit(1)


app.command("serve")(serve)


def _calculate(arguments: Mapping[str, Any]) -> str:
    """For demonstrations that call the calculator."""
    from opentinker_core.agents.tools.calculator import Calculator
    from opentinker_core.agents.tools.protocol import Deadline

    return Calculator().call(arguments, Deadline.after(_CALL_S)).text


def _parsed(text: str) -> tuple[str, Any]:
    """`key=value`; the value is JSON if it can be read as such, else text."""
    from opentinker_core.errors import UsageError

    key, equals, value = text.partition("=")
    if not key.isidentifier() or not equals:
        raise UsageError(f"--arg: {text!r:.80} is not accepted; accepted: KEY=VALUE")
    if key == "split":
        raise UsageError("--arg: split is set by the check itself")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _as_dict(info: "EnvironmentInfo") -> dict[str, Any]:
    arguments = [{"name": one.name, "type": one.kind, "default": one.default} for one in info.arguments]
    return {"id": info.id, "kind": info.kind, "summary": info.summary, "arguments": arguments}
