"""`pettingzoo/<module>`: games of PettingZoo, of its AEC and Parallel interfaces, as text.

`AecGame`, `ParallelGame` and `make_game` run in the library's process; `pettingzoo_environment` in ours.
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from envs.adapters.choices import Choices, Illegal
from envs.adapters.hosting import Spec, SplitBy, Splitting, hosted
from envs.adapters.libraries import RefusedError, require_package
from envs.multi import Actions, MultiEnvironment, Situation
from envs.protocol import Observation, Split

if TYPE_CHECKING:
    from envs.adapters.pettingzoo_views import View

PREFIX = "pettingzoo/"
Api = Literal["auto", "aec", "parallel"]


class _Game:
    """What both interfaces share: who is who, what is shown, and what an action means."""

    def __init__(self, env: Any, view: "View", instruction: str, illegal: Illegal, penalty: float) -> None:
        self._env = env
        self._view = view
        self._instruction = instruction
        self._illegal = illegal
        self._penalty = penalty
        self._ids: dict[str, Any] = {str(agent): agent for agent in env.possible_agents}
        self._legal: dict[str, list[int]] = {}
        self._choices: dict[str, Choices] = {}
        self._met: set[str] = set()
        self._gone: set[str] = set()
        self._illegals: dict[str, int] = {}

    @property
    def agents(self) -> tuple[str, ...]:
        """PettingZoo's `possible_agents`."""
        return tuple(self._ids)

    def close(self) -> None:
        """Give back what the library holds."""
        self._env.close()

    def _start(self) -> None:
        self._met, self._gone, self._illegals = set(), set(), {}

    def _playing(self) -> set[str]:
        return {str(agent) for agent in self._env.agents}

    def _show(self, name: str, observation: Any, info: Mapping[str, Any]) -> Observation:
        """What an agent is shown when it is to act; and from now on its legal actions."""
        agent = self._ids[name]
        space = self._env.action_space(agent)
        first = int(space.start)
        mask = info.get("action_mask")
        if mask is None and isinstance(observation, Mapping):
            mask = observation.get("action_mask")
        legal = [first + at for at in range(int(space.n)) if mask is None or mask[at]]
        choices = self._view.choices(self._env, agent, legal)
        self._legal[name], self._choices[name] = legal, choices
        text = self._view.text(self._env, agent, observation)
        if name in self._met:
            opening = "\n"
        else:
            self._met.add(name)
            opening = f"{self._instruction}you are {name}\n"
            opening += "" if self._view.changing else f"actions: {choices.listed()}\n"
        all_legal = mask is None and not self._view.changing
        return Observation.user(
            opening + text + ("" if all_legal else f"\nlegal: {choices.listed(legal)}") + "\n"
        )

    def _meant(self, name: str, text: str) -> int | None:
        """The legal action that a text means; None: it loses."""
        number = self._choices[name].read(text)
        if number is not None and number in self._legal[name]:
            return number
        self._illegals[name] = self._illegals.get(name, 0) + 1
        return self._first(name) if self._illegal == "first" else None

    def _first(self, name: str) -> int:
        return self._legal[name][0]

    def _lost(self, losers: set[str]) -> Situation:
        """The episode ends by those who left, or said nothing legal."""
        rewards = {name: self._penalty if name in losers else 0.0 for name in self._ids}
        return Situation((), rewards=rewards, info=self._info() | {"lost": sorted(losers)})

    def _info(self) -> dict[str, Any]:
        return {"illegal": dict(self._illegals), "gone": sorted(self._gone)}


class AecGame(_Game):
    """One agent after the other."""

    def reset(self, seed: int) -> Situation:
        """Start the game of `seed`."""
        self._env.reset(seed=seed)
        self._start()
        self._pass_over_the_dead()
        return self._situation({})

    def step(self, actions: Actions) -> Situation:
        """Play the action of the agent that is selected, and for those that left if they are next."""
        leaving = {name for name, action in actions.items() if action is None}
        self._gone |= leaving
        if leaving and (self._illegal == "lose" or self._playing() <= self._gone):
            return self._lost(leaving)
        acting = str(self._env.agent_selection)
        action = actions.get(acting)
        rewards: dict[str, float] = {}
        if action is None and acting not in leaving:
            return Situation((acting,), info=self._info())  # others left; it is still to act
        if action is not None:
            number = self._meant(acting, action.text)
            if number is None:
                return self._lost({acting})
            self._play(number, rewards)
        while self._env.agents and (name := str(self._env.agent_selection)) in self._gone:
            self._look(name)
            self._play(self._first(name), rewards)
        return self._situation(rewards)

    def _play(self, number: int, rewards: dict[str, float]) -> None:
        self._env.step(number)
        for agent, reward in self._env.rewards.items():
            rewards[str(agent)] = rewards.get(str(agent), 0.0) + float(reward)
        self._pass_over_the_dead()

    def _pass_over_the_dead(self) -> None:
        env = self._env
        while env.agents and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
            env.step(None)

    def _look(self, name: str) -> Observation:
        agent = self._ids[name]
        return self._show(name, self._env.observe(agent), self._env.infos[agent])

    def _situation(self, rewards: dict[str, float]) -> Situation:
        if not self._env.agents:
            return Situation((), rewards=rewards, info=self._info())
        name = str(self._env.agent_selection)
        return Situation((name,), observations={name: self._look(name)}, rewards=rewards, info=self._info())


class ParallelGame(_Game):
    """All agents at once."""

    def reset(self, seed: int) -> Situation:
        """Start the game of `seed`."""
        observations, infos = self._env.reset(seed=seed)
        self._start()
        return self._situation({}, observations, infos)

    def step(self, actions: Actions) -> Situation:
        """Play all actions, and one for each that left."""
        leaving = {name for name, action in actions.items() if action is None}
        self._gone |= leaving
        playing = self._playing()
        if leaving and (self._illegal == "lose" or playing <= self._gone):
            return self._lost(leaving)
        meant: dict[Any, int] = {}
        losers: set[str] = set()
        for name in sorted(playing):
            action = actions.get(name)
            number = self._first(name) if action is None else self._meant(name, action.text)
            if number is None:
                losers.add(name)
            else:
                meant[self._ids[name]] = number
        if losers:
            return self._lost(losers)
        observations, rewards, _, _, infos = self._env.step(meant)
        told = {str(agent): float(reward) for agent, reward in rewards.items()}
        return self._situation(told, observations, infos)

    def _situation(
        self, rewards: dict[str, float], observations: Mapping[Any, Any], infos: Mapping[Any, Any]
    ) -> Situation:
        shown = {
            str(agent): self._show(str(agent), observations[agent], infos.get(agent, {}))
            for agent in self._env.agents
        }
        to_act = tuple(name for name in shown if name not in self._gone)
        seen = {name: shown[name] for name in to_act}
        return Situation(to_act, together=True, observations=seen, rewards=rewards, info=self._info())


def make_game(
    name: str,
    args: dict[str, Any],
    api: Api,
    actions: list[str] | None,
    instruction: str | None,
    illegal: Illegal,
    penalty: float,
) -> AecGame | ParallelGame:
    """Make one, in the library's process.

    Raises:
        RefusedError: it cannot be played by text.
    """
    from gymnasium import spaces

    from envs.adapters.pettingzoo_views import view_of

    path = name if "." in name else f"pettingzoo.{name.replace('/', '.')}"
    module = importlib.import_module(path)
    # of a game that all play at once, the AEC interface is an imitation
    parallel = api == "parallel" or (api == "auto" and hasattr(module, "parallel_env"))
    create = getattr(module, "parallel_env" if parallel else "env", None)
    if create is None:
        raise RefusedError(f"{path} has no {'parallel_env' if parallel else 'env'}")
    env = create(**args)
    if not getattr(env, "possible_agents", None):
        raise RefusedError("it does not say who its possible_agents are")
    for agent in env.possible_agents:
        if not isinstance(env.action_space(agent), spaces.Discrete):
            raise RefusedError(f"the actions of {agent} are {env.action_space(agent)}; accepted: Discrete")
    view = view_of(env, actions)
    told = view.rules if instruction is None else instruction
    return (ParallelGame if parallel else AecGame)(env, view, told, illegal, penalty)


def pettingzoo_environment(
    name: str,
    split: Split = "train",
    args: dict[str, Any] | None = None,
    *,
    api: Api = "auto",
    actions: list[str] | None = None,
    instruction: str | None = None,
    illegal: Illegal = "lose",
    penalty: float = -1.0,
    split_by: SplitBy = "auto",
    held_out: float = 0.2,
) -> MultiEnvironment:
    """Any game of PettingZoo with numbered actions; its own arguments beside these.

    Args:
        name: its module below `pettingzoo`, such as `classic/tictactoe_v3`, or with dots any module that
            has `env` or `parallel_env`.
        split: see `held_out`.
        args: arguments of the game.
        api: the interface to be used; `auto`: Parallel where the module has it.
        actions: names of the actions, in the order of their numbers.
        instruction: text put before everything, in place of the rules that are known of some games.
        illegal: what an action that is unreadable or not legal does, and leaving.
        penalty: the reward of whoever loses by `illegal`.
        split_by: what tells problems of the two splits apart.
        held_out: share of the problems that is held out, where they differ by what is first shown.

    Raises:
        ValueError: the package is missing, or there is no such game, or it refuses an argument.
    """
    require_package(PREFIX + name, "pettingzoo")
    made = {"actions": actions, "instruction": instruction, "illegal": illegal, "penalty": penalty}
    spec = Spec(
        PREFIX + name,
        "envs.adapters.pettingzoo_adapter:make_game",
        {"name": name, "args": args or {}, "api": api} | made,
    )
    environment = hosted(spec, Splitting(split, split_by, held_out))
    assert isinstance(environment, MultiEnvironment)
    return environment
