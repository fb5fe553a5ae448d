"""HTTP by bare sockets: for clients that leave in the middle, or do not read what they are sent."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.waiting import PATIENCE_S


@dataclass
class Line:
    """A connection to a server, and what goes over it by hand."""

    socket: socket.socket
    key: str

    def head(self, method: str, path: str, length: int | None, kind: str = "application/json") -> None:
        """Send the head of a request; `length` None: a chunked body follows."""
        size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        lines = (
            f"{method} {path} HTTP/1.1",
            "Host: x",
            f"X-API-Key: {self.key}",
            f"Content-Type: {kind}",
            size,
        )
        self.socket.sendall("\r\n".join((*lines, "", "")).encode())

    def send(self, body: bytes) -> None:
        """Send a part of a body."""
        self.socket.sendall(body)

    def request(self, method: str, path: str, body: Any = None) -> None:
        """Send a whole request."""
        content = b"" if body is None else json.dumps(body).encode()
        self.head(method, path, len(content))
        self.send(content)

    def head_of_answer(self) -> bytes:
        """Read the head of an answer, and nothing more."""
        return self.read(b"\r\n\r\n", piece=1)

    def read(self, until: bytes, piece: int = 1 << 16) -> bytes:
        """Read until something has come, by so many bytes at a time."""
        read = bytearray()
        while read.find(until, -2 * piece - len(until)) < 0:
            more = self.socket.recv(piece)
            assert more, read[-1000:]
            read += more
        return bytes(read)

    def ended(self) -> bool:
        """Read to the end; gives whether the server ended the connection by force."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionError:
            return True
        return False

    def reset(self) -> None:
        """Leave without a goodbye, as a client that is killed with something unread."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


@contextmanager
def line(url: str, key: str, *, window: int | None = None) -> Iterator[Line]:
    """A connection; `window`: bytes that its side buffers at most, about."""
    parts = urlsplit(url)
    with socket.socket() as own:
        own.settimeout(PATIENCE_S)
        if window is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        own.connect((parts.hostname, parts.port))
        yield Line(own, key)
