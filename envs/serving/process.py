"""What the process of a server is made of, whatever it serves: a socket, uvicorn, an end by signals."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

_HERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}  # noqa: S104
"""What reaches, from this machine, a server that listens on all addresses."""


def listen(
    host: str, port: int, prepare: Callable[[socket.socket], None], backlog: int = 128
) -> socket.socket:
    """A socket of the address, which nobody can take any more.

    Args:
        port: 0 for any free one.
        prepare: sets options of the socket, which its connections inherit.
        backlog: connections that may wait to be accepted.

    Raises:
        ValueError: `host` has no address.
        OSError: it cannot be listened on.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"host: {host!r:.100}: {reason}; accepted: an address of this machine") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        prepare(listener)
        listener.bind(address)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def url(host: str, port: int, *, secure: bool) -> str:
    """Where clients on this machine find a server that listens on `host`."""
    host = _HERE.get(host, host)
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{'https' if secure else 'http'}://{host}:{port}"


def web_config(
    app: Any, field: str, certificate: Path | None, key: Path | None, **settings: Any
) -> uvicorn.Config:
    """uvicorn's settings, its certificate read; it logs nothing, and `app` starts and ends without it.

    Args:
        field: what a message calls the certificate.
        certificate: a PEM file; None: no TLS, and no `key`.
        settings: further ones of uvicorn's.

    Raises:
        ValueError: certificate and key cannot be used.
    """
    if certificate is not None:
        settings = {**settings, "ssl_certfile": certificate, "ssl_keyfile": key}
        # An encrypted key is refused by the wrong password; without one, OpenSSL would ask on the terminal.
        settings["ssl_keyfile_password"] = "-"  # noqa: S105 - no password
    web = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, server_header=False, **settings
    )
    try:
        web.load()
    except OSError as error:  # of OpenSSL, too
        raise ValueError(
            f"{field}: {certificate} and {key}: {error.strerror or error}; "
            "accepted: a PEM certificate and its private key, without a password"
        ) from error
    return web


class Uvicorn(uvicorn.Server):
    """Leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def on_stop(told: Callable[[], None]) -> Iterator[None]:
    """Call `told` in the running event loop at each SIGTERM or SIGINT, instead of what these do."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
