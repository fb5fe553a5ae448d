"""The client's side of the wire: requests that are asked again, and sessions whose leases are kept.

One `Connection` for each server and key of a process, shared by all its environments; threads may use it at
the same time. It keeps the leases of open sessions by a thread that runs while there are any.
"""

import contextlib
import json
import os
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from envs.serving.errors import (
    WORTH_ANOTHER_TRY,
    Code,
    EnvironmentRaisedError,
    EnvironmentValueError,
    RefusedError,
    RemoteError,
    SessionLostError,
    UnreachableError,
)

if TYPE_CHECKING:
    import httpx

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_HURRY_S = 5.0
_BEATS_PER_LEASE = 4
_KEPT_ALIVE_S = 60
"""Less than servers keep idle connections: between two turns of an agent there may be long sampling."""
_ABRUPT_STATUS = frozenset({408, 502, 503, 504})
"""Of proxies, and of a server that has too many connections: without a code of ours, worth another try."""


class Connection:
    """To one server, with one key."""

    def __init__(self, url: str, key: str | None, timeout_s: float, retries: int) -> None:
        """Nothing is sent yet.

        Args:
            url: such as `http://machine:8010`.
            timeout_s: how long to wait for an answer.
            retries: how often to ask again where there is none.
        """
        import httpx

        self.url = url
        self._timeout_s, self._retries = timeout_s, retries
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._tls = httpx.create_ssl_context()
        self._idle: deque[httpx.Client] = deque()
        self._random = random.Random()  # not the process's: environments leave that alone
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._left: deque[str] = deque()
        self._lease_s = 0.0
        self._keeper: threading.Thread | None = None

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, hurry: bool = False
    ) -> Any:
        """Ask until there is an answer; what is asked must be safe to be asked twice.

        `hurry`: it is not worth a long wait.

        Raises:
            UnreachableError: there was none, after all retries.
            RemoteError: the answer is an error; its class says which.
        """
        import httpx

        content = b"" if body is None else json.dumps(body).encode()
        timeout = self._timeout_s if not hurry else min(self._timeout_s, _HURRY_S)
        retries = self._retries if not hurry else min(self._retries, 1)
        for attempt in range(retries + 1):
            if attempt:
                pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1))
                time.sleep(pause * (0.5 + self._random.random() / 2))  # not all clients at once
            last = attempt == retries
            try:
                answer = self._asked(method, path, content, timeout)
            except httpx.TransportError as error:
                if last:
                    why = str(error) or type(error).__name__
                    raise UnreachableError(
                        f"{self.url}: no answer, asked {attempt + 1} times: {why}"
                    ) from error
                continue
            if answer.status_code < 300:
                return _json(answer, self.url) if answer.content else None
            error_of_answer, again = _error(answer, self.url)
            if last or not again:
                raise error_of_answer
        raise AssertionError("unreachable")

    def _asked(self, method: str, path: str, content: bytes, timeout: float) -> "httpx.Response":
        """Ask once, over a client that no other thread uses: one for all is slow where many threads wait."""
        import httpx

        try:
            client = self._idle.pop()  # the last that was used: its connection is likely still open
        except IndexError:
            limits = httpx.Limits(keepalive_expiry=_KEPT_ALIVE_S)
            client = httpx.Client(base_url=self.url, headers=self._headers, verify=self._tls, limits=limits)
        try:
            return client.request(method, path, content=content, timeout=timeout)
        finally:
            self._idle.append(client)

    def opened(self, session: str, lease_s: float) -> None:
        """Keep a session's lease from now on."""
        with self._lock:
            self._lease_s = lease_s
            self._open.add(session)
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name=f"leases of {self.url}", daemon=True)
                self._keeper.start()

    def closed(self, session: str) -> None:
        """Keep it no more."""
        with self._lock:
            self._open.discard(session)

    def leave(self, session: str) -> None:
        """Have a session closed with the next renewal; may be called by the garbage collector."""
        self._left.append(session)

    def _keep(self) -> None:
        """Renew leases a few times in the length of one, in one request for all sessions."""
        while True:
            time.sleep(self._lease_s / _BEATS_PER_LEASE)
            left = [self._left.popleft() for _ in range(len(self._left))]
            with self._lock:
                self._open.difference_update(left)
                renewed = sorted(self._open)
                if not renewed and not left:
                    self._keeper = None
                    return
            self._renew(renewed, left)

    def _renew(self, renewed: list[str], left: list[str]) -> None:
        most = 5000
        for start in range(0, max(len(renewed), len(left)), most):
            body = {"renew": renewed[start : start + most], "close": left[start : start + most]}
            try:
                content = json.dumps(body).encode()
                answer = self._asked("POST", "/v1/leases", content, max(1.0, self._lease_s / 2))
                lost = answer.json()["lost"] if answer.status_code == 200 else {}
            except (ValueError, KeyError, OSError, _http_error()):
                continue  # the next beat comes in time; if not, the next call hears of the loss
            with self._lock:
                self._open.difference_update(lost)


class RemoteSession:
    """One environment on a server; its calls are numbered."""

    def __init__(self, connection: Connection, making: Mapping[str, Any]) -> None:
        """Nothing is sent yet."""
        self.connection = connection
        self.name = uuid.uuid4().hex
        self._making = making
        self._number = 0
        self._owner = os.getpid()

    def open(self, seed: int) -> Any:
        """Make the environment, and start the episode of `seed`; gives what is shown."""
        answer = self.connection.request("PUT", self._path, {**self._making, "seed": seed})
        try:
            lease_s, shown = float(answer["lease_s"]), answer["shown"]
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteError(f"{self.connection.url}: the answer is not an environment server's") from error
        self.connection.opened(self.name, lease_s)
        return shown

    @property
    def ours(self) -> bool:
        """Whether this process opened it, and not the one that it was forked from."""
        return os.getpid() == self._owner

    def call(self, do: str, **fields: Any) -> Any:
        """Let the environment do something."""
        if not self.ours:
            raise SessionLostError("the session is of the process that this one was forked from", "unknown")
        self._number += 1
        body = {"call": {"number": self._number, "do": do, **fields}}
        return self.connection.request("POST", f"{self._path}/calls", body)

    def close(self) -> None:
        """Have the environment closed; a server that does not answer closes it when the lease ends."""
        if not self.ours:
            return
        self.connection.closed(self.name)
        with contextlib.suppress(RemoteError):
            self.connection.request("DELETE", self._path, hurry=True)

    def leave(self) -> None:
        """As `close`, later, without waiting."""
        if self.ours:
            self.connection.leave(self.name)

    @property
    def _path(self) -> str:
        return f"/v1/sessions/{self.name}"


_connections: dict[tuple[str, str | None, float, int], Connection] = {}
_lock = threading.Lock()


def connection(url: str, key: str | None, timeout_s: float, retries: int) -> Connection:
    """This process's connection to a server."""
    with _lock:
        wanted = (url, key, timeout_s, retries)
        if wanted not in _connections:
            _connections[wanted] = Connection(*wanted)
        return _connections[wanted]


def _forget() -> None:
    """In a forked process: sockets and threads are the parent's."""
    global _lock
    _lock = threading.Lock()
    _connections.clear()


os.register_at_fork(after_in_child=_forget)


def _error(answer: "httpx.Response", url: str) -> tuple[RemoteError, bool]:
    """The error that an answer is, and whether to ask again."""
    try:
        said = answer.json()["error"]
        code, message = str(said["code"]), str(said["message"])
    except (ValueError, KeyError, TypeError):
        again = answer.status_code in _ABRUPT_STATUS
        return UnreachableError(f"{url}: answered with status {answer.status_code}, and no reason"), again
    text = f"{url}: {message}"
    match code:
        case Code.SESSION_LOST:
            return SessionLostError(text, str(said.get("reason"))), False
        case Code.ENVIRONMENT_RAISED:
            raised = EnvironmentValueError if said.get("is_value_error") else EnvironmentRaisedError
            return raised(f"{said.get('type')}: {message}"), False
        case Code.ENVIRONMENT_BROKEN:
            return EnvironmentRaisedError(text), False
        case Code.CALL_FAILED:
            return RemoteError(text), said.get("reason") == "shard_ended"
        case Code.INTERNAL:
            return RemoteError(text), False
    return RefusedError(text), code in WORTH_ANOTHER_TRY


def _json(answer: "httpx.Response", url: str) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise RemoteError(f"{url}: the answer is not JSON; is it an environment server?") from error


def _http_error() -> type[Exception]:
    import httpx

    return httpx.HTTPError
