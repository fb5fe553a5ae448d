"""Plays an episode of several agents as its protocol says: `EpisodePlan` in, `EpisodeResult` out.

Every wait ends by the episode's deadline, and every episode ends with a reason and in the log. Each
agent's turns with what it was shown before each are its trajectory: others' moves stand in it as
observations, and only what the agent said itself can be credited to its policy.
"""

import asyncio
import math
from collections.abc import Awaitable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from envs.multi import MultiEnvironment, Situation
from envs.protocol import Action, Message, Observation
from opentinker_core.agents.coordination.actors import Actor, ContextFull, Deadline, Reply, Request
from opentinker_core.agents.coordination.log import EpisodeEnd, EventLog, Kind
from opentinker_core.agents.coordination.protocol import CoordinationProtocol, OnDeath, TurnOrder
from opentinker_core.agents.coordination.witness import (
    Caller,
    WitnessedActor,
    WitnessedEnvironment,
    at_once,
)
from opentinker_core.agents.guarded import described, is_finite
from opentinker_core.errors import UsageError

FULL = "context"
"""Why an agent leaves whose context is full."""


@dataclass(frozen=True)
class EpisodePlan:
    """Which episode to play, and with which versions."""

    episode: str
    """Unique in the log."""
    seed: int
    """Of the environment."""
    versions: Mapping[str, str]
    """By policy: what its agents must sample from."""
    generation: int = 0


@dataclass(frozen=True)
class AgentTurn:
    """What an agent was shown, what it said, and what it earned until its next turn."""

    round: int
    """In which it was asked."""
    attempt: int
    version: str
    observation: Observation
    action: Action
    reward: float = 0.0
    """Also given in rounds in which others moved; the first turn has what came before it."""


@dataclass(frozen=True)
class AgentResult:
    """One agent's part of an episode."""

    agent: str
    policy: str
    turns: tuple[AgentTurn, ...]
    reward: float | None
    """The sum over the episode; None: missing, and not zero."""
    died: str = ""
    """Why it died; empty: it did not."""


@dataclass(frozen=True)
class EpisodeResult:
    """What became of an episode."""

    plan: EpisodePlan
    end: EpisodeEnd
    rounds: int
    agents: Mapping[str, AgentResult]
    info: Mapping[str, Any]
    """The environment's last."""
    error: str = ""
    """What the environment failed with, or what an agent that died said last."""


class Ended(Exception):  # noqa: N818 - an end of an episode is not always an error
    """The episode is over before the environment said so."""

    def __init__(self, reason: EpisodeEnd, error: str = "") -> None:
        super().__init__(str(reason))
        self.reason, self.error = reason, error


@dataclass(frozen=True)
class Outcome:
    """What came of a turn; nothing follows from it until the coordinator decides so, between two steps."""

    request: Request
    """The last attempt."""
    shown: int
    """How many observations of its inbox the agent was shown."""
    turn: AgentTurn | None = None
    """None: it has no attempt left, its context is full, or the episode's time is over."""
    why: str = ""
    """There is no turn."""
    full: bool = False
    """Whether that is because of the context."""


@dataclass(eq=False)
class Running:
    """An episode that is being played."""

    plan: EpisodePlan
    environment: WitnessedEnvironment
    deadline: Deadline
    inbox: dict[str, list[Observation]]
    """By agent: what it was not shown before a turn that it took."""
    situation: Situation = field(default_factory=lambda: Situation(()))
    round: int = 0
    pending: dict[str, "asyncio.Task[Outcome]"] = field(default_factory=dict)
    """By agent: turns that are waited for, or not yet decided on."""
    turns: dict[str, list[AgentTurn]] = field(default_factory=dict)
    early: dict[str, float] = field(default_factory=dict)
    """Rewards of agents that had no turn yet."""
    dead: dict[str, str] = field(default_factory=dict)
    """By agent: why."""
    last: str = ""
    """Who moved last."""


class Coordinator:
    """Asks agents in the declared order, within their deadlines, and steps the environment."""

    def __init__(
        self,
        protocol: CoordinationProtocol,
        actors: Mapping[str, Actor],
        log: EventLog,
        caller: Caller = at_once,
    ) -> None:
        """`actors`: by agent; `caller`: how environments are called.

        Raises:
            UsageError: an agent of the protocol has no actor, or an actor is of no agent.
        """
        _require_same("actors", actors, protocol)
        self.protocol = protocol
        self.log = log
        self._caller = caller
        self._actors = {agent: WitnessedActor(actor, log) for agent, actor in actors.items()}

    async def play(
        self, plan: EpisodePlan, environment: MultiEnvironment, within: Deadline | None = None
    ) -> EpisodeResult:
        """Play one episode to its end; many can be played at the same time, each with its own environment.

        `within`: the deadline of what the episode is part of, if it may come before its own. When it
        is cancelled, the log says so, and the cancellation goes on.

        Raises:
            UsageError: the environment has other agents than the protocol, the plan lacks a version, or
                an actor said so.
        """
        _require_same("environment", _agents_of(environment), self.protocol)
        missing = sorted(set(self.protocol.policies.values()) - set(plan.versions))
        if missing:
            raise UsageError(f"versions: policy {missing[0]!r} has none; accepted: one a policy")
        witnessed = WitnessedEnvironment(environment, self.log, plan.generation, plan.episode, self._caller)
        inbox: dict[str, list[Observation]] = {agent: [] for agent in self.protocol.agents}
        limit = self.protocol.episode_s
        deadline = Deadline.after(limit) if within is None else within.sooner(limit)
        run = Running(plan, witnessed, deadline, inbox)
        end, error = EpisodeEnd.CANCELLED, ""
        try:
            end = await self._play(run)
        except Ended as early:
            end, error = early.reason, early.error
        finally:
            try:
                await self._let_go(run, list(run.pending))
            except asyncio.CancelledError:
                end, error = EpisodeEnd.CANCELLED, ""
                raise
            finally:
                result = self._close(run, end, error)
        return result

    async def _play(self, run: Running) -> EpisodeEnd:
        self._take(run, await _guarded(run.environment.reset(run.plan.seed), run.deadline))
        while not run.situation.done:
            if run.round >= self.protocol.max_rounds:
                return EpisodeEnd.MAX_ROUNDS
            self._check_order(run)
            await self._step(run, await self._gather(run))
        return EpisodeEnd.DONE

    def _check_order(self, run: Running) -> None:
        """End the episode if the environment asks for whom the declared order does not let act."""
        situation = run.situation
        if not in_order(self.protocol, situation.to_act, situation.together, run.last, run.dead):
            asked = ", ".join(situation.to_act) + (" together" if situation.together else "")
            order = f"protocol.order {str(self.protocol.order)!r} of {', '.join(self.protocol.agents)}"
            raise Ended(EpisodeEnd.OUT_OF_ORDER, f"out of order: it asks for {asked}, against {order}")

    async def _gather(self, run: Running) -> dict[str, AgentTurn | None]:
        """Wait for what the next step needs: turns by agent, None of those that leave."""
        wanted = run.situation.to_act
        await self._let_go(run, [agent for agent in run.pending if agent not in wanted])
        if run.pending:  # without a barrier, agents go on while the environment is busy
            await asyncio.wait(run.pending.values(), timeout=0)  # what they did by now comes first
        taken = self._finished(run)
        if run.deadline.passed:
            raise Ended(EpisodeEnd.DEADLINE)
        for agent in wanted:
            if agent not in run.pending and agent not in taken:
                run.pending[agent] = asyncio.create_task(self._ask(run, agent))
        while run.pending and (self.protocol.turn_barrier or not taken):
            await asyncio.wait(run.pending.values(), return_when=asyncio.FIRST_COMPLETED)
            taken |= self._finished(run)
        return taken

    def _finished(self, run: Running) -> dict[str, AgentTurn | None]:
        """Decide on all turns that have come to something, whichever came first.

        Raises:
            UsageError: an actor said so.
            Ended: the episode does not go on. Of several reasons, one that makes rewards missing.
        """
        done = [agent for agent, task in run.pending.items() if task.done()]
        outcomes = {agent: run.pending.pop(agent).result() for agent in done}
        taken: dict[str, AgentTurn | None] = {}
        ends: list[Ended] = []
        for agent, outcome in outcomes.items():
            try:
                taken[agent] = self._decide(run, outcome)
            except Ended as end:
                ends.append(end)
        if ends:
            raise min(ends, key=lambda end: end.reason.counts)
        return taken

    def _decide(self, run: Running, outcome: Outcome) -> AgentTurn | None:
        """What follows from an outcome: the turn to be played, or None: the agent leaves.

        Raises:
            Ended: the episode does not go on.
        """
        request = outcome.request
        if outcome.turn is not None:
            del run.inbox[request.agent][: outcome.shown]
            return outcome.turn
        if outcome.full and not self.protocol.full_leaves:
            raise Ended(EpisodeEnd.CONTEXT)
        if run.deadline.passed and not outcome.full:
            raise Ended(EpisodeEnd.DEADLINE)
        return self._bury(run, request, outcome.why)

    async def _let_go(self, run: Running, agents: Iterable[str]) -> None:
        """Turns that nobody wants any more: what came of them was never decided on, and is void."""
        dropped = [run.pending.pop(agent) for agent in agents]
        for task in dropped:
            task.add_done_callback(forget)
            task.cancel()
        if dropped:
            await asyncio.wait(dropped)  # they end at once: none waits for an actor that was cancelled
        for task in dropped:
            if not task.cancelled() and not task.exception():
                self._note(Kind.GAVE_UP, run, task.result().request, {"why": "cancelled"})

    async def _ask(self, run: Running, agent: str) -> Outcome:
        """One turn of an agent, in as many attempts as it may have."""
        shown = tuple(run.inbox[agent])
        request = self._request(run, agent, shown)
        why = ""
        for attempt in range(1, self.protocol.attempts + 1):
            deadline = run.deadline.sooner(self.protocol.turn_s)
            request = replace(request, attempt=attempt, deadline=deadline)
            try:
                reply = await self._attempt(request)
            except ContextFull:
                return Outcome(request, len(shown), why=FULL, full=True)
            except asyncio.CancelledError:
                self._note(Kind.GAVE_UP, run, request, {"why": "cancelled"})
                raise
            if isinstance(reply, Reply):
                turn = AgentTurn(request.round, attempt, reply.version, request.observation, reply.action)
                return Outcome(request, len(shown), turn)
            why = reply
            self._note(Kind.GAVE_UP, run, request, {"why": why})
            if run.deadline.passed:
                break
        return Outcome(request, len(shown), why=why)

    def _request(self, run: Running, agent: str, shown: tuple[Observation, ...]) -> Request:
        policy = self.protocol.policies[agent]
        messages: tuple[Message, ...] = sum((new.messages for new in shown), ())
        return Request(
            generation=run.plan.generation,
            episode=run.plan.episode,
            round=run.round,
            agent=agent,
            attempt=1,
            policy=policy,
            version=run.plan.versions[policy],
            observation=Observation(messages),
            deadline=run.deadline,
        )

    async def _attempt(self, request: Request) -> Reply | str:
        """An answer, or why there is none. An actor that does not let itself be cancelled is left alone."""
        task = asyncio.create_task(self._actors[request.agent].act(request))
        task.add_done_callback(forget)
        try:
            await asyncio.wait({task}, timeout=request.deadline.remaining)
        finally:
            task.cancel()
        return judged(task, request)

    def _bury(self, run: Running, request: Request, why: str) -> AgentTurn | None:
        """An agent is dead, or leaves because its context is full: what the protocol says follows.

        Raises:
            Ended: the episode does not go on.
        """
        run.dead[request.agent] = why
        self._note(Kind.DIED, run, request, {"why": why})
        if self.protocol.on_death is OnDeath.END:
            raise Ended(EpisodeEnd.AGENT_DIED, why)
        if len(self.protocol.agents) - len(run.dead) < self.protocol.quorum:
            raise Ended(EpisodeEnd.QUORUM_LOST, why)
        return None

    async def _step(self, run: Running, taken: Mapping[str, AgentTurn | None]) -> None:
        actions = {agent: None if turn is None else turn.action for agent, turn in taken.items()}
        situation = await _guarded(run.environment.step(actions), run.deadline)
        for agent, turn in taken.items():
            if turn is not None:
                early = run.early.pop(agent, 0.0)
                run.turns.setdefault(agent, []).append(replace(turn, reward=early))
                run.last = agent
        run.round += 1
        self._take(run, situation)

    def _take(self, run: Running, situation: Situation) -> None:
        """Pass on what the environment gave: observations, and rewards to the turns that earned them."""
        run.situation = situation
        strangers = {*situation.to_act, *situation.observations, *situation.rewards}
        if strangers - set(self.protocol.agents) or not all(map(is_finite, situation.rewards.values())):
            what = f"rewards {dict(situation.rewards)!r:.200}, agents {', '.join(sorted(strangers))}"
            raise Ended(EpisodeEnd.ENVIRONMENT_FAILED, f"it gave {what}")
        for agent, observation in situation.observations.items():
            self._deliver(run, agent, observation)
        for agent, reward in situation.rewards.items():
            if turns := run.turns.get(agent):
                turns[-1] = replace(turns[-1], reward=turns[-1].reward + reward)
            else:
                run.early[agent] = run.early.get(agent, 0.0) + reward

    def _deliver(self, run: Running, agent: str, observation: Observation) -> None:
        run.inbox[agent].append(observation)

    def _close(self, run: Running, end: EpisodeEnd, error: str) -> EpisodeResult:
        agents = self._credit(run, end)
        for result in agents.values():
            turns = [{"round": t.round, "attempt": t.attempt, "reward": t.reward} for t in result.turns]
            detail = {"policy": result.policy, "reward": result.reward, "turns": turns}
            self._claim(Kind.CREDITED, run, detail, agent=result.agent)
        self._claim(Kind.ENDED, run, {"reason": str(end)})
        return EpisodeResult(run.plan, end, run.round, agents, run.situation.info, error)

    def _credit(self, run: Running, end: EpisodeEnd) -> dict[str, AgentResult]:
        """Each agent's own turns and rewards, for its own policy."""
        return {agent: self._result(run, end, agent) for agent in self.protocol.agents}

    def _result(self, run: Running, end: EpisodeEnd, agent: str) -> AgentResult:
        turns, died = tuple(run.turns.get(agent, ())), run.dead.get(agent, "")
        missing = not end.counts or (bool(died) and self.protocol.on_death is not OnDeath.FORFEIT)
        total = math.fsum([*(turn.reward for turn in turns), run.early.get(agent, 0.0)])
        return AgentResult(agent, self.protocol.policies[agent], turns, None if missing else total, died)

    def _note(self, kind: Kind, run: Running, request: Request, detail: dict[str, Any]) -> None:
        fields = {"agent": request.agent, "attempt": request.attempt, "round": request.round}
        self._claim(kind, run, detail, **fields)

    def _claim(self, kind: Kind, run: Running, detail: dict[str, Any], **fields: Any) -> None:
        place = {"episode": run.plan.episode, "round": run.round} | fields
        self.log.append(kind, run.plan.generation, detail=detail, **place)


def in_order(
    protocol: CoordinationProtocol,
    to_act: tuple[str, ...],
    together: bool,
    last: str,
    dead: Mapping[str, Any],
) -> bool:
    """Whether the declared order lets those act whom an environment asks. `last`: who moved last."""
    if not set(to_act) <= set(protocol.agents) - set(dead):
        return False
    if protocol.order is TurnOrder.SEQUENTIAL:
        following = next_in_turn(protocol.agents, last, dead) if last else ""
        return to_act == (following or to_act[0],)
    return together == (protocol.order is not TurnOrder.MESSAGES)


def next_in_turn(agents: tuple[str, ...], last: str, gone: Mapping[str, Any]) -> str:
    """Who comes after `last` in the cyclic order of `agents`, leaving out those that are gone."""
    place = agents.index(last)
    following = agents[place + 1 :] + agents[: place + 1]
    return next((agent for agent in following if agent not in gone), "")


def judged(task: "asyncio.Task[Reply]", request: Request) -> Reply | str:
    """What became of an attempt whose time is over: its answer, or why it is none.

    Raises:
        ContextFull, UsageError: the actor said so.
    """
    if not task.done():
        return "late"
    if task.cancelled():
        return "gave itself up"
    if error := task.exception():
        if isinstance(error, ContextFull | UsageError):
            raise error
        return f"raised {type(error).__name__}: {error}"[:500]
    reply = task.result()
    if reply.version != request.version:
        return f"stale: sampled from {reply.version!r:.80} and not from {request.version!r:.80}"
    return reply


async def _guarded(call: Awaitable[Situation], deadline: Deadline) -> Situation:
    """What the environment gives; whatever it raises, the episode ends for it, and the log has the words."""
    try:
        async with asyncio.timeout_at(deadline.at) as limit:
            return await call
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        if limit.expired():
            raise Ended(EpisodeEnd.DEADLINE) from error
        raise Ended(EpisodeEnd.ENVIRONMENT_FAILED, described(error)) from error


def forget(task: "asyncio.Task[Any]") -> None:
    """Take note of how a task ended that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


def _agents_of(environment: MultiEnvironment) -> tuple[str, ...]:
    """Its agents.

    Raises:
        UsageError: it cannot tell.
    """
    try:
        agents = tuple(environment.agents)
    except Exception as error:
        raise UsageError(f"environment: agents: {described(error)}; accepted: a tuple of names") from error
    if not all(isinstance(agent, str) for agent in agents):
        raise UsageError(f"environment: agents: {agents!r:.200}; accepted: a tuple of names")
    return agents


def _require_same(field: str, given: Collection[str], protocol: CoordinationProtocol) -> None:
    """The agents of the protocol and no others."""
    if set(given) != set(protocol.agents):
        found = ", ".join(sorted(given)) or "none"
        raise UsageError(f"{field}: agents {found}; accepted: {', '.join(protocol.agents)}")
