"""Two small environments: one with conditional turns, one with free messages."""

from collections.abc import Sequence

from envs.draws import stable_hash
from envs.multi import Actions, Situation, Spoken, check_actions
from envs.protocol import Observation

NAMES = ("ann", "bob", "cleo")


class Asking:
    """Conditional turns: each round the seed says who is asked; 1 for whoever says `yes`, to the others.

    So all rewards go to agents that may not have moved.
    """

    def __init__(self, rounds: int = 6) -> None:
        self._rounds = rounds
        self._situation = Situation(())

    @property
    def agents(self) -> tuple[str, ...]:
        return NAMES

    def reset(self, seed: int) -> Situation:
        self._seed, self._played, self._gone = seed, 0, list[str]()
        self._situation = self._now({}, [])
        return self._situation

    def step(self, actions: Actions) -> Situation:
        check_actions(self._situation, actions, self._gone)
        self._gone += [agent for agent, action in actions.items() if action is None]
        said = sorted((agent, action.text) for agent, action in actions.items() if action is not None)
        self._played += 1
        self._situation = self._now(_shares(dict(said)), [f"{agent}:{text};" for agent, text in said])
        return self._situation

    def recompute(self, seed: int, steps: Sequence[Spoken]) -> list[dict[str, float]]:
        return [_shares({agent: text for agent, text in step.items() if text is not None}) for step in steps]

    def _now(self, rewards: dict[str, float], news: list[str]) -> Situation:
        living = [agent for agent in NAMES if agent not in self._gone]
        draw = stable_hash("asking", self._seed, self._played)
        asked = [agent for i, agent in enumerate(living) if draw >> i & 1] or living[:1]
        over = self._played >= self._rounds
        shown = {agent: Observation.user("".join(news) + f"{self._played}?") for agent in NAMES}
        return Situation(() if over else tuple(asked), True, shown, rewards)


class Talking:
    """Free messages: each may speak `turns` times, whenever it likes; who hears a message gets 0.5."""

    def __init__(self, turns: int = 3) -> None:
        self._turns = turns
        self._situation = Situation(())

    @property
    def agents(self) -> tuple[str, ...]:
        return NAMES

    def reset(self, seed: int) -> Situation:
        self._left = dict.fromkeys(NAMES, self._turns)
        told = {agent: Observation.user(f"[{seed}]") for agent in NAMES}
        self._situation = Situation(NAMES, observations=told)
        return self._situation

    def step(self, actions: Actions) -> Situation:
        check_actions(self._situation, actions, [agent for agent, left in self._left.items() if left < 0])
        news: dict[str, str] = {}
        for agent in NAMES:
            if agent in actions:
                action = actions[agent]
                self._left[agent] = -1 if action is None else self._left[agent] - 1
                for other in NAMES:
                    if action is not None and other != agent:
                        news[other] = news.get(other, "") + f"{agent}:{action.text};"
        to_act = tuple(agent for agent, left in self._left.items() if left > 0)
        told = {agent: Observation.user(text) for agent, text in news.items()}
        said = {agent: action.text for agent, action in actions.items() if action is not None}
        self._situation = Situation(to_act, False, told, _heard(said))
        return self._situation

    def recompute(self, seed: int, steps: Sequence[Spoken]) -> list[dict[str, float]]:
        return [_heard({agent: text for agent, text in step.items() if text is not None}) for step in steps]


def _shares(said: Spoken) -> dict[str, float]:
    yes = [agent for agent, text in said.items() if text == "yes"]
    return {agent: float(sum(other != agent for other in yes)) for agent in NAMES if yes}


def _heard(said: Spoken) -> dict[str, float]:
    return {agent: 0.5 * sum(other != agent for other in said) for agent in NAMES}
