"""The server process: what it needs to listen, its start, and an end that loses nothing."""

import asyncio
import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from opentinker_core.config.serving import ServeConfig
from opentinker_core.config.settings import Settings
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.service.keys import Keys
from opentinker_core.service.principal import Role

if TYPE_CHECKING:
    from opentinker_core.service.core import Service

_LOG = logging.getLogger(__name__)

FIRST_KEY = "first"
_KEEP_ALIVE_S = 75
"""Longer than clients and most proxies keep idle connections, so that they end them, not we."""
_CLOSING_S = 2
"""Time for answers that are being sent when everything else is done."""
_LAST_RESULTS_S = 0.3
"""Time for clients between two polls to fetch what was done last."""


@dataclass(frozen=True)
class Started:
    """A server that takes work."""

    url: str
    models: tuple[str, ...]
    tenant: str
    key: str | None
    """The first API key, if it was made now; it is not shown again."""


def run(config: ServeConfig, settings: Settings, announce: Callable[[Started], None]) -> None:
    """Serve until SIGTERM or SIGINT, then finish what runs and return.

    Args:
        announce: called when the server takes work.

    Raises:
        UsageError: host, port, certificate or a model cannot be used, or there is no API key and the server
            could be reached from elsewhere.
        OpenTinkerError: another server uses this installation, or the database cannot be opened.
    """
    listener = listen(config)
    with contextlib.closing(listener), _only_server(settings.home):
        entrance = _Entrance()
        web = _web_config(config, entrance)
        first = _needs_first_key(config, settings, listener)
        with asyncio.Runner(loop_factory=web.get_loop_factory()) as runner:
            runner.run(_serve(config, settings, listener, web, entrance, first, announce))


async def _serve(
    config: ServeConfig,
    settings: Settings,
    listener: socket.socket,
    web: uvicorn.Config,
    entrance: "_Entrance",
    needs_key: bool,
    announce: Callable[[Started], None],
) -> None:
    from opentinker_core.service.app import make_app  # with torch: not before all else is known to be right
    from opentinker_core.service.core import Service

    service = Service(config, settings)
    app = entrance.app = make_app(service)
    async with app.router.lifespan_context(app):
        server = _Uvicorn(web)
        key = app.state.keys.create(settings.tenant, FIRST_KEY, Role.ADMIN)[0] if needs_key else None
        stop, hurry = asyncio.Event(), asyncio.Event()
        with _told_to_stop(stop, hurry):
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                await _until_started(server, serving)
                names = tuple(model.name for model in service.models())
                announce(Started(_url(config), names, settings.tenant, key))
                stopped = asyncio.create_task(stop.wait())
                await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
                if stop.is_set():
                    await _drain(app, service, hurry, config.drain_timeout_s)
            finally:
                server.should_exit = True
                await serving


async def _drain(app: FastAPI, service: "Service", hurry: asyncio.Event, timeout_s: float) -> None:
    """Take no more work, and wait for what is there: until it is done, or the deadline, or another signal."""
    app.state.gate.open = False
    service.quotas.close()
    began = time.monotonic()
    _LOG.info("stopping: no new work is taken", extra={"fields": {"running": _running(app, service)}})
    while _running(app, service) and time.monotonic() - began < timeout_s and not hurry.is_set():
        await asyncio.sleep(0.05)
    left = _running(app, service)
    fields = {"seconds": round(time.monotonic() - began, 2), "given_up": left}
    _LOG.log(logging.WARNING if left else logging.INFO, "stopping: drained", extra={"fields": fields})
    if not hurry.is_set():
        await asyncio.sleep(min(_LAST_RESULTS_S, timeout_s))


def _running(app: FastAPI, service: "Service") -> int:
    """Units of work that are not done; a request may count more than once, but never not at all."""
    return app.state.gate.busy + service.quotas.running + service.futures.pending


async def _until_started(server: "_Uvicorn", serving: "asyncio.Task[None]") -> None:
    while not server.started:
        if serving.done():
            serving.result()
            raise OpenTinkerError("the server ended at its start")
        await asyncio.sleep(0.01)


class _Entrance:
    """The application as uvicorn is given it before there is one."""

    app: FastAPI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class _Uvicorn(uvicorn.Server):
    """Leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _told_to_stop(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """The first SIGTERM or SIGINT sets `stop`, another one `hurry`."""
    loop = asyncio.get_running_loop()

    def told() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _web_config(config: ServeConfig, app: "_Entrance") -> uvicorn.Config:
    """uvicorn's settings, its certificate read."""
    files: dict[str, Any] = {}
    if config.tls is not None:
        for name in ("certificate", "key"):
            _check_readable(f"tls.{name}", getattr(config.tls, name))
        # An encrypted key is refused by the wrong password; without one, OpenSSL would ask on the terminal.
        files = {"ssl_certfile": config.tls.certificate, "ssl_keyfile": config.tls.key}
        files["ssl_keyfile_password"] = "-"  # noqa: S105 - no password
    web = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSING_S,
        **files,
    )
    try:
        web.load()
    except OSError as error:  # of OpenSSL, too
        reason = error.strerror or str(error)
        raise UsageError(
            f"tls: {config.tls and config.tls.certificate} and {config.tls and config.tls.key}: {reason}; "
            "accepted: a PEM certificate and its private key, without a password"
        ) from error
    return web


def _check_readable(field: str, path: Path) -> None:
    try:
        with path.open("rb"):
            return
    except OSError as error:
        raise UsageError(f"{field}: {path}: {error.strerror}; accepted: a readable PEM file") from error


def listen(config: ServeConfig) -> socket.socket:
    """A socket of the configured address, which nobody can take any more.

    Raises:
        UsageError: it cannot be listened on.
    """
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(
            f"host: {config.host!r:.100}: {error.strerror}; accepted: an address of this machine"
        ) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _give_up_stuck_clients(listener, config.limits.answer_timeout_s)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        field, value = ("host", config.host) if error.errno == errno.EADDRNOTAVAIL else ("port", config.port)
        raise UsageError(
            f"{field}: {value} cannot be listened on at {config.host}:{config.port} ({error.strerror}); "
            "accepted: a free port of an address of this machine, such as port=8001"
        ) from error
    return listener


def _give_up_stuck_clients(listener: socket.socket, seconds: float) -> None:
    """Let the kernel break connections, which inherit this, whose client has not taken anything for so long.

    It alone sees what a client took of an answer that is buffered, and of one whose connection is closed.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(seconds * 1000)))


@contextlib.contextmanager
def _only_server(home: Path) -> Iterator[None]:
    """Hold the installation's lock: a second server would take the first one's models for lost."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "serve.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise OpenTinkerError(
                f"{home}: process {lock.read(20).strip() or 'unknown'} serves this installation already; "
                "accepted: one server at a time, with several models; or another OPENTINKER_HOME"
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def _needs_first_key(config: ServeConfig, settings: Settings, listener: socket.socket) -> bool:
    """Whether nobody could use the server.

    Raises:
        UsageError: and others than this machine's users could reach it.
    """
    with contextlib.closing(Keys(settings.resolved_catalog_url)) as keys:
        if any(key.active for key in keys.listed()):
            return False
    if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        raise UsageError(
            f"host: {config.host} can be reached from elsewhere, and there is no API key; make one first: "
            "opentinker keys create NAME --role admin"
        )
    return True


def _url(config: ServeConfig) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(config.host, config.host)  # noqa: S104
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{'https' if config.tls else 'http'}://{host}:{config.port}"
