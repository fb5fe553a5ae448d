"""`opentinker keys`: API keys of the service (docs/service.md)."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opentinker_core.errors import UsageError

if TYPE_CHECKING:
    from opentinker_core.service.keys import ApiKey, Keys

app = typer.Typer(help="API keys of the service: make, list and revoke them.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_ROLES = ("reader", "member", "admin")


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What the key is for, such as a person or a job.")] = "key",
    tenant: Annotated[str, typer.Option(help="Whose key it is; empty: the installation's tenant.")] = "",
    role: Annotated[
        str,
        typer.Option(
            help="reader: sample; member: train, save and delete as well; admin: keys and audit log too."
        ),
    ] = "member",
    expires_in_days: Annotated[
        float | None, typer.Option(help="Days after which it is not taken any more.", show_default="never")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make an API key and show it, this once."""
    if role not in _ROLES:
        raise UsageError(f"--role: {role!r:.80}; accepted: {', '.join(_ROLES)}")
    from opentinker_core.service.principal import Role

    with _keys() as (keys, own):
        key, made = keys.create(tenant or own, name, Role(role), expires_in_days)
    if as_json:
        _print_json({"key": key, **_shown(made)})
        return
    typer.echo(key)
    typer.echo(
        f"key {made.key_id} ({made.name}), role {made.role}, tenant {made.tenant}; it is not shown again",
        err=True,
    )


@app.command("list")
def listed(
    tenant: Annotated[str, typer.Option(help="Only this tenant's.")] = "", as_json: AsJson = False
) -> None:
    """List the keys, without their secrets."""
    with _keys() as (keys, _):
        found = keys.listed(tenant or None)
    if as_json:
        _print_json({"keys": [_shown(key) for key in found]})
        return
    from opentinker_core.commands.policies import print_table

    rows = [
        (
            key.key_id,
            key.tenant,
            key.name,
            key.role.value,
            f"{key.created_at.astimezone():%Y-%m-%d %H:%M}",
            key.expires_at and f"{key.expires_at.astimezone():%Y-%m-%d %H:%M}",
            "revoked" if key.revoked_at else "active" if key.active else "expired",
        )
        for key in found
    ]
    print_table(("id", "tenant", "name", "role", "created", "expires", "state"), rows)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="Id of the key, as 'keys list' shows it.", metavar="ID")],
    as_json: AsJson = False,
) -> None:
    """Revoke a key; servers that run refuse it within seconds."""
    with _keys() as (keys, _):
        key = keys.revoke(key_id.removeprefix("tml-").partition("-")[0])
    if as_json:
        _print_json(_shown(key))
    else:
        typer.echo(f"key {key.key_id} ({key.name}) of tenant {key.tenant} is revoked")


@contextmanager
def _keys() -> "Iterator[tuple[Keys, str]]":
    """The keys of this installation, and its own tenant."""
    from opentinker_core.config.settings import Settings
    from opentinker_core.service.keys import Keys

    settings = Settings()
    keys = Keys(settings.resolved_catalog_url)
    try:
        yield keys, settings.tenant
    finally:
        keys.close()


def _shown(key: "ApiKey") -> dict[str, Any]:
    return {**vars(key), "active": key.active}


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, default=str))
