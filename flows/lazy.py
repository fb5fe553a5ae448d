"""A command group that imports a command's module only when that command is used."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True)
class Lazy:
    """Where a command lies: `module:attribute` of a function or a Typer app; and its line of help."""

    target: str
    help: str
    panel: str


class LazyGroup(TyperGroup):
    """Lists its commands from a table; resolves the one that is named."""

    table: dict[str, Lazy] = {}  # noqa: RUF012 - set by `lazy_group`

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.table, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in with name and help, enough for listing; `resolve_command` gives the real one."""
        if cmd_name not in self.table:
            return super().get_command(ctx, cmd_name)
        entry = self.table[cmd_name]
        return TyperCommand(name=cmd_name, help=entry.help, rich_help_panel=entry.panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not args or args[0] not in self.table:
            self.commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
            return super().resolve_command(ctx, args)
        return args[0], load(args[0], self.table[args[0]]), args[1:]


def lazy_group(table: dict[str, Lazy]) -> type[LazyGroup]:
    """A group class over `table`."""
    return type("LazyGroup", (LazyGroup,), {"table": table})


def load(name: str, entry: Lazy) -> Any:
    """Import the command behind `entry`."""
    module, _, attribute = entry.target.partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command(name)(found)
        found = app
    else:
        found._add_completion = False
    command = typer.main.get_command(found)
    command.name = name
    return command
