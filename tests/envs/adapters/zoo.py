"""Games for PettingZoo's adapter, as a third party would write them: agents die, and are no texts."""

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv


class Survivors(AECEnv):
    """In turn; 0 stays, 1 leaves the game with what is in the pot, to which everybody else pays."""

    metadata: ClassVar[dict[str, Any]] = {"name": "survivors", "render_modes": []}

    def __init__(self, players: int = 3, rounds: int = 3) -> None:
        super().__init__()
        self.possible_agents = list(range(players))
        self.rounds = rounds

    def observation_space(self, agent: Any) -> spaces.Space:
        return spaces.Dict(
            {"observation": spaces.Box(0, 99, (2,), np.int64), "action_mask": spaces.MultiBinary(2)}
        )

    def action_space(self, agent: Any) -> spaces.Space:
        return spaces.Discrete(2)

    def observe(self, agent: Any) -> Any:
        # from the second round on one must leave
        mask = np.array([self.turns < len(self.possible_agents), 1], np.int8)
        return {"observation": np.array([self.pot, len(self.agents)]), "action_mask": mask}

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = self.possible_agents[:]
        self.pot = int(np.random.default_rng(seed).integers(1, 90))
        self.turns = 0
        self.rewards = dict.fromkeys(self.agents, 0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self.agent_selection = self.agents[0]

    def step(self, action: int | None) -> None:
        if self.terminations[self.agent_selection] or self.truncations[self.agent_selection]:
            self._was_dead_step(action)
            return
        agent = self.agent_selection
        self._clear_rewards()
        self.turns += 1
        if action == 1:
            self.rewards = {one: self.pot if one == agent else -1 for one in self.agents}
            self.terminations[agent] = True
        following = self.agents[(self.agents.index(agent) + 1) % len(self.agents)]
        self.agent_selection = following
        self._deads_step_first()


class Bids(ParallelEnv):
    """All at once; the highest number wins 1; who bids 3 is out."""

    metadata: ClassVar[dict[str, Any]] = {"name": "bids", "render_modes": []}
    possible_agents: ClassVar[list[str]] = ["ann", "bob", "cy"]

    def observation_space(self, agent: Any) -> spaces.Space:
        return spaces.Discrete(10)

    def action_space(self, agent: Any) -> spaces.Space:
        return spaces.Discrete(4)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = self.possible_agents[:]
        self.round = 0
        return dict.fromkeys(self.agents, 0), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        self.round += 1
        best = max(actions.values())
        rewards = {agent: float(bid == best) for agent, bid in actions.items()}
        out = {agent: bid == 3 for agent, bid in actions.items()}
        late = dict.fromkeys(self.agents, self.round == 3)
        infos: dict[str, Any] = {agent: {"action_mask": [1, 1, 0, 1]} for agent in self.agents}
        observations = dict.fromkeys(self.agents, self.round)
        self.agents = [agent for agent in self.agents if not out[agent] and self.round < 3]
        return observations, rewards, out, late, infos


class Pictures(Bids):
    """What it shows has no text."""

    def observation_space(self, agent: Any) -> spaces.Space:
        return spaces.Box(0, 255, (64, 64, 3), np.uint8)


class Steering(Bids):
    """Its actions have no numbers."""

    def action_space(self, agent: Any) -> spaces.Space:
        return spaces.Box(-1, 1, (2,))


def env(kind: str = "survivors", **kwargs: Any) -> Any:
    return Survivors(**kwargs)


def parallel_env(kind: str = "bids") -> Any:
    return {"bids": Bids, "pictures": Pictures, "steering": Steering}[kind]()
