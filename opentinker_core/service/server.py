"""The server process: what it needs to listen, its start, and an end that loses nothing."""

import asyncio
import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from envs.serving import process
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
        server = process.Uvicorn(web)
        key = app.state.keys.create(settings.tenant, FIRST_KEY, Role.ADMIN)[0] if needs_key else None
        stop, hurry = asyncio.Event(), asyncio.Event()  # set by the first signal, and by another one
        with process.on_stop(lambda: (hurry if stop.is_set() else stop).set()):
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                await _until_started(server, serving)
                names = tuple(model.name for model in service.models())
                url = process.url(config.host, config.port, secure=config.tls is not None)
                announce(Started(url, names, settings.tenant, key))
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


async def _until_started(server: uvicorn.Server, serving: "asyncio.Task[None]") -> None:
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


def _web_config(config: ServeConfig, app: "_Entrance") -> uvicorn.Config:
    """uvicorn's settings, its certificate read."""
    tls = config.tls
    if tls is not None:
        _check_readable("tls.certificate", tls.certificate)
        _check_readable("tls.key", tls.key)
    try:
        return process.web_config(
            app,
            "tls",
            tls.certificate if tls else None,
            tls.key if tls else None,
            host=config.host,
            port=config.port,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSING_S,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


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
    limit_s = config.limits.answer_timeout_s
    try:
        return process.listen(config.host, config.port, lambda one: _give_up_stuck_clients(one, limit_s))
    except ValueError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        field, value = ("host", config.host) if error.errno == errno.EADDRNOTAVAIL else ("port", config.port)
        raise UsageError(
            f"{field}: {value} cannot be listened on at {config.host}:{config.port} ({error.strerror}); "
            "accepted: a free port of an address of this machine, such as port=8001"
        ) from error


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
