"""One episode's log, event by event: who was asked, shown and answered what, and what came of it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envs.multi import Recomputes
from opentinker_core.agents.coordination.coordinator import FULL, in_order, next_in_turn
from opentinker_core.agents.coordination.log import EpisodeEnd, Event, Kind
from opentinker_core.agents.coordination.protocol import CoordinationProtocol, OnDeath, TurnOrder
from opentinker_core.agents.coordination.violations import Check, Violation

_TOLERANCE = 1e-9

Versions = Callable[[str, int, str], str]
"""Policy, generation, episode → the version that must be sampled from."""


@dataclass
class _Ask:
    """The last attempt at a turn that an agent was asked for."""

    round: int
    attempt: int
    shown: str
    known: int
    """How many observations the agent had been given, of those it was not yet shown."""
    state: str = "open"
    """open, answered, failed, full (its context), or cancelled."""
    text: str = ""
    version: str = ""
    passed: int = 0
    """Steps made since nothing can come of it any more."""


@dataclass
class _Turn:
    round: int
    attempt: int
    step: int
    """In which it was played."""


@dataclass
class _Facts:
    """What the log has shown so far."""

    seed: int | None = None
    to_act: tuple[str, ...] = ()
    together: bool = False
    steps: list[dict[str, str | None]] = field(default_factory=list)
    rewards: list[dict[str, float]] = field(default_factory=list)
    """As the environment gave them, by step."""
    given: dict[str, list[str]] = field(default_factory=dict)
    """By agent: observations since its last turn."""
    asks: dict[str, _Ask] = field(default_factory=dict)
    stale: dict[str, set[str]] = field(default_factory=dict)
    """By agent: answers of dead attempts."""
    turns: dict[str, list[_Turn]] = field(default_factory=dict)
    dead: dict[str, int] = field(default_factory=dict)
    """By agent: the event that said so."""
    gone: set[str] = field(default_factory=set)
    """Agents whose leaving the environment was told."""
    last: str = ""
    broke: bool = False
    let_go: str = ""
    """An agent that is to act, and whose turn was declared void although nothing can come of it any more."""
    credited: dict[str, Event] = field(default_factory=dict)
    end: Event | None = None


class EpisodeCheck:
    """Reads the events of an episode in their order, then says what was wrong."""

    def __init__(self, protocol: CoordinationProtocol, versions: Versions, episode: str) -> None:
        """`versions`: of a policy in a generation and an episode."""
        self._protocol = protocol
        self._versions = versions
        self._episode = episode
        self._facts = _Facts()
        self._found: list[Violation] = []
        self._readers: dict[Kind, Callable[[Event], None]] = {
            Kind.OPENED: self._opened,
            Kind.ASKED: self._asked,
            Kind.ACTED: self._acted,
            Kind.RAISED: self._raised,
            Kind.GAVE_UP: self._gave_up,
            Kind.DIED: self._died,
            Kind.STEPPED: self._stepped,
            Kind.BROKE: self._broke,
            Kind.CREDITED: self._credited,
            Kind.ENDED: self._ended,
        }

    def take(self, event: Event) -> None:
        """The next event."""
        late = event.kind in (Kind.ACTED, Kind.RAISED)  # answers that nobody waits for any more
        if self._facts.end is not None and not late:
            self._add(Check.END, f"{event.kind} after the end", event)
        if event.kind in (Kind.OPENED, Kind.STEPPED, Kind.BROKE, Kind.ASKED):
            self._goes_on(event)
        if event.kind in self._readers:
            self._readers[event.kind](event)

    def finish(self, recomputes: Recomputes | None) -> list[Violation]:
        """All violations of the episode."""
        if self._facts.end is None:
            self._add(Check.END, "the episode has no end")
            return self._found
        self._reason(self._facts.end)
        self._rewards(recomputes)
        return self._found

    def _goes_on(self, event: Event) -> None:
        """After some things nothing but the end may follow."""
        if self._facts.broke:
            self._add(Check.END, "the environment failed, and the episode goes on", event)
        if agent := self._facts.let_go:
            self._add(Check.DEATH, f"no turn of {agent} can come, and the episode goes on", event)

    # what happened

    def _opened(self, event: Event) -> None:
        if self._facts.seed is not None:
            self._add(Check.END, "opened twice", event)
        self._facts.seed = event.detail["seed"]
        self._now(event)

    def _now(self, event: Event) -> None:
        """A new situation."""
        facts = self._facts
        facts.to_act, facts.together = tuple(event.detail["to_act"]), event.detail["together"]
        for agent, text in event.detail["observations"].items():
            facts.given.setdefault(agent, []).append(text)

    def _asked(self, event: Event) -> None:
        facts, agent = self._facts, event.agent
        before = facts.asks.get(agent)
        if agent not in facts.to_act:
            sequential = self._protocol.order is TurnOrder.SEQUENTIAL
            again = sequential and agent == facts.last
            self._add(Check.DOUBLE_MOVE if again else Check.ORDER, f"{agent} is asked out of turn", event)
        if event.version != self._version(event):
            self._add(Check.VERSION, f"{agent} is to sample from {event.version}", event)
        shown, given = event.detail["shown"], facts.given.get(agent, [])
        known = len(given)
        if event.attempt == 1:
            if before is not None and before.state == "answered":
                self._add(Check.DOUBLE_MOVE, f"{agent} has answered, and is asked again", event)
            elif before is not None and before.state == "open":
                self._add(Check.ATTEMPTS, f"{agent} is asked anew while an attempt is open", event)
            elif before is not None and before.state in ("failed", "full"):
                self._add(Check.ATTEMPTS, f"{agent} has {before.state}, and its attempts begin anew", event)
            self._check_barrier(event)
            self._check_shown(event, shown, given)
        else:
            follows = before is not None and before.state == "failed"
            if not follows or before is None or event.attempt != before.attempt + 1:
                self._add(Check.ATTEMPTS, f"attempt {event.attempt} follows no dead one", event)
            elif shown != before.shown:
                self._add(Check.LOST_MESSAGE, f"attempt {event.attempt} is shown something else", event)
            known = before.known if before is not None else known
            if event.attempt > self._protocol.attempts:
                self._add(Check.ATTEMPTS, f"{event.attempt} attempts", event)
        facts.asks[agent] = _Ask(event.round, event.attempt, shown, known)

    def _check_barrier(self, event: Event) -> None:
        """Nobody may be asked after another has answered, where all act together."""
        if self._protocol.order is TurnOrder.MESSAGES and not self._protocol.turn_barrier:
            return
        answered = [
            agent
            for agent, ask in self._facts.asks.items()
            if agent != event.agent and ask.state == "answered" and ask.round == event.round
        ]
        if answered and event.agent in self._facts.to_act:
            what = f"{event.agent} is asked after {answered[0]} has answered"
            self._add(Check.TURN_BARRIER, what, event)

    def _check_shown(self, event: Event, shown: str, given: list[str]) -> None:
        if shown == "".join(given):
            return
        lost = [text for text in given if text not in shown]
        if lost:
            self._add(Check.LOST_MESSAGE, f"{event.agent} is not shown {lost[0]!r:.60}", event)
        else:
            self._add(Check.INVENTED, f"{event.agent} is shown what it was not told", event)

    def _acted(self, event: Event) -> None:
        ask, text = self._ask_of(event), event.detail["text"]
        if ask is not None and ask.state == "open":
            ask.state, ask.text, ask.version = "answered", text, event.version
        else:
            self._facts.stale.setdefault(event.agent, set()).add(text)

    def _raised(self, event: Event) -> None:
        ask = self._ask_of(event)
        if ask is not None and ask.state == "open":  # else it was given up before
            ask.state = "full" if event.detail.get("full") else "failed"

    def _gave_up(self, event: Event) -> None:
        ask, cancelled = self._ask_of(event), event.detail["why"] == "cancelled"
        if ask is None:
            self._add(Check.ATTEMPTS, f"{event.agent} has no such attempt", event)
            return
        if ask.state == "answered":
            if ask.version == self._version(event) and not cancelled:
                self._add(Check.DOUBLE_MOVE, f"a good answer of {event.agent} is thrown away", event)
            self._facts.stale.setdefault(event.agent, set()).add(ask.text)
        if cancelled and event.agent in self._facts.to_act and self._is_over(ask):
            self._facts.let_go = event.agent
            if ask.state == "full" and self._protocol.turn_barrier:
                return  # no step can have come between: it still is
        ask.state = "cancelled" if cancelled else "failed"

    def _is_over(self, ask: _Ask) -> bool:
        """Whether no answer can come any more."""
        return ask.state == "full" or (ask.state == "failed" and ask.attempt >= self._protocol.attempts)

    def _died(self, event: Event) -> None:
        ask, full = self._facts.asks.get(event.agent), event.detail["why"] == FULL
        if ask is not None and ask.state == "full":
            if not self._protocol.full_leaves or not full:
                what = f"the context of {event.agent} is full, and it is said to be dead"
                self._add(Check.DEATH, what, event)
        elif ask is None or ask.state != "failed" or ask.attempt != self._protocol.attempts:
            self._add(Check.DEATH, f"{event.agent} is said to be dead, and has attempts left", event)
        elif full:
            self._add(Check.DEATH, f"the context of {event.agent} is not full", event)
        self._facts.dead[event.agent] = event.number

    def _stepped(self, event: Event) -> None:
        facts, actions = self._facts, event.detail["actions"]
        self._check_deaths(event, actions)
        moved = [agent for agent, text in actions.items() if text is not None]
        for agent in moved:
            self._play(event, agent, actions[agent])
        self._check_turn(event, moved, actions)
        facts.steps.append(dict(actions))
        facts.rewards.append(dict(event.detail["rewards"]))
        facts.last = moved[-1] if moved else facts.last
        self._now(event)

    def _play(self, event: Event, agent: str, text: str) -> None:
        """An action went into the environment: it must be the answer that its agent gave."""
        facts, ask = self._facts, self._facts.asks.get(agent)
        if ask is None or ask.state != "answered" or ask.text != text:
            if text in facts.stale.get(agent, ()):
                self._add(Check.ATTEMPTS, f"the answer of a dead attempt of {agent} is played", event)
            elif ask is not None and ask.state == "failed":
                self._add(Check.DEATH, f"{agent} gave no answer, and one is played for it", event)
            else:
                self._add(Check.INVENTED, f"{agent} never said {text!r:.60}", event)
        elif ask.version != self._version(event, agent):
            self._add(Check.VERSION, f"{agent} sampled from {ask.version}", event)
        if ask is not None:
            del facts.given.get(agent, [])[: ask.known]
            facts.turns.setdefault(agent, []).append(_Turn(ask.round, ask.attempt, len(facts.steps)))
            del facts.asks[agent]

    def _check_deaths(self, event: Event, actions: Mapping[str, str | None]) -> None:
        """Who is dead leaves, and who leaves is dead."""
        facts = self._facts
        for agent in [agent for agent, text in actions.items() if text is None]:
            if agent not in facts.dead:
                self._add(Check.DEATH, f"{agent} is made to leave, and is not dead", event)
            facts.gone.add(agent)
        for agent in sorted(set(facts.dead) - facts.gone):
            self._add(Check.DEATH, f"{agent} is dead, and the environment is not told", event)
        for agent, ask in facts.asks.items():
            if self._is_over(ask) and agent not in facts.dead:
                ask.passed += 1
                # without a barrier others may step before what has just come is dealt with
                if ask.passed > (0 if self._protocol.turn_barrier else 1):
                    self._add(Check.DEATH, f"no turn of {agent} can come, and the episode goes on", event)

    def _check_silent(self, end: Event) -> None:
        """Nobody whose turn comes to nothing may be passed over in silence."""
        for agent, ask in self._facts.asks.items():
            truncates = ask.state == "full" and end.detail["reason"] == EpisodeEnd.CONTEXT
            if self._is_over(ask) and agent not in self._facts.dead and not truncates:
                self._add(Check.DEATH, f"no turn of {agent} can come, and nothing is said of it", end)

    def _check_turn(self, event: Event, moved: list[str], actions: Mapping[str, str | None]) -> None:
        """Those act whom the order lets act, and nobody's answer is left behind."""
        facts, protocol = self._facts, self._protocol
        whose = next_in_turn(protocol.agents, facts.last, facts.dead) if facts.last else ""
        if protocol.order is TurnOrder.SEQUENTIAL and moved and moved != [whose or moved[0]]:
            self._add(Check.ORDER, f"{', '.join(moved)} moves, and it is the turn of {whose}", event)
        for agent in moved:
            if agent not in facts.to_act:
                self._add(Check.ORDER, f"{agent} moves out of turn", event)
        barrier = protocol.turn_barrier and protocol.order is not TurnOrder.SEQUENTIAL
        if barrier and (missing := set(facts.to_act) - set(actions)):
            self._add(Check.TURN_BARRIER, f"a step without {min(missing)}", event)
        for agent, ask in facts.asks.items():
            if protocol.turn_barrier and ask.state == "answered":
                self._add(Check.LOST_MESSAGE, f"the answer of {agent} is not played", event)

    def _broke(self, event: Event) -> None:
        self._facts.broke = True

    def _credited(self, event: Event) -> None:
        if event.agent in self._facts.credited:
            self._add(Check.CREDIT, f"{event.agent} is credited twice", event)
        self._facts.credited[event.agent] = event

    def _ended(self, event: Event) -> None:
        if self._facts.end is not None:
            self._add(Check.END, "it ends twice", event)
        self._facts.end = event

    # what must have come of it

    def _reason(self, end: Event) -> None:
        """The reason that is given must be the true one."""
        facts, said = self._facts, end.detail["reason"]
        if said not in set(EpisodeEnd):
            self._add(Check.END, f"{said!r:.60} is no reason", end)
            return
        living = len(self._protocol.agents) - len(facts.dead)
        opened = facts.seed is not None
        playing = opened and bool(facts.to_act) and not facts.broke
        states = {ask.state for agent, ask in facts.asks.items() if agent not in facts.dead}
        # that a context is full is known at once; a deadline can only come before it if others are waited for
        hidden = "full" in states and not states & {"open", "failed"}
        holds = {
            EpisodeEnd.DONE: opened and not facts.to_act and not facts.broke,
            EpisodeEnd.MAX_ROUNDS: playing and len(facts.steps) >= self._protocol.max_rounds,
            EpisodeEnd.CONTEXT: playing and "full" in states and not self._protocol.full_leaves,
            EpisodeEnd.AGENT_DIED: bool(facts.dead) and self._protocol.on_death is OnDeath.END,
            EpisodeEnd.QUORUM_LOST: living < self._protocol.quorum,
            EpisodeEnd.DEADLINE: (playing or not opened) and not facts.broke and not hidden,
            EpisodeEnd.OUT_OF_ORDER: playing and not self._in_order(),
            EpisodeEnd.ENVIRONMENT_FAILED: facts.broke or not self._sound(),
            EpisodeEnd.CANCELLED: True,
        }
        if not holds[EpisodeEnd(said)]:
            self._add(Check.END, f"the reason is not {said}", end)
        if EpisodeEnd(said).counts:
            if facts.dead and self._protocol.on_death is OnDeath.END:
                self._add(Check.DEATH, f"{min(facts.dead)} is dead, and the episode goes on", end)
            if living < self._protocol.quorum:
                self._add(Check.DEATH, "no quorum, and the episode goes on", end)
            self._check_silent(end)

    def _in_order(self) -> bool:
        facts = self._facts
        return in_order(self._protocol, facts.to_act, facts.together, facts.last, facts.dead)

    def _sound(self) -> bool:
        """Whether the environment gave finite rewards, and to the agents."""
        rewards = self._facts.rewards
        agents = set(self._protocol.agents)
        named = {*self._facts.to_act, *self._facts.given, *(name for step in rewards for name in step)}
        return named <= agents and all(math.isfinite(value) for step in rewards for value in step.values())

    def _rewards(self, recomputes: Recomputes | None) -> None:
        """Every agent's credit against what its actions earn."""
        facts = self._facts
        earned = facts.rewards
        if recomputes is not None and facts.seed is not None:
            earned = recomputes.recompute(facts.seed, facts.steps)
            for number, (paid, right) in enumerate(zip(facts.rewards, earned, strict=True)):
                if not _same(paid, right):
                    self._add(Check.REWARD, f"step {number} paid {paid}, its actions earn {right}")
        for agent, policy in self._protocol.policies.items():
            event = facts.credited.get(agent)
            if event is None:
                self._add(Check.CREDIT, f"{agent} is not credited", facts.end)
                continue
            if event.detail["policy"] != policy:
                self._add(Check.CREDIT, f"{agent} is credited to {event.detail['policy']}", event)
            self._credit(event, [step.get(agent, 0.0) for step in earned])

    def _credit(self, event: Event, earned: list[float]) -> None:
        agent, detail = event.agent, event.detail
        own = self._facts.turns.get(agent, [])
        said = [(turn["round"], turn["attempt"]) for turn in detail["turns"]]
        if said != [(turn.round, turn.attempt) for turn in own]:
            self._add(Check.CREDIT, f"{agent} is credited with turns {said}", event)
        total = math.fsum(earned)
        if self._missing(agent):
            if detail["reward"] is not None:
                what = f"{agent} gets {detail['reward']}, and its reward is missing"
                self._add(Check.REWARD, what, event)
        elif detail["reward"] is None or abs(detail["reward"] - total) > _TOLERANCE:
            self._add(Check.REWARD, f"{agent} gets {detail['reward']}, and earned {total}", event)
        if len(said) == len(own) and not _close(_by_turn(own, earned), detail["turns"]):
            self._add(Check.REWARD, f"the rewards of the turns of {agent} are others", event)

    def _missing(self, agent: str) -> bool:
        end = self._facts.end
        assert end is not None
        said = end.detail["reason"]
        counts = said in set(EpisodeEnd) and EpisodeEnd(said).counts
        forfeits = self._protocol.on_death is OnDeath.FORFEIT
        return not counts or (agent in self._facts.dead and not forfeits)

    def _version(self, event: Event, agent: str = "") -> str:
        policy = self._protocol.policies.get(agent or event.agent, "")
        return self._versions(policy, event.generation, self._episode)

    def _ask_of(self, event: Event) -> _Ask | None:
        """The attempt that an event speaks of, if it is the agent's last."""
        ask = self._facts.asks.get(event.agent)
        same = ask is not None and (ask.round, ask.attempt) == (event.round, event.attempt)
        return ask if same else None

    def _add(self, check: Check, detail: str, event: Event | None = None) -> None:
        self._found.append(Violation(check, detail, self._episode, -1 if event is None else event.number))


def _by_turn(turns: list[_Turn], earned: list[float]) -> list[float]:
    """What each turn earned: a step's reward belongs to the agent's last turn by then, else to its first."""
    totals = [0.0] * len(turns)
    for step, reward in enumerate(earned):
        place = max(0, sum(turn.step <= step for turn in turns) - 1)
        if turns:
            totals[place] += reward
    return totals


def _close(right: list[float], turns: list[dict[str, Any]]) -> bool:
    return all(abs(one - turn["reward"]) <= _TOLERANCE for one, turn in zip(right, turns, strict=True))


def _same(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return all(abs(one.get(name, 0.0) - other.get(name, 0.0)) <= _TOLERANCE for name in {*one, *other})
