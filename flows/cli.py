"""The `opentinker` command: which commands there are, and what becomes of errors.

A wrong request ends with exit code 2, a failure with 1, Ctrl-C with 130, each with one message.
"""

import os
import sys
from typing import Annotated

import typer
from pydantic import ValidationError

from flows.lazy import Lazy, lazy_group
from opentinker_core import __version__
from opentinker_core.errors import OpenTinkerError, UsageError

_TRAIN, _LOOK, _USE, _HOUSE = "Train", "Look", "Use", "Installation"

COMMANDS = {
    "train": Lazy("flows.run_commands:train", "Train a policy as a config says.", _TRAIN),
    "resume": Lazy("flows.run_commands:resume", "Go on with a run from its last published version.", _TRAIN),
    "evaluate": Lazy("flows.run_commands:evaluate", "Evaluate a version, or the base model.", _TRAIN),
    "runs": Lazy("opentinker_core.commands.policies:runs", "List training runs.", _LOOK),
    "policies": Lazy("opentinker_core.commands.policies:policies", "List policies.", _LOOK),
    "versions": Lazy("opentinker_core.commands.policies:versions", "List a policy's versions.", _LOOK),
    "lineage": Lazy(
        "opentinker_core.commands.lineage:lineage",
        "Show what trained a version and what it generated.",
        _LOOK,
    ),
    "trajectories": Lazy(
        "opentinker_core.commands.trajectories:app", "Recorded trajectories: show their tokens.", _LOOK
    ),
    "sample": Lazy("opentinker_core.commands.sample:sample", "Generate text with a version.", _USE),
    "export": Lazy("opentinker_core.commands.export:export", "Write a version as a PEFT directory.", _USE),
    "fork": Lazy("opentinker_core.commands.policies:fork", "Start a new policy from a version.", _USE),
    "rollback": Lazy(
        "opentinker_core.commands.policies:rollback", "Make an earlier version the latest.", _USE
    ),
    "models": Lazy(
        "opentinker_core.commands.models:app", "Base models: list the bundled ones, fetch one.", _HOUSE
    ),
    "env": Lazy("opentinker_core.commands.environments:app", "Environments: list, check, serve.", _HOUSE),
    "isolation-report": Lazy(
        "opentinker_core.commands.isolation:isolation_report",
        "Check that policies that train together do not touch each other.",
        _HOUSE,
    ),
    "validate": Lazy(
        "opentinker_core.commands.validate:app", "Try checks on what is broken: coordinators.", _HOUSE
    ),
    "sync": Lazy("opentinker_core.commands.lineage:sync", "Send what MLflow has not yet received.", _HOUSE),
    "deploy": Lazy(
        "flows.deploy:deploy", "Set up work pool, queues and deployments on a Prefect server.", _HOUSE
    ),
    "serve": Lazy(
        "opentinker_core.commands.serve:serve",
        "Serve base models to Tinker and OpenAI clients, for many tenants.",
        _HOUSE,
    ),
    "keys": Lazy("opentinker_core.commands.keys:app", "API keys of the service: make, list, revoke.", _HOUSE),
    "vllm": Lazy(
        "opentinker_core.commands.vllm:app",
        "vLLM as a sampler: make its environment, run its servers.",
        _HOUSE,
    ),
    "up": Lazy("flows.up:up", "Start the Prefect and MLflow servers of this installation.", _HOUSE),
}

app = typer.Typer(
    cls=lazy_group(COMMANDS),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train and sample many LoRA policies over one base model, with exact lineage.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"opentinker {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train and sample many LoRA policies over one base model, with exact lineage."""


def main() -> None:
    """Entry point of the command line."""
    code = run(sys.argv[1:])
    module = sys.modules.get("flows.orchestrator")
    if module is not None and module.current is not None and module.current.lost:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without Prefect's own end, which would wait for a server that is gone
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command; returns the exit code."""
    try:
        app(arguments, prog_name="opentinker")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except UsageError as error:
        return _fail(str(error), 2)
    except ValidationError as error:
        return _fail(_settings_message(error), 2)
    except OpenTinkerError as error:
        return _fail(str(error), 1)
    except UnicodeEncodeError:
        if not (wrong := [one for one in arguments if not _is_text(one)]):
            raise
        return _fail(f"{wrong[0]!r:.80}: accepted: text in UTF-8", 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader (`| head`) is gone; nothing more to say
        return 1
    except OSError as error:
        return _fail(_os_message(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return 0


def _is_text(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:  # bytes of the command line that are not UTF-8
        return False
    return True


def _fail(message: str, code: int) -> int:
    print(f"opentinker: {message}", file=sys.stderr)
    return code


def _settings_message(error: ValidationError) -> str:
    """Settings are the only pydantic objects that commands build unchecked; they come from variables."""
    lines = []
    for detail in error.errors(include_url=False):
        name = f"OPENTINKER_{'_'.join(str(part) for part in detail['loc']).upper()}"
        lines.append(f"{name}={detail['input']!r:.80}: {detail['msg']}")
    return "; ".join(lines)


def _os_message(error: OSError) -> str:
    places = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return ": ".join([*places[:1], error.strerror or str(error)])


if __name__ == "__main__":
    main()
