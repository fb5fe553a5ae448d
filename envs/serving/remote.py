"""`remote`: an environment that runs on a server of environments, as if it ran here."""

import json
import math
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from envs.arguments import require
from envs.draws import stable_hash
from envs.multi import Actions, MultiEnvironment, Situation, Spoken
from envs.playing import BrokenError
from envs.protocol import Action, Call, Environment, Observation, Split, StepResult
from envs.serving import wire
from envs.serving.connection import RemoteSession, connection
from envs.serving.errors import (
    EnvironmentRaisedError,
    Reason,
    RemoteError,
    SessionLostError,
    UnreachableError,
)
from envs.serving.keys import KEY_VARIABLE

_NOT_RUNNING = "no episode is running: call reset first"


@dataclass(frozen=True)
class Place:
    """Which environment, and where: several servers share the seeds."""

    urls: tuple[str, ...]
    key: str | None = field(repr=False)
    timeout_s: float
    retries: int
    id: str
    split: Split
    args: dict[str, Any]

    @property
    def making(self) -> dict[str, Any]:
        """What a server is told to make."""
        return {"id": self.id, "split": self.split, "args": self.args}

    def order(self, seed: int) -> list[str]:
        """The servers, that of a seed first: it is the same one in every process."""
        first = stable_hash("remote", seed) % len(self.urls)
        return [*self.urls[first:], *self.urls[:first]]

    def ask(self, path: str, **fields: Any) -> Any:
        """Ask any server for what belongs to no session; the first that answers.

        Raises:
            RemoteError: none answers, or the answer is an error.
        """
        for url in self.urls[:-1]:
            try:
                return self.connection(url).request("POST", path, self.making | fields)
            except UnreachableError:
                continue
        return self.connection(self.urls[-1]).request("POST", path, self.making | fields)

    def connection(self, url: str) -> Any:
        """This process's connection to a server."""
        return connection(url, self.key, self.timeout_s, self.retries)


class _Remote:
    """What environments of one agent and of several have in common: a session, opened by `reset`."""

    concurrent = True

    def __init__(self, place: Place) -> None:
        self._place = place
        self._session: RemoteSession | None = None
        self._url = ""
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def close(self) -> None:
        """Have the environment closed on its server."""
        session = self._dropped()
        if session is not None:
            session.close()

    def _reset(self, seed: int) -> Any:
        """Start an episode on the server of its seed; on the next one if that cannot be reached."""
        order = self._place.order(seed)
        if self._session is not None and self._url == order[0]:
            try:
                return self._call("reset", seed=seed)
            except (SessionLostError, UnreachableError):
                pass  # the server has closed it, or will: a new one is begun
        self.close()
        for url in order[:-1]:
            try:
                return self._opened(url, seed)
            except UnreachableError:
                continue
        return self._opened(order[-1], seed)

    def _opened(self, url: str, seed: int, *, again: bool = True) -> Any:
        session = RemoteSession(self._place.connection(url), self._place.making)
        try:
            shown = session.open(seed)
        except UnreachableError:
            session.leave()  # it may have been opened: its answer did not arrive
            raise
        except SessionLostError as lost:
            if again and lost.reason == Reason.SHARD_ENDED:  # by another session's fault, perhaps
                return self._opened(url, seed, again=False)
            raise
        self._session, self._url = session, url
        self._finalizer = weakref.finalize(self, session.leave)
        self._finalizer.atexit = False  # the leases end by themselves
        return shown

    def _call(self, do: str, **fields: Any) -> Any:
        session = self._session
        if session is None:
            raise RemoteError(_NOT_RUNNING)
        try:
            return session.call(do, **fields)
        except EnvironmentRaisedError:
            raise  # the environment goes on
        except RemoteError:
            if self._session is session:  # how far the episode is, is not known
                self._dropped()
                session.leave()
            raise

    def _dropped(self) -> RemoteSession | None:
        session, self._session = self._session, None
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        return session


class RemoteEnvironment(_Remote):
    """An environment of one agent on a server.

    What its methods raise beyond the protocol is a `RemoteError`: the episode has failed, and `reset`
    starts another.
    """

    def reset(self, seed: int) -> Observation:
        """Start the episode that belongs to `seed`."""
        return _read(wire.observation_in, self._reset(seed))

    def step(self, action: Action) -> StepResult:
        """Take the agent's action."""
        return _read(wire.result_in, self._call("step", text=action.text))


class RemoteMultiEnvironment(_Remote):
    """An environment of several agents on a server; see `RemoteEnvironment`."""

    def __init__(self, place: Place, agents: tuple[str, ...]) -> None:
        super().__init__(place)
        self._agents = agents

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of all agents, as the server said."""
        return self._agents

    def reset(self, seed: int) -> Situation:
        """Start the episode that belongs to `seed`."""
        return _read(wire.situation_in, self._reset(seed))

    def step(self, actions: Actions) -> Situation:
        """Take the actions of one or more agents at once."""
        texts = {agent: None if action is None else action.text for agent, action in actions.items()}
        return _read(wire.situation_in, self._call("step_together", actions=texts))


class _Demonstrates:
    _call: Any

    def demonstration(self) -> Action:
        """A right action, as the server's environment shows it."""
        return _read(_action_in, self._call("demonstration"))


class _MultiDemonstrates:
    _call: Any

    def demonstration(self, agent: str) -> Action:
        """A good action of an agent, as the server's environment shows it."""
        return _read(_action_in, self._call("demonstration", agent=agent))


class _DemonstratesTools:
    _call: Any

    def demonstration_after(self, results: tuple[str, ...]) -> Action | tuple[Call, ...]:
        """What to do after results of tools, as the server's environment shows it."""
        return _read(wire.demonstration_in, self._call("demonstration_after", results=list(results)))


class _Recomputes:
    _place: Place

    def recompute(self, seed: int, steps: Sequence[Spoken]) -> list[dict[str, float]]:
        """Rewards from a log of actions, by the code of the server's environment."""
        return self._place.ask("/v1/recompute", seed=seed, steps=[dict(step) for step in steps])


def remote(
    split: Split = "train",
    *,
    url: str | Sequence[str],
    id: str,
    args: dict[str, Any] | None = None,
    key_env: str = KEY_VARIABLE,
    timeout_s: float = 120.0,
    retries: int = 5,
) -> Environment | MultiEnvironment:
    """An environment, of one agent or several, on a server that runs `opentinker env serve`.

    Args:
        split: as for every environment.
        url: of the server, such as `http://machine:8010`; of several: each takes its share of the seeds.
        id: of the environment, as the server serves it.
        args: of the environment.
        key_env: the variable that holds the server's key; it is not needed where the server has none.
        timeout_s: how long to wait for an answer.
        retries: how often to ask again where there is none.

    Raises:
        ValueError: an argument is not accepted, here or by the server, or the server cannot be reached.
    """
    urls = (url,) if isinstance(url, str) else tuple(url)
    require("url", url, bool(urls), "one URL or more")
    for one in urls:
        _check_url(one)
    require("timeout_s", timeout_s, math.isfinite(timeout_s) and timeout_s > 0, "more than 0 seconds")
    require("retries", retries, 0 <= retries <= 100, "0 to 100")
    key = os.environ.get(key_env) or None
    if key is None and key_env != KEY_VARIABLE:
        raise ValueError(
            f"key_env: {key_env!r:.80}: there is no such variable; accepted: one with a server's key"
        )
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ValueError(f"key_env: what {key_env} holds is not accepted; accepted: printable ASCII")
    try:
        json.dumps(args, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"args: {args!r:.80} cannot be sent ({error}); accepted: JSON values") from error
    place = Place(
        tuple(one.rstrip("/") for one in urls), key, timeout_s, retries, id, split, dict(args or {})
    )
    return _made(place, _described(place))


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        fine = fine and "@" not in parts.netloc and not parts.query and not parts.fragment
    except ValueError:
        fine = False
    # a key in it would stand in logs, so that not even the refused value is shown where there may be one
    shown = "..." if "@" in url else url
    require("url", shown, fine, "http://host:port or https://host:port, without a key in it")


def _made(place: Place, described: dict[str, Any]) -> Environment | MultiEnvironment:
    agents = described["agents"]
    kind = _class(
        agents is not None,
        described["demonstrates"],
        described["demonstrates_tools"],
        described["recomputes"],
    )
    made = kind(place) if agents is None else kind(place, agents)
    if described["unlimited"]:
        made.unlimited = True
    return made


@cache
def _class(several: bool, demonstrates: bool, tools: bool, recomputes: bool) -> Any:
    """A class that has the methods which the server's environment has, and no others."""
    extras: list[type] = []
    if demonstrates:
        extras.append(_MultiDemonstrates if several else _Demonstrates)
    if tools:
        extras.append(_DemonstratesTools)
    if recomputes:
        extras.append(_Recomputes)
    base = RemoteMultiEnvironment if several else RemoteEnvironment
    return type(base.__name__, (*extras, base), {"__doc__": base.__doc__, "__module__": __name__})


_known: dict[tuple[Any, ...], dict[str, Any]] = {}


def _described(place: Place) -> dict[str, Any]:
    """What a server says of an environment; asked once in a process.

    Raises:
        ValueError: the server cannot be reached, or does not accept it.
    """
    asked = (place.urls, place.key, json.dumps(place.making, sort_keys=True))
    if asked not in _known:
        try:
            _known[asked] = _read(_description_in, place.ask("/v1/describe"))
        except UnreachableError as error:
            raise ValueError(
                f"url: {error}; accepted: the address of a running `opentinker env serve`"
            ) from error
        except RemoteError as error:
            raise ValueError(str(error)) from error
    return _known[asked]


def _description_in(value: Any) -> dict[str, Any]:
    agents = value["agents"]
    names = ("demonstrates", "demonstrates_tools", "recomputes", "unlimited")
    return {"agents": None if agents is None else tuple(map(str, agents))} | {
        name: bool(value[name]) for name in names
    }


def _action_in(value: Any) -> Action:
    return Action(str(value["text"]))


def _read(decode: Any, value: Any) -> Any:
    """Decode what a server said.

    Raises:
        RemoteError: it is not what the protocol knows.
    """
    try:
        return decode(value)
    except (KeyError, TypeError, ValueError, AttributeError, BrokenError) as error:
        raise RemoteError(f"the server's answer cannot be read: {error}") from error
