"""`opentinker env serve`: environments for training on other machines (docs/environment_server.md)."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opentinker_core.errors import OpenTinkerError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envs.serving.server import Started

_LIMITS = "Limits"


def serve(
    environments: Annotated[
        list[str], typer.Argument(metavar="ID...", help="What to serve: ids, or `module:ClassName`.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.")] = 8010,
    shards: Annotated[int, typer.Option(help="Processes that environments run in.")] = 2,
    key_file: Annotated[
        Path | None,
        typer.Option(help="API keys, one a line; more of them in the variable OPENTINKER_ENV_KEYS."),
    ] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM file; with --tls-key.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file, without a password.")] = None,
    lease_s: Annotated[
        float, typer.Option(help="A session ends so long after its client was last heard of.")
    ] = 60.0,
    call_s: Annotated[
        float, typer.Option(help="A call may take so long; then its shard is killed and replaced.")
    ] = 60.0,
    idle_s: Annotated[
        float,
        typer.Option(help="A connection without a request on it is closed then.", rich_help_panel=_LIMITS),
    ] = 75.0,
    max_sessions: Annotated[int, typer.Option(help="Open at a time.", rich_help_panel=_LIMITS)] = 4096,
    max_sessions_per_key: Annotated[
        int, typer.Option(help="Open at a time for one key.", rich_help_panel=_LIMITS)
    ] = 4096,
    max_body_bytes: Annotated[int, typer.Option(help="Of a request.", rich_help_panel=_LIMITS)] = 4 << 20,
    max_answer_bytes: Annotated[
        int, typer.Option(help="Of what an environment shows.", rich_help_panel=_LIMITS)
    ] = 16 << 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when the server takes sessions.")
    ] = False,
) -> None:
    """Serve environments to `remote` environments elsewhere; stays until Ctrl-C or SIGTERM.

    Without keys only this machine can reach the server.
    """
    from envs.serving.config import ServerConfig
    from envs.serving.keys import read_keys
    from envs.serving.server import run

    _log()
    try:
        config = ServerConfig(
            environments=tuple(environments),
            host=host,
            port=port,
            keys=read_keys(key_file, os.environ),
            shards=shards,
            lease_s=lease_s,
            call_s=call_s,
            idle_s=idle_s,
            max_sessions=max_sessions,
            max_sessions_per_key=max_sessions_per_key,
            max_body_bytes=max_body_bytes,
            max_answer_bytes=max_answer_bytes,
            tls_certificate=tls_certificate,
            tls_key=tls_key,
        )
        run(config, lambda started: _announce(started, config.environments, as_json))
    except ValueError as error:
        raise UsageError(str(error)) from error
    except RuntimeError as error:
        raise OpenTinkerError(str(error)) from error


def _announce(started: "Started", environments: "Sequence[str]", as_json: bool) -> None:
    if as_json:
        print(json.dumps({"url": started.url, "shards": list(started.shards)}), flush=True)
        return
    print(f"serving {', '.join(environments)} at {started.url}; Ctrl-C stops the server", flush=True)


def _log() -> None:
    """What happens to shards, on stderr."""
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
