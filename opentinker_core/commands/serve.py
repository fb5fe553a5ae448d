"""`opentinker serve`: the Tinker API and the OpenAI-compatible one, for many tenants (docs/service.md)."""

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from opentinker_core.errors import UsageError

if TYPE_CHECKING:
    from opentinker_core.service.server import Started

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="YAML file (an example: deployments/configs/serve.yaml), and settings that replace the file's "
        "or the defaults, such as models=smollm2-135m port=8001.",
    ),
]


def serve(
    arguments: Arguments = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the config and print it, without serving.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when the server takes work.")
    ] = False,
) -> None:
    """Serve base models to Tinker and OpenAI clients; stays until Ctrl-C or SIGTERM, then finishes what runs.

    Where there is no API key yet, and only this machine can reach the server, one is made and shown, once.
    """
    from opentinker_core.config.loading import load
    from opentinker_core.config.serving import ServeConfig
    from opentinker_core.config.settings import Settings

    file, overrides = _file_and_overrides(arguments or [])
    config = load(file, overrides, ServeConfig)
    settings = Settings()
    if dry_run:
        typer.echo(config.model_dump_json(indent=2))
        return

    began = time.monotonic()
    from opentinker_core.service.logs import log_json_lines
    from opentinker_core.service.server import run

    log_json_lines()
    run(config, settings, lambda started: _announce(started, time.monotonic() - began, as_json))


def _file_and_overrides(arguments: list[str]) -> tuple[str | None, list[str]]:
    files = [argument for argument in arguments if "=" not in argument]
    if len(files) > 1:
        raise UsageError(f"{', '.join(files)}: accepted: one config file, and settings key=value")
    return (files[0] if files else None), [argument for argument in arguments if "=" in argument]


def _announce(started: "Started", seconds: float, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**vars(started), "openai_url": f"{started.url}/v1"}), flush=True)
        return
    lines = [f"serving {', '.join(started.models)} at {started.url} (after {seconds:.1f} s)", ""]
    lines.append(f"  export TINKER_BASE_URL={started.url}")
    lines.append(f"  export OPENAI_BASE_URL={started.url}/v1")
    if started.key is None:
        lines.append("")
        lines.append("with TINKER_API_KEY or OPENAI_API_KEY as 'opentinker keys create' has shown it")
    else:
        lines.append(f"  export TINKER_API_KEY={started.key}")
        lines.append(f"  export OPENAI_API_KEY={started.key}")
        lines.append("")
        lines.append(f"a key of the role admin for tenant {started.tenant!r}; it is not shown again")
    print("\n".join([*lines, "Ctrl-C stops the server"]), flush=True)
