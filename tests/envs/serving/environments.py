"""Environments that are served in tests: one that keeps a secret, one that does what it is told."""

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

from envs.protocol import Action, Observation, Split, StepResult

KEYS = "OPENTINKER_ENV_KEY"
"""How the names of variables with keys begin."""


class Canary:
    """Each episode has a secret; every answer shows the secret, and all that was said in the episode."""

    def __init__(self, split: Split = "train", *, turns: int = 8) -> None:
        self._turns = turns
        self._secret, self._said = "", list[str]()

    def reset(self, seed: int) -> Observation:
        self._secret, self._said = f"canary-{seed}", []
        return Observation.user(self._secret)

    def step(self, action: Action) -> StepResult:
        if not self._secret or len(self._said) == self._turns:
            raise RuntimeError("no episode is running")
        self._said.append(action.text)
        shown = Observation.user(f"{self._secret}: {' '.join(self._said)}")
        return StepResult(shown, float(len(self._said)), len(self._said) == self._turns, {"pid": os.getpid()})


class Obedient:
    """Does what the action says; writes each beginning and end of an instance into a file.

    Args:
        notes: the file.
        on_reset, on_close: what to do then, too.
    """

    unlimited = True
    _instances = 0

    def __init__(
        self, split: Split = "train", *, notes: str = "", on_reset: str = "", on_close: str = ""
    ) -> None:
        self._notes, self._on_reset, self._on_close = notes, on_reset, on_close
        Obedient._instances += 1
        self._name = f"{os.getpid()}-{Obedient._instances}"
        self._steps = 0

    def reset(self, seed: int) -> Observation:
        self._note("reset")
        shown = self._do(self._on_reset)
        self._steps = 0
        return shown.observation if shown else Observation.user(f"seed {seed}")

    def step(self, action: Action) -> StepResult:
        self._steps += 1
        shown = self._do(action.text)
        return shown or StepResult(
            Observation.user(f"step {self._steps}"),
            0.0,
            False,
            {
                "pid": os.getpid(),
                "keys": [name for name in os.environ if name.startswith(KEYS)],
            },
        )

    def close(self) -> None:
        self._note("close")
        self._do(self._on_close)

    def _note(self, what: str) -> None:
        if self._notes:
            with Path(self._notes).open("a") as notes:
                notes.write(f"{what} {self._name}\n")

    def _do(self, order: str) -> Any:
        match order.split():
            case ["wait_for", path]:
                while not Path(path).exists():
                    time.sleep(0.01)
            case ["sleep"]:
                time.sleep(3600)
            case ["spin"]:
                while True:
                    pass
            case ["hold"]:  # as spin, for other threads, but that it costs nothing
                keeps_the_interpreter = ctypes.PyDLL(None)
                self._note("hold")
                while True:
                    keeps_the_interpreter.usleep(100_000)
            case ["die"]:
                os._exit(7)
            case ["exit"]:
                sys.exit(1)
            case ["raise", name]:
                raise {"KeyError": KeyError, "ValueError": ValueError}[name]("as told")
            case ["print"]:
                print("this is no answer")
            case ["tuple"]:
                return Observation(()), 0.0, False
            case ["nan"]:
                return StepResult(Observation.user("x"), float("nan"), False)
            case ["large"]:
                return StepResult(Observation.user("x" * (20 << 20)), 0.0, False)
        return None


OBEDIENT = f"{__name__}:Obedient"
CANARY = f"{__name__}:Canary"
