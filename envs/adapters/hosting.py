"""Environments that play in processes of their own: one process an environment, forked for every episode.

`opened(spec)` finds or starts the process (`host`) of a library's environment; `HostedSingle` and
`HostedMulti` are our protocols over its episodes, and decide which problems belong to which split.
"""

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from envs.adapters.libraries import library_seed, shown
from envs.arguments import require
from envs.draws import draws_needed, split_of
from envs.multi import Actions, MultiEnvironment, Situation, Spoken, check_actions
from envs.protocol import Action, Environment, Observation, Split, StepResult
from envs.serving import wire

SplitBy = Literal["auto", "shown", "seed"]

MAX_HOSTS = 8
"""Processes that are kept without an episode, for the next one; the least recently used one goes first."""
START_SECONDS = 300.0
STEP_SECONDS = 120.0
"""After this the episode's process is killed."""
_END_SECONDS = 5.0
_SHARES = tuple(step / 200 for step in range(1, 200))


class HostedError(Exception):
    """The library raised, or its process ended."""


@dataclass(frozen=True)
class Spec:
    """What a host makes: `factory` (`module:function`) with `args`, which are JSON values."""

    id: str
    factory: str
    args: dict[str, Any]

    @property
    def key(self) -> str:
        """The same for what makes the same."""
        return json.dumps([self.factory, self.args], sort_keys=True)


@dataclass(frozen=True)
class Splitting:
    """How the problems are split; see `docs/adapters.md`."""

    split: Split
    by: SplitBy = "auto"
    held_out: float = 0.2

    def __post_init__(self) -> None:
        require("held_out", self.held_out, 0 <= self.held_out < 1, "at least 0, less than 1")

    def share(self, shown: list[str]) -> float | None:
        """Which share of the texts is held out, for what a library's episodes show first; None: seeds are.

        It is the one nearest to `held_out` that leaves none of the two splits empty.
        """
        if self.by == "seed":
            return None
        if self.held_out == 0:
            return 0.0
        shares = sorted((abs(one - self.held_out), one) for one in [self.held_out, *_SHARES])
        for _, share in shares:
            if len({split_of(text, share) for text in shown}) == 2:
                return share
        return None if self.by == "auto" else self.held_out


@dataclass
class Episode:
    """A process that plays one episode, and the socket to it."""

    host: "HostProcess"
    connection: socket.socket
    pid: int
    asking: bool = False
    closed: bool = False

    def ask(self, request: dict[str, Any]) -> Any:
        """Send a request and wait for its answer.

        Raises:
            TimeoutError: none came in `STEP_SECONDS`.
            HostedError: the library raised, or the process ended.
        """
        self.asking = True
        try:
            self.connection.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(read_line(self.connection, STEP_SECONDS))
        except TimeoutError:
            raise TimeoutError(f"the library gave no answer in {STEP_SECONDS:g} s") from None
        except OSError as error:
            raise HostedError(f"the process of this episode ended: {error}") from error
        self.asking = False
        if "raised" in answer:
            raise HostedError(answer["raised"])
        return answer["answer"]

    def close(self) -> None:
        """End the process; kill it if it is at work. Closing again does nothing."""
        if self.closed:
            return
        self.closed = True
        self.host.ended(self.pid, kill=self.asking)
        with contextlib.suppress(OSError):  # the other side may be gone already
            self.connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for the answer
        self.connection.close()


class HostProcess:
    """A running `envs.adapters.host`.

    Raises:
        ValueError: it cannot make what is asked for.
    """

    def __init__(self, spec: Spec) -> None:
        self.owner = os.getpid()
        self.episodes = 0
        # an episode that nobody closed is forgotten when it is collected, which may be at any line
        self._lock = threading.RLock()
        self._control, theirs = socket.socketpair()
        environment = os.environ | {
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYGAME_HIDE_SUPPORT_PROMPT": "1",
            "SDL_VIDEODRIVER": "dummy",
            "SDL_AUDIODRIVER": "dummy",
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),  # noqa: PTH100
        }
        with theirs:
            # -P: modules of the working directory must not hide the real ones
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "envs.adapters.host", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # libraries print
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            self._control.sendall(json.dumps({"factory": spec.factory, "args": spec.args}).encode() + b"\n")
            hello = json.loads(read_line(self._control, START_SECONDS))
        except (OSError, TimeoutError) as error:
            self.close()
            raise ValueError(f"environment: {spec.id!r} does not start: {error}") from error
        if "refused" in hello:
            self.close()
            raise ValueError(f"environment: {spec.id!r} is not accepted: {hello['refused']}")
        self.agents: tuple[str, ...] | None = None if hello["agents"] is None else tuple(hello["agents"])
        self.shown: list[str] = hello["shown"]

    @property
    def alive(self) -> bool:
        """Whether this process can use it (not one that was forked from it)."""
        return self.owner == os.getpid() and self._popen.poll() is None

    def open(self) -> Episode:
        """Begin an episode's process.

        Raises:
            HostedError: the host ended.
        """
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            try:
                socket.send_fds(self._control, [b'{"do": "open"}'], [theirs.fileno()])
                pid = json.loads(read_line(self._control, STEP_SECONDS))["pid"]
            except (OSError, TimeoutError) as error:
                ours.close()
                raise HostedError(f"the host of the environment ended: {error}") from error
            self.episodes += 1
        return Episode(self, ours, pid)

    def ended(self, pid: int, kill: bool) -> None:
        """An episode is over: forget it, and kill its process if that is wanted."""
        with self._lock:
            self.episodes -= 1
            if not kill or self.owner != os.getpid():
                return
            with contextlib.suppress(OSError):  # the host may have ended, and all its episodes with it
                self._control.sendall(json.dumps({"do": "kill", "pid": pid}).encode())
                read_line(self._control, STEP_SECONDS)

    def close(self) -> None:
        """End it, and all its episodes."""
        if self.owner != os.getpid():
            return
        self._control.close()  # on which it kills its episodes and ends
        try:
            self._popen.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


_hosts: OrderedDict[str, HostProcess] = OrderedDict()
_starting: dict[str, threading.Lock] = {}
"""By key: one thread starts a host, others that want the same wait, and nobody else."""
_lock = threading.Lock()


def opened(spec: Spec) -> HostProcess:
    """The process for a spec, started if there is none.

    Raises:
        ValueError: the library does not accept the spec.
    """
    with _lock:
        gate = _starting.setdefault(spec.key, threading.Lock())
    with gate:
        with _lock:
            running = _hosts.get(spec.key)
            if running is not None and running.alive:
                _hosts.move_to_end(spec.key)
                return running
        started = HostProcess(spec)
        atexit.register(started.close)
        with _lock:
            _hosts[spec.key] = started
            _hosts.move_to_end(spec.key)
            ended = _superfluous(spec.key)
    for one in ended:
        atexit.unregister(one.close)
        one.close()
    return started


def begun(spec: Spec) -> Episode:
    """A new process for an episode of a spec.

    Raises:
        ValueError: the library does not accept the spec.
        HostedError: two hosts ended.
    """
    try:
        return opened(spec).open()
    except HostedError:  # it was ended meanwhile: from outside, or as one too many
        return opened(spec).open()


def _superfluous(key: str) -> list[HostProcess]:
    """Take out hosts that are too many, but for `key`: the least recently used that play nothing."""
    idle = [other for other, one in _hosts.items() if one.episodes == 0 and other != key]
    return [_hosts.pop(other) for other in idle[: max(0, len(_hosts) - MAX_HOSTS)]]


def read_line(connection: socket.socket, seconds: float) -> bytes:
    """Read to the next end of a line.

    Raises:
        TimeoutError: it did not come in time.
        ConnectionError: the other side closed.
    """
    deadline = time.monotonic() + seconds
    read = bytearray()
    while not read.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionError("it closed the connection")
        read += part
    return bytes(read)


class _Hosted:
    """What environments of one and of several agents share: the episode's process, and its problem."""

    concurrent = True

    def __init__(self, spec: Spec, splitting: Splitting) -> None:
        self._episode: Episode | None = None
        self._spec = spec
        self._splitting = splitting
        running = opened(spec)
        self._agents = running.agents
        self._share = splitting.share(running.shown)

    def close(self) -> None:
        """End the episode that runs, if one does."""
        episode, self._episode = self._episode, None
        if episode is not None:
            episode.close()

    def __del__(self) -> None:
        self.close()

    def _begin(self, seed: int) -> Any:
        """End the episode that runs, and begin that of `seed`."""
        self.close()
        self._episode, first = self._drawn(seed)
        return first

    def _drawn(self, seed: int) -> tuple[Episode, Any]:
        """Draw episodes until one of the split comes, each in a process of its own; what it begins with."""
        split, share = self._splitting.split, self._share
        # where there are few problems, a split may be a smaller share than was asked for
        for draw in range(1 if share is None else 10 * draws_needed(split, share)):
            chosen = library_seed(self._spec.factory, seed, draw)
            if share is None:
                chosen = chosen // 2 * 2 + (split == "held_out")
            episode = begun(self._spec)
            try:
                first = episode.ask({"do": "reset", "seed": chosen})
            except BaseException:
                episode.close()
                raise
            if share is None or split_of(shown(first), share) == split:
                return episode, first
            episode.close()
        raise ValueError(
            f"{self._spec.id}: no episode of the split {split!r} came; accepted: "
            "another held_out, or split_by: seed, which tells them apart by nothing else"
        )

    def _ask(self, request: dict[str, Any]) -> Any:
        if self._episode is None:
            raise RuntimeError("no episode is running: call reset first")
        try:
            return self._episode.ask(request)
        except (HostedError, TimeoutError):
            self.close()
            raise


class HostedSingle(_Hosted):
    """An environment of one agent, played in processes of its own."""

    def reset(self, seed: int) -> Observation:
        """Start the episode of `seed`.

        Raises:
            ValueError: no episode of the split came.
            HostedError: the library raised.
        """
        return wire.observation_in(self._begin(seed))

    def step(self, action: Action) -> StepResult:
        """Take the agent's action.

        Raises:
            RuntimeError: no episode is running.
            HostedError: the library raised, or its process ended.
            TimeoutError: the library took too long; the episode's process was killed.
        """
        result = wire.result_in(self._ask({"do": "step", "text": action.text}))
        if result.done:
            self.close()
        return result


class HostedMulti(_Hosted):
    """An environment of several agents, played in processes of its own."""

    _situation = Situation(())
    _gone: tuple[str, ...] = ()

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of all agents, as the library has them."""
        return self._agents or ()

    def reset(self, seed: int) -> Situation:
        """Start the episode of `seed`.

        Raises:
            ValueError: no episode of the split came.
            HostedError: the library raised.
        """
        self._gone = ()
        self._situation = wire.situation_in(self._begin(seed))
        return self._situation

    def step(self, actions: Actions) -> Situation:
        """Take the agents' actions.

        Raises:
            RuntimeError: no episode is running.
            ValueError: the actions are not those that are asked for.
            HostedError: the library raised, or its process ended.
            TimeoutError: the library took too long; the episode's process was killed.
        """
        check_actions(self._situation, actions, self._gone)
        texts = {name: None if action is None else action.text for name, action in actions.items()}
        self._gone += tuple(name for name, text in texts.items() if text is None)
        self._situation = wire.situation_in(self._ask({"do": "step", "actions": texts}))
        if self._situation.done:
            self.close()
        return self._situation

    def recompute(self, seed: int, steps: Sequence[Spoken]) -> list[dict[str, float]]:
        """The rewards of a log: it is played again, in a process of its own.

        Raises:
            HostedError: the library raised, as it does over a log of another episode.
        """
        episode, first = self._drawn(seed)
        rewards: list[dict[str, float]] = []
        situation = wire.situation_in(first)
        try:
            for texts in steps:
                if not situation.done:
                    situation = wire.situation_in(episode.ask({"do": "step", "actions": dict(texts)}))
                    rewards.append({name: one for name, one in situation.rewards.items() if one})
                else:
                    rewards.append({})
        finally:
            episode.close()
        return rewards


def hosted(spec: Spec, splitting: Splitting) -> Environment | MultiEnvironment:
    """The environment of a spec, of one agent or of several.

    Raises:
        ValueError: the library does not accept the spec.
    """
    several = opened(spec).agents is not None
    return HostedMulti(spec, splitting) if several else HostedSingle(spec, splitting)
