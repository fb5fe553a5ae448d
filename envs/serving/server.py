"""The server process: its socket, its start, and an end that closes every environment."""

import asyncio
import contextlib
import ipaddress
import logging
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from envs.serving.app import Interface
from envs.serving.config import ServerConfig
from envs.serving.keys import Keys
from envs.serving.metrics import Metrics
from envs.serving.process import Uvicorn, listen, on_stop, url, web_config
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
    server = Uvicorn(_web_config(config, interface))
    stop = asyncio.Event()
    with on_stop(stop.set):
        await sessions.start()
        try:
            await sessions.check(config.environments)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            if not serving.done():
                here = url(config.host, listener.getsockname()[1], secure=config.tls_certificate is not None)
                announce(Started(here, tuple(sessions.shards.pids)))
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
        return listen(config.host, config.port, _give_up_stuck_clients, backlog=1024)
    except OSError as error:
        raise ValueError(
            f"port: {config.port} cannot be listened on at {config.host} ({error.strerror}); "
            "accepted: a free port of an address of this machine"
        ) from error


def _give_up_stuck_clients(listener: socket.socket) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STUCK_S * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _STUCK_S)


def _web_config(config: ServerConfig, interface: Interface) -> uvicorn.Config:
    return web_config(
        interface.app(),
        "tls_certificate",
        config.tls_certificate,
        config.tls_key,
        http=_Impatient,
        ws="none",
        timeout_keep_alive=config.idle_s,
        timeout_graceful_shutdown=_CLOSING_S,
        limit_concurrency=_MOST_CONNECTIONS,
    )


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


def _allow_descriptors() -> None:
    """As many open connections as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _MOST_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, 2 * _MOST_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
