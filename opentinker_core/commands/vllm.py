"""`opentinker vllm`: make vLLM's environment, and run its servers for a base model (docs/vllm.md)."""

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.servers import signals_as_interrupt

if TYPE_CHECKING:
    from opentinker_core.config.schema import VLLMConfig
    from opentinker_core.sampling.vllm.server import VLLMServer

app = typer.Typer(help="vLLM: make its environment, run its servers.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def setup(
    extra_index_url: Annotated[
        str, typer.Option(help="A package index with torch's CPU builds, where pip's own has none.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Install vLLM into an environment of its own; goes on from where an earlier try was stopped."""
    from opentinker_core.commands.models import progress_bar
    from opentinker_core.config.schema import RuntimeConfig
    from opentinker_core.config.settings import Settings
    from opentinker_core.models.placement import placement
    from opentinker_core.sampling.vllm.environment import ensure, package_for

    package = package_for(placement(RuntimeConfig()).device)
    options = [f"--extra-index-url={extra_index_url}"] if extra_index_url else []
    with progress_bar() as report:
        made = ensure(Settings().home, package, report, options)
    if as_json:
        typer.echo(
            json.dumps({"package": made.package, "versions": made.versions, "python": str(made.python)})
        )
    else:
        typer.echo(f"{made.package}, vLLM and torch {made.versions}\n  python  {made.python}")


@app.command()
def up(
    model: Annotated[
        str, typer.Option(help="Base model: a bundled name, hub id or directory.")
    ] = "smollm2-135m",
    endpoints: Annotated[int, typer.Option(min=1, max=64, help="Servers to start.")] = 1,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the first; the others follow.")] = 8100,
    max_loras: Annotated[int, typer.Option(min=0, max=256, help="Adapters in a batch; 0: none.")] = 8,
    max_lora_rank: Annotated[int, typer.Option(min=1, max=512, help="Largest rank of an adapter.")] = 16,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_model_len: Annotated[int, typer.Option(min=0, help="0: the model's context.")] = 0,
    gpu_memory: Annotated[float, typer.Option(min=0.01, max=1, help="Share of each GPU's memory.")] = 0.9,
    cpu_kv_cache_gb: Annotated[int, typer.Option(min=1, help="On CPU, GiB of keys and values.")] = 1,
    threads: Annotated[int, typer.Option(min=0, help="On CPU, threads of each server; 0: all cores.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    argument: Annotated[
        list[str] | None, typer.Option(help="A further argument of vLLM's server; may be given again.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as one JSON object.")] = False,
) -> None:
    """Serve a base model with vLLM, restart servers that end, and stay until Ctrl-C."""
    settings: dict[str, Any] = {
        "endpoints": endpoints,
        "max_loras": max_loras,
        "max_lora_rank": max_lora_rank,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "gpu_memory": gpu_memory,
        "cpu_kv_cache_gb": cpu_kv_cache_gb,
        "threads": threads,
        "arguments": tuple(argument or ()),
    }
    with signals_as_interrupt():
        servers = _start(_config(settings), model, device, port)
        try:
            _announce(servers, as_json)
            _stay(servers)
        except KeyboardInterrupt:
            typer.echo("stopping", err=True)
        finally:
            for server in servers:
                server.stop()


def _config(settings: dict[str, Any]) -> "VLLMConfig":
    from pydantic import ValidationError

    from opentinker_core.config.schema import VLLMConfig

    try:
        return VLLMConfig.model_validate(settings)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        option = f"--{str(detail['loc'][0]).replace('_', '-')}"
        raise UsageError(f"{option}: {detail['input']!r}: {detail['msg']}") from error


def _start(config: "VLLMConfig", model: str, device: str, port: int) -> "list[VLLMServer]":
    from opentinker_core.commands.models import progress_bar
    from opentinker_core.config.schema import RuntimeConfig
    from opentinker_core.config.settings import Settings
    from opentinker_core.models.placement import placement
    from opentinker_core.models.source import resolve
    from opentinker_core.sampling.vllm.opening import start_servers

    place = placement(RuntimeConfig(device=device))
    number = str(place.dtype).removeprefix("torch.")
    home = Settings().home
    with progress_bar() as report:
        source = resolve(model, home, report=report)
        return start_servers(
            source, config, home, device=place.device, dtype=number, port=port, report=report
        )


def _announce(servers: "Sequence[VLLMServer]", as_json: bool) -> None:
    urls = [server.url for server in servers]
    if as_json:
        print(json.dumps({"urls": urls, "logs": [str(server.log) for server in servers]}), flush=True)
        return
    for server in servers:
        typer.echo(f"vLLM  {server.url}  (log: {server.log})")
    typer.echo(f"use   runtime.sampler=vllm 'runtime.vllm.urls={json.dumps(urls)}'\nCtrl-C stops all of them")


def _stay(servers: "Sequence[VLLMServer]") -> None:
    """Return never; a server that is given up ends the rest.

    Raises:
        OpenTinkerError: names the server and its log.
    """
    while True:
        for server in servers:
            if server.failure:
                raise OpenTinkerError(f"vLLM at {server.url} is given up: {server.failure}")
        time.sleep(0.5)
