"""The server process: its socket, its start, and an end that closes every environment."""

import asyncio
import contextlib
import ipaddress
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from envs.serving.app import Interface
from envs.serving.config import ServerConfig
from envs.serving.keys import Keys
from envs.serving.metrics import Metrics
from envs.serving.sessions import Sessions

_LOG = logging.getLogger(__name__)

_STUCK_S = 60
"""How long a client may leave what it is sent unread, or its machine unreachable."""
_CLOSING_S = 5
"""How long running calls may still be answered when the server stops."""
_MOST_CONNECTIONS = 8192


@dataclass(frozen=True)
class Started:
    """A server that takes sessions."""

    url: str
    shards: tuple[int, ...]
    """Their process ids."""


def run(config: ServerConfig, announce: Callable[[Started], None]) -> None:
    """Serve until SIGTERM or SIGINT; then answer what runs, close all environments and return.

    Args:
        announce: called when the server takes sessions.

    Raises:
        ValueError: host, port, keys, certificate or an id cannot be used, or others than this machine could
            reach a server without keys.
        RuntimeError: the shards end at their start.
    """
    Keys(config.keys)
    with contextlib.closing(_listen(config)) as listener:
        address = listener.getsockname()
        if not config.keys and not ipaddress.ip_address(address[0]).is_loopback:
            raise ValueError(
                f"host: {config.host} can be reached from elsewhere, and there are no keys; "
                "accepted: keys (--key-file, OPENTINKER_ENV_KEYS), or a loopback host"
            )
        with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
            runner.run(_serve(config, listener, announce))


async def _serve(config: ServerConfig, listener: socket.socket, announce: Callable[[Started], None]) -> None:
    _allow_descriptors()
    metrics = Metrics()
    sessions = Sessions(config, metrics)
    interface = Interface(config, sessions, metrics)
    server = _Uvicorn(_web_config(config, interface))
    stop = asyncio.Event()
    with _told_to_stop(stop):
        await sessions.start()
        try:
            await sessions.check(config.environments)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            if not serving.done():
                announce(Started(_url(config, listener), tuple(sessions.shards.pids)))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            interface.stopping = True
            server.should_exit = True
            await serving
        finally:
            await sessions.stop()


def _listen(config: ServerConfig) -> socket.socket:
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ValueError(
            f"host: {config.host!r:.100}: {error.strerror}; accepted: an address of this machine"
        ) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit these
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STUCK_S * 1000)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _STUCK_S)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"port: {config.port} cannot be listened on at {config.host} ({error.strerror}); "
            "accepted: a free port of an address of this machine"
        ) from error
    return listener


def _web_config(config: ServerConfig, interface: Interface) -> uvicorn.Config:
    files: dict[str, Any] = {}
    if config.tls_certificate is not None:
        files = {"ssl_certfile": config.tls_certificate, "ssl_keyfile": config.tls_key}
        files["ssl_keyfile_password"] = "-"  # noqa: S105 - none: OpenSSL would ask on the terminal
    web = uvicorn.Config(
        interface.app(),
        http=_Impatient,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=config.idle_s,  # type: ignore[arg-type] # it may be a fraction,
        timeout_graceful_shutdown=_CLOSING_S,
        limit_concurrency=_MOST_CONNECTIONS,
        **files,
    )
    try:
        web.load()
    except OSError as error:  # of OpenSSL, too
        raise ValueError(
            f"tls_certificate: {config.tls_certificate} and {config.tls_key}: {error.strerror or error}; "
            "accepted: a PEM certificate and its private key, without a password"
        ) from error
    return web


class _Impatient(HttpToolsProtocol):
    """Closes connections on which no whole request comes: uvicorn does so only after a first answer."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        # uvicorn stops its timer at each piece of data, and would wait for the rest for ever
        timer = self.timeout_keep_alive_task
        waited_until = None if timer is None else timer.when()
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_request(waited_until)

    def _wait_for_request(self, until: float | None = None) -> None:
        if self.timeout_keep_alive_task is None and not self.transport.is_closing():
            until = until or self.loop.time() + self.timeout_keep_alive
            self.timeout_keep_alive_task = self.loop.call_at(until, self.timeout_keep_alive_handler)


class _Uvicorn(uvicorn.Server):
    """Leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _told_to_stop(stop: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _allow_descriptors() -> None:
    """As many open connections as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _MOST_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, 2 * _MOST_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _url(config: ServerConfig, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(config.host, config.host)  # noqa: S104
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{'https' if config.tls_certificate else 'http'}://{host}:{port}"
