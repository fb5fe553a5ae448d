"""A shard's process: `python -m envs.serving.worker FD BYTES` plays environments, one call at a time.

It reads one JSON request a line from the socket FD and answers each with a frame (see `wire.FRAME`) of at
most BYTES. No two
calls run at the same time in one process, so that environments need not be made for threads. Who asks ends
a call that takes too long by killing the process.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from envs.multi import MultiDemonstrates, MultiEnvironment, Recomputes
from envs.playing import BrokenError
from envs.protocol import Action, Closes, Demonstrates, DemonstratesTools
from envs.registry import AnyEnvironment, make_any
from envs.serving import wire

Request = dict[str, Any]
Outcome = tuple[int, Any]

_PR_SET_PDEATHSIG = 1
_LONGEST_MESSAGE = 2000


class RefusedArgumentsError(Exception):
    """The environment cannot be made with these arguments."""


class Environments:
    """The environments of a shard, by the number of their session."""

    def __init__(self) -> None:
        self._running: dict[int, AnyEnvironment] = {}
        self._answers: dict[str, Callable[[Request], Any]] = {
            "ping": lambda _: None,
            "describe": self._describe,
            "recompute": self._recompute,
            "open": self._open,
            "close": self._close,
            "reset": lambda request: _shown(self._of(request).reset(request["seed"])),
            "step": self._step,
            "step_together": self._step_together,
            "demonstration": self._demonstration,
            "demonstration_after": self._demonstration_after,
        }

    def answer(self, request: Request) -> Outcome:
        """Do what is asked for; whatever environments raise is an outcome."""
        try:
            return wire.OK, self._answers[request["do"]](request)
        except RefusedArgumentsError as error:
            return wire.REFUSED, {"message": str(error)}
        except BrokenError as error:
            return wire.BROKEN, {"message": error.detail}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - third-party code is met here
            message = " ".join(str(error).split())[:_LONGEST_MESSAGE]
            return wire.RAISED, {
                "type": type(error).__name__,
                "message": message,
                "is_value_error": isinstance(error, ValueError),
            }

    def close_all(self) -> None:
        """Close what is left, each once."""
        for session in list(self._running):
            self.answer({"do": "close", "session": session})

    def _describe(self, request: Request) -> dict[str, Any]:
        environment = _made(request)
        try:
            several = isinstance(environment, MultiEnvironment)
            return {
                "agents": list(environment.agents) if isinstance(environment, MultiEnvironment) else None,
                "demonstrates": isinstance(environment, MultiDemonstrates if several else Demonstrates),
                "demonstrates_tools": isinstance(environment, DemonstratesTools),
                "recomputes": isinstance(environment, Recomputes),
                "unlimited": bool(getattr(environment, "unlimited", False)),
            }
        finally:
            _closed(environment)

    def _recompute(self, request: Request) -> Any:
        environment = _made(request)
        try:
            if not isinstance(environment, Recomputes):
                raise RefusedArgumentsError(f"{request['id']} cannot recompute rewards")
            return environment.recompute(request["seed"], request["steps"])
        finally:
            _closed(environment)

    def _open(self, request: Request) -> Any:
        environment = _made(request)
        try:
            shown = _shown(environment.reset(request["seed"]))
        except BaseException:
            _closed(environment)
            raise
        self._running[request["session"]] = environment
        return shown

    def _close(self, request: Request) -> None:
        environment = self._running.pop(request["session"], None)
        if environment is not None:
            _closed(environment)

    def _step(self, request: Request) -> Any:
        environment = self._of(request)
        if isinstance(environment, MultiEnvironment):
            raise ValueError("step: this environment has several agents; accepted: step_together")
        return wire.result_out(environment.step(Action(request["text"])))

    def _step_together(self, request: Request) -> Any:
        environment = self._of(request)
        if not isinstance(environment, MultiEnvironment):
            raise ValueError("step_together: this environment has a single agent; accepted: step")
        texts: dict[str, str | None] = request["actions"]
        actions = {agent: None if text is None else Action(text) for agent, text in texts.items()}
        return wire.situation_out(environment.step(actions))

    def _demonstration(self, request: Request) -> Any:
        environment, agent = self._of(request), request["agent"]
        if agent is not None and isinstance(environment, MultiDemonstrates):
            return wire.demonstration_out(environment.demonstration(agent))
        if agent is None and isinstance(environment, Demonstrates):
            return wire.demonstration_out(environment.demonstration())
        raise ValueError("demonstration: this environment has none of that kind")

    def _demonstration_after(self, request: Request) -> Any:
        environment = self._of(request)
        if not isinstance(environment, DemonstratesTools):
            raise ValueError("demonstration_after: this environment has none")
        return wire.demonstration_out(environment.demonstration_after(tuple(request["results"])))

    def _of(self, request: Request) -> AnyEnvironment:
        return self._running[request["session"]]


def _made(request: Request) -> AnyEnvironment:
    try:
        return make_any(request["id"], request["split"], **request["args"])
    except (ValueError, TypeError) as error:
        raise RefusedArgumentsError(" ".join(str(error).split())[:_LONGEST_MESSAGE]) from error


def _closed(environment: AnyEnvironment) -> None:
    if isinstance(environment, Closes):
        environment.close()


def _shown(shown: Any) -> Any:
    """What a reset gave: an observation, or a situation of several agents."""
    if hasattr(shown, "to_act"):
        return wire.situation_out(shown)
    return wire.observation_out(shown)


def encoded(outcome: Outcome, largest: int) -> bytes:
    """A frame; an answer that is not JSON, or too large, is a broken one."""
    kind, value = outcome
    try:
        payload = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        if len(payload) > largest:
            raise ValueError(f"{len(payload)} bytes; accepted: {largest}")
    except (TypeError, ValueError, RecursionError) as error:
        kind = wire.BROKEN
        payload = json.dumps({"message": f"an answer cannot be sent: {error}"[:_LONGEST_MESSAGE]}).encode()
    return wire.FRAME.pack(len(payload), kind) + payload


def main() -> None:
    """Serve requests until the other side closes the socket; then close every environment."""
    descriptor, largest = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)  # environments may print
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    environments = Environments()
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as requests:
        for line in requests:
            connection.sendall(encoded(environments.answer(json.loads(line)), largest))
        environments.close_all()


def _end_with_parent() -> None:
    """A wedged environment does not see that the socket is closed: the kernel ends it with the server."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
