"""The process in which another library plays: `python -m envs.adapters.host <file descriptor>`.

It makes one environment of the library and then forks a process for every episode, so that each
starts from the same, unplayed copy. What libraries keep in places that all their environments share
(the generators of `random` and `numpy.random`, mutable defaults, caches) is thereby the episode's
own; one that hangs or crashes takes only itself along. PYTHONHASHSEED is fixed for the order of sets.
"""

import ctypes
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import warnings
from typing import Any

import numpy as np

from envs.adapters.libraries import RefusedError, library_seed, shown
from envs.multi import MultiEnvironment
from envs.protocol import Action, Closes, Environment
from envs.serving import wire

PROBES = 32
"""Episodes that are begun once, to see whether their problems differ by what they show first."""
_SWEEP_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def play(environment: Environment | MultiEnvironment, request: dict[str, Any]) -> Any:
    """Do one `reset` or `step`; the answer as JSON values."""
    several = isinstance(environment, MultiEnvironment)
    if request["do"] == "reset":
        random.seed(request["seed"])
        np.random.seed(request["seed"])
        begun: Any = environment.reset(request["seed"])
        return wire.situation_out(begun) if several else wire.observation_out(begun)
    if several:
        actions = {name: None if text is None else Action(text) for name, text in request["actions"].items()}
        return wire.situation_out(environment.step(actions))  # type: ignore[arg-type]
    return wire.result_out(environment.step(Action(request["text"])))  # type: ignore[arg-type]


def serve_episode(environment: Environment | MultiEnvironment, connection: socket.socket) -> None:
    """Play what is asked until the other side closes."""
    with connection, connection.makefile("rwb") as stream:
        for line in stream:
            try:
                answer = json.dumps({"answer": play(environment, json.loads(line))}, allow_nan=False)
            except Exception as error:  # noqa: BLE001  whatever the library raises is told to the other side
                answer = json.dumps({"raised": f"{type(error).__name__}: {error}"})
            stream.write(answer.encode() + b"\n")
            stream.flush()
    if isinstance(environment, Closes):
        environment.close()


class Host:
    """One environment, unplayed, and the processes of its episodes."""

    def __init__(self, control: socket.socket, environment: Environment | MultiEnvironment) -> None:
        self._control = control
        self._environment = environment
        self._children: set[int] = set()

    def serve(self) -> None:
        """Fork an episode for each socket that comes, until the other side is gone."""
        while True:
            self._reap()
            # what ended is swept up also while nobody asks for anything
            if not select.select([self._control], [], [], _SWEEP_SECONDS)[0]:
                continue
            message, descriptors, _, _ = socket.recv_fds(self._control, 4096, 1)
            if not message:
                return
            request = json.loads(message)
            if request["do"] == "open":
                self._fork(socket.socket(fileno=descriptors[0]))
            elif request["pid"] in self._children:  # nobody else reaps, so the number is still its own
                os.kill(request["pid"], signal.SIGKILL)
                self._send({})
            else:
                self._send({})

    def end(self) -> None:
        """Kill every episode that still runs."""
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)

    def _fork(self, connection: socket.socket) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _end_with(parent)
                self._control.close()
                serve_episode(self._environment, connection)
                code = 0
            finally:
                os._exit(code)
        self._children.add(pid)
        connection.close()
        self._send({"pid": pid})

    def _reap(self) -> None:
        for pid in list(self._children):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._children.remove(pid)

    def _send(self, value: dict[str, Any]) -> None:
        self._control.sendall(json.dumps(value).encode() + b"\n")


def _end_with(parent: int) -> None:
    """Be killed when the host is, as nobody else can then end an episode that hangs (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _probe(environment: Environment | MultiEnvironment) -> list[str]:
    """What some episodes show first; in a process of its own, so that nothing is played here."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        serve_episode(environment, theirs)
        os._exit(0)
    theirs.close()
    texts = []
    with ours, ours.makefile("rwb") as stream:
        for number in range(PROBES):
            stream.write(json.dumps({"do": "reset", "seed": library_seed("probe", number)}).encode() + b"\n")
            stream.flush()
            answer = json.loads(stream.readline() or '{"raised": "the process ended"}')
            if "raised" in answer:
                raise RefusedError(f"it cannot be reset: {answer['raised']}")
            texts.append(shown(answer["answer"]))
    os.waitpid(pid, 0)
    return texts


def _make(spec: dict[str, Any]) -> Environment | MultiEnvironment:
    module, _, name = spec["factory"].partition(":")
    random.seed(0)
    np.random.seed(0)
    return getattr(importlib.import_module(module), name)(**spec["args"])


def main() -> None:
    """Make the environment that is asked for, say what it is, and serve its episodes."""
    warnings.simplefilter("ignore")
    control = socket.socket(fileno=int(sys.argv[1]))
    with control, control.makefile("rb") as stream:
        spec = json.loads(stream.readline())
        try:
            environment = _make(spec)
            several = isinstance(environment, MultiEnvironment)
            hello: dict[str, Any] = {
                "agents": list(environment.agents) if several else None,  # type: ignore[union-attr]
                "shown": _probe(environment),
            }
        except Exception as error:  # noqa: BLE001  as above
            kind = "" if isinstance(error, RefusedError) else f"{type(error).__name__}: "
            hello = {"refused": f"{kind}{error}"}
        control.sendall(json.dumps(hello).encode() + b"\n")
        if "refused" in hello:
            return
        gc.freeze()
        host = Host(control, environment)
        try:
            host.serve()
        finally:
            host.end()


if __name__ == "__main__":
    main()
