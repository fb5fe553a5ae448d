"""Coordinators that are broken on purpose, each in one way, and nothing else is wrong with them.

`opentinker validate coordinator` shows which checks catch which. None is used anywhere else.
"""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from envs.protocol import Action, Observation
from opentinker_core.agents.coordination.actors import Deadline, Reply, Request
from opentinker_core.agents.coordination.coordinator import (
    AgentResult,
    AgentTurn,
    Coordinator,
    Ended,
    Outcome,
    Running,
    forget,
    judged,
)
from opentinker_core.agents.coordination.log import EpisodeEnd
from opentinker_core.agents.coordination.phases import PhaseCoordinator
from opentinker_core.agents.coordination.violations import Check
from opentinker_core.seeds import derive_seed


class NoTurnBarrier(Coordinator):
    """Asks the agents of a common round one after another."""

    async def _gather(self, run: Running) -> dict[str, AgentTurn | None]:
        return {agent: self._decide(run, await self._ask(run, agent)) for agent in run.situation.to_act}


class Eavesdropping(Coordinator):
    """Lets the last agent of a common round see what another has just done."""

    async def _gather(self, run: Running) -> dict[str, AgentTurn | None]:
        first, last = run.situation.to_act[0], run.situation.to_act[-1]
        taken = {first: self._decide(run, await self._ask(run, first))}
        if first != last and (turn := taken[first]) is not None:
            run.inbox[last].append(Observation.user(f"\n{first}:{turn.action.text}\n"))
        for agent in run.situation.to_act[1:]:
            taken[agent] = self._decide(run, await self._ask(run, agent))
        return taken


class RandomOrder(Coordinator):
    """Now and then asks any agent, whoever's turn it is."""

    async def _ask(self, run: Running, agent: str) -> Outcome:
        draw = derive_seed("random order", run.plan.seed, run.round, agent)
        living = [name for name in self.protocol.agents if name not in run.dead]
        asked = living[draw % len(living)] if draw % 10 < 3 else agent
        return await super()._ask(run, asked)


class DoubleMove(Coordinator):
    """Lets who moved last move once more, in the place of the next, every fifth round."""

    async def _ask(self, run: Running, agent: str) -> Outcome:
        again = run.round % 5 == 4 and run.last and run.last not in run.dead
        return await super()._ask(run, run.last if again else agent)


class SecondThoughts(Coordinator):
    """Asks an agent again after a good answer, and takes the second."""

    async def _ask(self, run: Running, agent: str) -> Outcome:
        first = await super()._ask(run, agent)
        if first.turn is None or run.round % 4 != 3:
            return first
        return await super()._ask(run, agent)


class LostMessage(Coordinator):
    """Every fourth round, does not pass on what the environment tells an agent."""

    def _deliver(self, run: Running, agent: str, observation: Observation) -> None:
        if run.round % 4 != 3:
            super()._deliver(run, agent, observation)


class LateAnswer(Coordinator):
    """Takes the answer of a dead attempt if it comes before that of the living one."""

    async def _attempt(self, request: Request) -> Reply | str:
        tasks = self.__dict__.setdefault("_late", {})
        place = request.episode, request.round, request.agent
        task = asyncio.create_task(self._actors[request.agent].act(request))
        task.add_done_callback(forget)
        both = [*tasks.pop(place, ()), task]
        await asyncio.wait(both, timeout=request.deadline.remaining, return_when=asyncio.FIRST_COMPLETED)
        done = [one for one in both if one.done() and not one.cancelled() and not one.exception()]
        if not done:
            tasks[place] = [task]
        return judged(done[0] if done else task, request)


class DeadSkipped(Coordinator):
    """Plays nothing for an agent that died, and tells nobody."""

    def _bury(self, run: Running, request: Request, why: str) -> AgentTurn | None:
        del run.inbox[request.agent][:]
        return AgentTurn(request.round, request.attempt, request.version, request.observation, Action("."))


class DeadWithoutEnd(Coordinator):
    """Declares the dead, and lets the environment go on as if they had answered."""

    def _bury(self, run: Running, request: Request, why: str) -> AgentTurn | None:
        super()._bury(run, request, why)
        del run.dead[request.agent]
        return AgentTurn(request.round, request.attempt, request.version, request.observation, Action("."))


class FullAsDead(Coordinator):
    """Lets others go on without an agent whose context is full, as if it had died."""

    def _decide(self, run: Running, outcome: Outcome) -> AgentTurn | None:
        if outcome.full:
            return self._bury(run, outcome.request, outcome.why)
        return super()._decide(run, outcome)


class FullForDead(Coordinator):
    """Where an agent died, says that its context was full, so that all rewards count."""

    def _bury(self, run: Running, request: Request, why: str) -> AgentTurn | None:
        raise Ended(EpisodeEnd.CONTEXT)


class StepAgain(Coordinator):
    """Steps the environment once more where it did not come back in time."""

    async def _step(self, run: Running, taken: Mapping[str, AgentTurn | None]) -> None:
        try:
            await super()._step(run, taken)
        except Ended:
            await super()._step(run, taken)


class ZeroForMissing(Coordinator):
    """Gives agents whose reward is missing the reward 0."""

    def _credit(self, run: Running, end: EpisodeEnd) -> dict[str, AgentResult]:
        found = super()._credit(run, end)
        return {name: replace(one, reward=one.reward or 0.0) for name, one in found.items()}


class RewardToLastMover(Coordinator):
    """Gives the best reward of an episode to who moved last, the worst to all others."""

    def _credit(self, run: Running, end: EpisodeEnd) -> dict[str, AgentResult]:
        found = super()._credit(run, end)
        rewards = [one.reward for one in found.values() if one.reward is not None]
        if not rewards:
            return found
        return {
            name: replace(one, reward=max(rewards) if name == run.last else min(rewards))
            for name, one in found.items()
        }


class SwappedRewards(Coordinator):
    """Gives each agent the reward of the next one."""

    def _credit(self, run: Running, end: EpisodeEnd) -> dict[str, AgentResult]:
        found = super()._credit(run, end)
        names = list(found)
        following = dict(zip(names, names[1:] + names[:1], strict=True))
        return {name: replace(one, reward=found[following[name]].reward) for name, one in found.items()}


class LateCredit(Coordinator):
    """Puts an agent's whole reward on its first turn; the sum is right."""

    def _credit(self, run: Running, end: EpisodeEnd) -> dict[str, AgentResult]:
        found = super()._credit(run, end)
        for name, one in found.items():
            total = math.fsum(turn.reward for turn in one.turns)
            turns = [replace(turn, reward=0.0 if i else total) for i, turn in enumerate(one.turns)]
            found[name] = replace(one, turns=tuple(turns))
        return found


class SharedMask(Coordinator):
    """Trains every policy on the turns of all agents."""

    def _credit(self, run: Running, end: EpisodeEnd) -> dict[str, AgentResult]:
        found = super()._credit(run, end)
        everybody = [turn for one in found.values() for turn in one.turns]
        turns = tuple(sorted(everybody, key=lambda turn: turn.round))
        return {name: replace(one, turns=turns) for name, one in found.items()}


class SwappedPolicies(Coordinator):
    """Credits each agent's turns to the policy of the next one."""

    def _credit(self, run: Running, end: EpisodeEnd) -> dict[str, AgentResult]:
        found = super()._credit(run, end)
        policies = [one.policy for one in found.values()]
        moved = zip(found.items(), policies[1:] + policies[:1], strict=True)
        return {name: replace(one, policy=policy) for (name, one), policy in moved}


class NoGlobalBarrier(PhaseCoordinator):
    """Begins the next rollout as soon as the first policy is refreshed."""

    async def _generation(self) -> None:
        episodes = await self._rollout()
        until = Deadline.after(self.protocol.phase_s.update)

        async def both(policy: str) -> dict[str, str]:
            await self._update(policy, episodes, until)
            return {policy: await self._refresh(policy, until)}

        tasks = {asyncio.create_task(both(policy)) for policy in self.protocol.trained}
        done, behind = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        self.__dict__.setdefault("_behind", set()).update(behind)
        self._advance({policy: version for task in done for policy, version in task.result().items()})

    async def run(self, generations: int) -> None:
        await super().run(generations)
        await asyncio.gather(*self.__dict__.get("_behind", ()))


class HastyUpdate(PhaseCoordinator):
    """Publishes one policy while others are still being updated."""

    async def _generation(self) -> None:
        episodes = await self._rollout()
        until = Deadline.after(self.protocol.phase_s.update)

        async def both(policy: str) -> str:
            await self._update(policy, episodes, until)
            return await self._refresh(policy, until)

        trained = self.protocol.trained
        versions = await asyncio.gather(*(both(policy) for policy in trained))
        self._advance(dict(zip(trained, versions, strict=True)))


class StaleSnapshot(PhaseCoordinator):
    """Goes on sampling from what was served before the refresh."""

    def _advance(self, fresh: Mapping[str, str]) -> None:
        before = dict(self.versions)
        held: Mapping[str, str] = self.__dict__.get("_held", before)
        super()._advance(held)
        self.__dict__["_held"] = dict(fresh)


class FrozenTrained(PhaseCoordinator):
    """Updates frozen policies as well."""

    async def _generation(self) -> None:
        protocol = self.protocol
        self.protocol = protocol.model_copy(update={"frozen": ()})
        try:
            await super()._generation()
        finally:
            self.protocol = protocol


@dataclass(frozen=True)
class Mutant:
    """What plays the episodes, and what leads the phases."""

    name: str
    expected: Check
    """A check that must catch it."""
    coordinator: type[Coordinator] = Coordinator
    phases: type[PhaseCoordinator] = PhaseCoordinator

    @property
    def summary(self) -> str:
        """What is wrong with it."""
        broken: Any = self.phases if self.coordinator is Coordinator else self.coordinator
        return str(broken.__doc__).strip()


MUTANTS: tuple[Mutant, ...] = (
    Mutant("no-turn-barrier", Check.TURN_BARRIER, NoTurnBarrier),
    Mutant("eavesdropping", Check.INVENTED, Eavesdropping),
    Mutant("random-order", Check.ORDER, RandomOrder),
    Mutant("double-move", Check.DOUBLE_MOVE, DoubleMove),
    Mutant("second-thoughts", Check.DOUBLE_MOVE, SecondThoughts),
    Mutant("lost-message", Check.LOST_MESSAGE, LostMessage),
    Mutant("late-answer", Check.ATTEMPTS, LateAnswer),
    Mutant("dead-skipped", Check.DEATH, DeadSkipped),
    Mutant("dead-goes-on", Check.DEATH, DeadWithoutEnd),
    Mutant("full-as-dead", Check.DEATH, FullAsDead),
    Mutant("full-for-dead", Check.END, FullForDead),
    Mutant("step-again", Check.END, StepAgain),
    Mutant("zero-for-missing", Check.REWARD, ZeroForMissing),
    Mutant("reward-to-last-mover", Check.REWARD, RewardToLastMover),
    Mutant("swapped-rewards", Check.REWARD, SwappedRewards),
    Mutant("credit-on-first-turn", Check.REWARD, LateCredit),
    Mutant("shared-mask", Check.CREDIT, SharedMask),
    Mutant("swapped-policies", Check.CREDIT, SwappedPolicies),
    Mutant("no-global-barrier", Check.GLOBAL_BARRIER, phases=NoGlobalBarrier),
    Mutant("hasty-refresh", Check.GLOBAL_BARRIER, phases=HastyUpdate),
    Mutant("stale-snapshot", Check.VERSION, phases=StaleSnapshot),
    Mutant("frozen-trained", Check.CREDIT, phases=FrozenTrained),
)
