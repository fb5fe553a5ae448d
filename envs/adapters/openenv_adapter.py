"""`openenv/<address>`: an environment that a server of OpenEnv has, spoken to by its own protocol.

The server's `/schema` says what an action is; an episode is a session of `/ws`: `reset`, `step` and
`close` as JSON, answered by an observation, a reward and whether it is over. What the server is
written with does not matter here, and nothing of it has to be installed.
"""

import contextlib
import json
import math
import os
import time
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit, urlunsplit

from envs.adapters.libraries import library_seed, require_package
from envs.adapters.openenv_actions import Field, field_of, written
from envs.arguments import require
from envs.protocol import Action, Observation, Split, StepResult

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

PREFIX = "openenv/"
MAX_MESSAGE = 100 << 20
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_BUSY = "CAPACITY_REACHED"
_NOT_ACCEPTED = "VALIDATION_ERROR"
_PAUSE_S = 0.2


class OpenEnvError(Exception):
    """The server cannot be reached, or its environment failed; `code` is the server's own."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class OpenEnvironment:
    """An environment on a server of OpenEnv; arguments besides these go to its `reset`.

    The splits are the server's seeds, even or odd: whether problems follow from seeds, and differ, is
    for the server to say.

    Args:
        name: the address, such as `localhost:8000` or `https://name.hf.space`.
        split: which seeds are used.
        args: parameters of the server's `reset`, beside the seed.
        field: the part of an action that the text is put into; None: the only one that there is, or
            that is required; where it is not clear, the text has to be a JSON object.
        fixed: other parts, the same in each action.
        show: the part of an observation that is shown, dots going deeper; None: all of it, as JSON, or
            its only text.
        instruction: text put before the first observation.
        illegal: what an action does that is unreadable, or not valid for the server: end the episode
            at `penalty`, or be told why and act `again`.
        penalty: the reward of the action that loses by `illegal`.
        turns: actions after which the episode is cut off.
        patience_s: how long to wait for an answer, and for a place on a server that is full.
        token: the environment variable whose value is sent as a bearer token.
    """

    concurrent = True

    def __init__(
        self,
        name: str,
        split: Split = "train",
        args: dict[str, Any] | None = None,
        *,
        field: str | None = None,
        fixed: dict[str, Any] | None = None,
        show: str | None = None,
        instruction: str = "",
        illegal: Literal["lose", "again"] = "lose",
        penalty: float = -1.0,
        turns: int = 1000,
        patience_s: float = 60.0,
        token: str | None = None,
    ) -> None:
        require_package(PREFIX + name, "websockets")
        require("turns", turns, turns >= 1, "1 or more")
        require("patience_s", patience_s, 0 < patience_s < math.inf, "more than 0")
        given = "" if token is None else os.environ.get(token, "")
        require("token", token, token is None or bool(given), "an environment variable that is set")
        self._name = name
        self._http, self._ws = _addresses(name)
        self._headers = {"Authorization": f"Bearer {given}"} if given else {}
        self._patience = patience_s
        self._held_out = split == "held_out"
        self._parameters = args or {}
        self._fixed = fixed or {}
        self._show = show
        self._instruction = instruction
        self._illegal = illegal
        self._penalty = penalty
        self._turns = turns
        self._field: Field | None = field_of(PREFIX + name, self._schema(), field, self._fixed)
        self._connection: ClientConnection | None = None
        self._acted = self._illegals = 0

    def reset(self, seed: int) -> Observation:
        """Start the episode of `seed`, in a session of its own.

        Raises:
            OpenEnvError: the server cannot be reached, has no place in time, or its environment fails.
        """
        self.close()
        self._acted = self._illegals = 0
        chosen = library_seed("openenv", seed) // 2 * 2 + self._held_out
        begun = self._begun({"type": "reset", "data": self._parameters | {"seed": chosen}})
        if begun.get("done"):
            self.close()
            raise OpenEnvError(f"{PREFIX}{self._name}: the episode of seed {chosen} is over when it begins")
        return Observation.user(f"{self._instruction}{self._shown(begun)}\n")

    def step(self, action: Action) -> StepResult:
        """Send what the action says.

        Raises:
            RuntimeError: no episode is running.
            OpenEnvError: the environment fails, or the connection is lost.
        """
        if self._connection is None:
            raise RuntimeError("no episode is running: call reset first")
        self._acted += 1
        value = self._field.read(action.text) if self._field else _object(action.text)
        if value is None:
            return self._refused("it cannot be read")
        sent = self._fixed | ({self._field.name: value} if self._field else value)
        try:
            answer = self._asked({"type": "step", "data": sent})
        except OpenEnvError as error:
            if error.code == _NOT_ACCEPTED:
                return self._refused(str(error))
            self.close()
            raise
        done = bool(answer.get("done"))
        shown = Observation(()) if done else Observation.user(f"\n{self._shown(answer)}\n")
        return self._result(shown, float(answer.get("reward") or 0), done)

    def close(self) -> None:
        """End the session, if there is one: the server has the place again when this returns."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with contextlib.suppress(Exception):  # a connection that is lost already need not be closed
            connection.send('{"type": "close"}')
            with contextlib.suppress(TimeoutError):
                while True:  # the server closes when its environment is closed
                    connection.recv(self._patience)
        connection.close()

    def __del__(self) -> None:
        if getattr(self, "_connection", None) is not None:
            self.close()

    def _refused(self, why: str) -> StepResult:
        self._illegals += 1
        if self._illegal == "lose":
            return self._result(Observation(()), self._penalty, True)
        return self._result(Observation.user(f"\nnot accepted: {why}\n"), 0.0, False)

    def _result(self, shown: Observation, reward: float, done: bool) -> StepResult:
        truncated = not done and self._acted >= self._turns
        if done or truncated:
            self.close()
        info = {"illegal": self._illegals, "truncated": truncated}
        return StepResult(Observation(()) if truncated else shown, reward, done or truncated, info)

    def _shown(self, answer: dict[str, Any]) -> str:
        return written(f"{PREFIX}{self._name}", answer.get("observation") or {}, self._show)

    def _begun(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open a session and begin; while the server is full, again."""
        deadline = time.monotonic() + self._patience
        while True:
            self._connection = self._connected()
            try:
                return self._asked(request)
            except OpenEnvError as error:
                self.close()
                if error.code != _BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_S)

    def _connected(self) -> "ClientConnection":
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        proxy: Any = None if urlsplit(self._ws).hostname in _LOCAL else True
        try:
            return connect(
                self._ws,
                open_timeout=self._patience,
                max_size=MAX_MESSAGE,
                additional_headers=self._headers,
                proxy=proxy,
            )
        except (OSError, WebSocketException) as error:
            raise OpenEnvError(f"{self._ws} cannot be reached: {error}") from error

    def _asked(self, request: dict[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        connection = self._connection
        if connection is None:
            raise OpenEnvError(f"{self._ws}: the session was closed")
        try:
            with contextlib.suppress(ConnectionClosed):  # what it said before it closed is still to be read
                connection.send(json.dumps(request))
            answer = json.loads(connection.recv(self._patience))
        except TimeoutError:
            raise OpenEnvError(f"{self._ws} gave no answer in {self._patience:g} s") from None
        except (ConnectionClosed, ValueError) as error:
            raise OpenEnvError(f"{self._ws}: {error}") from error
        data = answer.get("data") or {}
        if answer.get("type") == "error":
            told = f"{data.get('message')}{_reasons(data.get('errors'))}"
            raise OpenEnvError(f"{self._ws}: {told}", str(data.get("code")))
        return data

    def _schema(self) -> dict[str, Any]:
        import httpx

        local = urlsplit(self._http).hostname in _LOCAL
        address = f"{self._http}/schema"
        try:
            answer = httpx.get(
                address,
                headers=self._headers,
                timeout=self._patience,
                trust_env=not local,
                follow_redirects=True,
            )
            answer.raise_for_status()
            return dict(answer.json()["action"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"environment: {PREFIX + self._name!r}: {address} tells no actions: {error!r:.200}; "
                "accepted: the address of a server of OpenEnv"
            ) from error


def _addresses(name: str) -> tuple[str, str]:
    """The addresses of a server for HTTP and for WebSockets."""
    parts = urlsplit(name if "://" in name else f"http://{name}")
    secure = {"http": False, "ws": False, "https": True, "wss": True}.get(parts.scheme)
    if secure is None or not parts.hostname:
        raise ValueError(f"environment: {PREFIX + name!r} is not accepted; accepted: openenv/<host>:<port>")
    path = parts.path.rstrip("/")
    http, ws = ("https", "wss") if secure else ("http", "ws")
    return urlunsplit((http, parts.netloc, path, "", "")), urlunsplit(
        (ws, parts.netloc, f"{path}/ws", "", "")
    )


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is, or that stands in it from its first to its last brace."""
    start, end = text.find("{"), text.rfind("}")
    try:
        value = json.loads(text[start : end + 1]) if start >= 0 else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _reasons(errors: Any) -> str:
    """What pydantic has against an action."""
    if not isinstance(errors, list):
        return ""
    told = [
        f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}"
        for one in errors
        if isinstance(one, dict)
    ]
    return f" ({'; '.join(told)[:500]})" if told else ""
