"""Writes down what really happens, at the two places where a coordinator touches the world.

A coordinator is given its environment and its agents only through these. So what it believes, or
would like to have done, is not in the facts of the log: a broken coordinator leaves a broken log.
"""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from envs.multi import Actions, MultiEnvironment, Situation
from opentinker_core.agents import guarded
from opentinker_core.agents.coordination.actors import Actor, ContextFull, Reply, Request
from opentinker_core.agents.coordination.log import EventLog, Kind

Caller = Callable[[Callable[[Any], Situation], Any], Awaitable[Situation]]
"""Calls a method of an environment with its argument: at once, or in another thread and for so long."""


async def at_once(method: Callable[[Any], Situation], argument: Any) -> Situation:
    """Call it here and now: for environments that are quick, and under a virtual clock."""
    return method(argument)


class WitnessedEnvironment:
    """An environment whose every reset and step is logged, with what was given and what came of it."""

    def __init__(
        self,
        environment: MultiEnvironment,
        log: EventLog,
        generation: int,
        episode: str,
        caller: Caller = at_once,
    ) -> None:
        self._environment = environment
        self._call = caller
        self._log = log
        self._generation, self._episode = generation, episode
        self._round = 0

    @property
    def agents(self) -> tuple[str, ...]:
        """The environment's."""
        return tuple(self._environment.agents)

    async def reset(self, seed: int) -> Situation:
        """Reset the environment."""
        self._round = 0
        try:
            situation = guarded.situation(await self._call(self._environment.reset, seed))
            self._add(Kind.OPENED, {"seed": seed, "agents": list(self.agents)} | _described(situation))
        except (Exception, SystemExit) as error:
            self._add(Kind.BROKE, {"error": _said(error), "seed": seed})
            raise
        return situation

    async def step(self, actions: Actions) -> Situation:
        """Step the environment."""
        spoken = {agent: None if action is None else action.text for agent, action in actions.items()}
        try:
            # what the log cannot hold (a reward that is no number) is a fault of the environment as well
            situation = guarded.situation(await self._call(self._environment.step, actions))
            rewards = dict(situation.rewards)
            self._add(Kind.STEPPED, {"actions": spoken, "rewards": rewards} | _described(situation))
        except (Exception, SystemExit) as error:
            self._add(Kind.BROKE, {"error": _said(error), "actions": spoken})
            raise
        self._round += 1
        return situation

    def _add(self, kind: Kind, detail: dict[str, Any]) -> None:
        self._log.append(kind, self._generation, episode=self._episode, round=self._round, detail=detail)


class WitnessedActor:
    """An actor whose every request and answer is logged, also those that come too late."""

    def __init__(self, actor: Actor, log: EventLog) -> None:
        self._actor = actor
        self._log = log

    def act(self, request: Request) -> Coroutine[Any, Any, Reply]:
        """Log the request now, and the answer when it comes."""
        detail = {"policy": request.policy, "shown": request.observation.text}
        self._add(Kind.ASKED, request, request.version, detail)
        return self._answer(request)

    async def _answer(self, request: Request) -> Reply:
        try:
            reply = await self._actor.act(request)
            self._add(Kind.ACTED, request, reply.version, {"text": reply.action.text})
        except Exception as error:
            full = isinstance(error, ContextFull)
            self._add(Kind.RAISED, request, "", {"error": _said(error), "full": full})
            raise
        return reply

    def _add(self, kind: Kind, request: Request, version: str, detail: dict[str, Any]) -> None:
        self._log.append(
            kind,
            request.generation,
            episode=request.episode,
            round=request.round,
            agent=request.agent,
            attempt=request.attempt,
            version=version,
            detail=detail,
        )


def _described(situation: Situation) -> dict[str, Any]:
    return {
        "to_act": list(situation.to_act),
        "together": situation.together,
        "observations": {agent: new.text for agent, new in situation.observations.items()},
    }


def _said(error: BaseException) -> str:
    return guarded.described(error)[:500]
