"""Open vLLM as the sampler of a runtime: servers of its own, or those that run already."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from opentinker_core.config.schema import VLLMConfig
from opentinker_core.lora.layout import ModelLayout
from opentinker_core.models.progress import Report, silent
from opentinker_core.models.source import ModelSource
from opentinker_core.sampling.vllm import environment
from opentinker_core.sampling.vllm.command import launch
from opentinker_core.sampling.vllm.endpoint import Endpoint
from opentinker_core.sampling.vllm.files import AdapterFiles, FetchSnapshot, ReadAdapter
from opentinker_core.sampling.vllm.fleet import Fleet
from opentinker_core.sampling.vllm.identity import check_identity, check_logprobs
from opentinker_core.sampling.vllm.sampler import VLLMSampler
from opentinker_core.sampling.vllm.server import VLLMServer, wait_until_ready
from opentinker_core.servers import check_port, free_port


def open_sampler(
    source: ModelSource,
    config: VLLMConfig,
    home: Path,
    *,
    device: str,
    dtype: str,
    layout: ModelLayout,
    max_context: int,
    fetch: FetchSnapshot,
    read_adapter: ReadAdapter,
    report: Report = silent,
) -> VLLMSampler:
    """A sampler of `source` on the servers that `config` names, or on new ones that end with the sampler.

    Args:
        device, dtype: the trainer's, in torch's words.
        fetch: gives the verified local directory of a snapshot, from its URI and digest.

    Raises:
        UsageError: a server serves another model, gives other logprobs, or takes no adapters.
        OpenTinkerError: vLLM is not installed, or a server does not start or answer.
    """
    home = home.expanduser().absolute()
    with ExitStack() as undo:
        servers: list[VLLMServer] = []
        if not config.urls:
            servers = start_servers(source, config, home, device=device, dtype=dtype, report=report)
            undo.callback(_stop, servers)
        urls = config.urls or tuple(server.url for server in servers)
        endpoints = [Endpoint(url, config.request_timeout_s, config.max_concurrent) for url in urls]
        for endpoint in endpoints:
            undo.callback(endpoint.close)
        served = [check_identity(endpoint, source, home) for endpoint in endpoints]
        for endpoint, one in zip(endpoints, served, strict=True):
            check_logprobs(endpoint, one)
        fleet = Fleet(
            endpoints,
            lambda endpoint: check_identity(endpoint, source, home),
            config.startup_timeout_s,
            lambda: _given_up(servers),
        )
        undo.callback(fleet.close)
        files = AdapterFiles(
            home / "vllm" / "adapters",
            fetch,
            read_adapter,
            base_model=source.name,
            dtype=dtype_of(config, dtype),
            max_rank=config.max_lora_rank,
            linear=next((name, inputs, outputs) for name, (inputs, outputs) in layout.shapes.items()),
        )
        undo.callback(files.close)
        sampler = VLLMSampler(
            fleet,
            files,
            base=served[0].names[0],
            with_adapters=config.max_loras > 0,
            max_context=min(max_context, *(one.max_model_len for one in served)),
            max_concurrent=config.max_concurrent,
            ending=lambda: _stop(servers),
        )
        undo.pop_all()
        return sampler


def start_servers(
    source: ModelSource,
    config: VLLMConfig,
    home: Path,
    *,
    device: str,
    dtype: str,
    port: int = 0,
    report: Report = silent,
) -> list[VLLMServer]:
    """Start `config.endpoints` servers and wait until they answer.

    Args:
        port: of the first, and the others follow; 0: any free ones.

    Raises:
        UsageError: a port is taken.
        OpenTinkerError: vLLM is not installed, or a server does not start.
    """
    home = home.expanduser().absolute()
    ports = [port + index if port else free_port() for index in range(config.endpoints)]
    for one in ports:
        check_port("--port", one)
    python = environment.installed(home, environment.package_for(device)).python
    number = dtype_of(config, dtype)
    servers = [
        VLLMServer(
            launch(python, source, config, dtype=number, device=device, port=one, home=home),
            one,
            home / "logs" / f"vllm-{one}.log",
        )
        for one in ports
    ]
    try:
        for server in servers:
            server.start()
        tick = partial(_tell, report, len(servers))
        wait_until_ready(servers, config.startup_timeout_s, tick)
    except BaseException:
        _stop(servers)
        raise
    return servers


def dtype_of(config: VLLMConfig, dtype: str) -> str:
    """The servers' number format: their own setting, else the trainer's."""
    return dtype if config.dtype == "auto" else config.dtype


def _tell(report: Report, total: int, ready: int) -> None:
    report("starting vLLM", ready, total)


def _stop(servers: Sequence[VLLMServer]) -> None:
    for server in servers:
        server.stop()


def _given_up(servers: Sequence[VLLMServer]) -> str | None:
    """Why no server of our own will come back, if none will."""
    failures = [server.failure for server in servers if server.failure]
    return "; ".join(failures) if failures and len(failures) == len(servers) else None
