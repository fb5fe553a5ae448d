"""A library as bad as libraries are: it keeps its state in modules, hangs, crashes and raises."""

import os
import random
import signal
from typing import Any

from envs.adapters.libraries import RefusedError
from envs.multi import Actions, Situation
from envs.protocol import Action, Observation, StepResult

PLAYED: list[str] = []
"""Shared by all episodes of a process."""


class Draws:
    """Answers every action by a draw from the global generator."""

    def __init__(self, problems: int) -> None:
        self.problems = problems

    def reset(self, seed: int) -> Observation:
        PLAYED.append("reset")
        return Observation.user(f"problem {random.randrange(self.problems)}")

    def step(self, action: Action) -> StepResult:
        PLAYED.append(action.text)
        match action.text:
            case "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                while True:
                    pass
            case "crash":
                os._exit(3)
            case "raise":
                raise LookupError("no such thing")
        info = {"played": list(PLAYED), "set": list({"a", "b", "c", "d"}), "process": os.getpid()}
        return StepResult(Observation.user(str(random.random())), 0.0, action.text == "end", info)


class Pair:
    """Two agents that say anything once."""

    agents = ("left", "right")

    def reset(self, seed: int) -> Situation:
        return Situation(self.agents, together=True, observations={"left": Observation.user(str(seed % 7))})

    def step(self, actions: Actions) -> Situation:
        said = {name: None if action is None else action.text for name, action in actions.items()}
        return Situation((), rewards={"left": 1.0}, info={"said": said})


def draws(problems: int = 1) -> Draws:
    return Draws(problems)


def pair() -> Pair:
    return Pair()


def refuses(**args: Any) -> Draws:
    raise RefusedError("it is no game")
