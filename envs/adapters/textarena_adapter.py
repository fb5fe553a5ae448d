"""`textarena/<EnvId>`: the text games of TextArena, for one, two or more players.

`SingleGame`, `SeveralGame` and `make_game` run in the library's process; `textarena_environment` in ours.
"""

import copy
import json
from typing import Any

from envs.adapters.hosting import Spec, SplitBy, Splitting, hosted
from envs.adapters.libraries import RefusedError, require_package
from envs.arguments import require
from envs.multi import Actions, MultiEnvironment, Situation
from envs.protocol import Action, Environment, Observation, Split, StepResult

PREFIX = "textarena/"
MAX_PLAYERS = 15


class _Game:
    """A game of TextArena, and what each player has not been shown yet."""

    def __init__(self, env: Any, players: int, turns: int) -> None:
        import textarena

        self._wrappers: list[Any] = []
        while isinstance(env, textarena.Wrapper):
            if isinstance(env, textarena.ActionWrapper):
                self._wrappers.append(env)
            # those of observations show all that was said anew at each turn, which a dialogue has already
            env = env.env
        self._env = env
        self._own = textarena.ObservationType.PLAYER_ACTION
        self._players = players
        self._turns = turns
        self._said = 0

    def start(self, seed: int) -> None:
        """Begin the game of `seed`."""
        self._env.reset(num_players=self._players, seed=seed)
        self._said = 0

    def say(self, text: str) -> bool:
        """Let the current player say something; whether the game is over, also as it took too long."""
        for wrapper in self._wrappers:
            text = wrapper.action(text)
        done, _ = self._env.step(action=text)
        self._said += 1
        return bool(done) or self._said >= self._turns

    def shown(self) -> tuple[int, str]:
        """Who is to act, and what is new to them: all that is said in the game but for their own words."""
        player, messages = self._env.get_observation()
        names: dict[int, str] = getattr(self._env.state, "role_mapping", None) or {}
        lines = []
        for message in messages or []:
            if isinstance(message, str):
                lines.append(message)
                continue
            sender, text, kind = message
            if kind == self._own and (sender == player or self._players == 1):
                continue
            lines.append(f"[{'GAME' if sender == -1 else names.get(sender, f'Player {sender}')}] {text}")
        return int(player), "".join(f"\n{line}" for line in lines) + "\n"

    def outcome(self) -> tuple[dict[int, float], dict[str, Any]]:
        """The rewards at the end by player, and what the game says of it; nothing where it was cut off."""
        if not self._env.state.done:
            return {}, {"truncated": True}
        ended = self._env.close()
        rewards, told = ended if isinstance(ended, tuple) else (ended, {})
        info = {"truncated": False, "players": json.loads(json.dumps(told, default=str))}
        return {int(player): _number(reward) for player, reward in (rewards or {}).items()}, info


class SingleGame(_Game):
    """A game for one player."""

    def reset(self, seed: int) -> Observation:
        """Start the game of `seed`."""
        self.start(seed)
        return Observation.user(self.shown()[1])

    def step(self, action: Action) -> StepResult:
        """Take what the player says."""
        if not self.say(action.text):
            return StepResult(Observation.user(self.shown()[1]), 0.0, False)
        rewards, info = self.outcome()
        return StepResult(Observation(()), rewards.get(0, 0.0), True, info)


class SeveralGame(_Game):
    """A game for several players, of whom one acts at a time."""

    @property
    def agents(self) -> tuple[str, ...]:
        """`player_0`, `player_1`, ..."""
        return tuple(map(_name, range(self._players)))

    def reset(self, seed: int) -> Situation:
        """Start the game of `seed`."""
        self.start(seed)
        return self._situation()

    def step(self, actions: Actions) -> Situation:
        """Take what the current player says, or end the game of one who leaves."""
        leaving = {name for name, action in actions.items() if action is None}
        if leaving:
            return self._left(leaving)
        (action,) = actions.values()
        assert action is not None
        if not self.say(action.text):
            return self._situation()
        rewards, info = self.outcome()
        return Situation((), rewards={_name(player): one for player, one in rewards.items()}, info=info)

    def _situation(self) -> Situation:
        player, text = self.shown()
        return Situation((_name(player),), observations={_name(player): Observation.user(text)})

    def _left(self, leaving: set[str]) -> Situation:
        """Who leaves gets -1; of two, the other 1; of more, the others 0."""
        others = 1.0 if self._players == 2 and len(leaving) == 1 else 0.0
        rewards = {name: -1.0 if name in leaving else others for name in self.agents}
        return Situation((), rewards=rewards, info={"truncated": False, "left": sorted(leaving)})


def _name(player: int) -> str:
    return f"player_{player}"


def _number(reward: Any) -> float:
    """A reward; some games give the reason of an invalid move in its place, which is worth -1."""
    return -1.0 if isinstance(reward, str) else float(reward)


def make_game(name: str, args: dict[str, Any], players: int | None, turns: int) -> SingleGame | SeveralGame:
    """Make one, in the library's process.

    Raises:
        RefusedError: no number of players is accepted.
    """
    import textarena

    env = textarena.make(name, **args)
    states = ("TwoPlayer", "FFAMultiPlayer", "TeamMultiPlayer", "MinimalMultiPlayer")
    several = tuple(getattr(textarena, f"{state}State") for state in states)
    for count in range(1, MAX_PLAYERS + 1) if players is None else [players]:
        kind = SingleGame if count == 1 else SeveralGame
        tried = copy.deepcopy(env)
        try:
            kind(tried, count, turns).reset(0)
            if count == 1 and isinstance(tried.state, several):
                raise RefusedError("it is a game for several")  # some forget to ask how many play
        except Exception as error:  # noqa: BLE001  games tell the number that they want by all kinds of errors
            last = error
            continue
        return kind(env, count, turns)
    asked = f"1 to {MAX_PLAYERS}" if players is None else str(players)
    raise RefusedError(f"players: {asked} cannot play it: {type(last).__name__}: {last}")


def textarena_environment(
    name: str,
    split: Split = "train",
    args: dict[str, Any] | None = None,
    *,
    players: int | None = None,
    turns: int = 1000,
    split_by: SplitBy = "auto",
    held_out: float = 0.2,
) -> Environment | MultiEnvironment:
    """Any game of TextArena; its own arguments beside these.

    Args:
        name: its id in TextArena's registry, such as `TicTacToe-v0`.
        split: see `held_out`.
        args: arguments of the game.
        players: how many play; None: the fewest that can.
        turns: of all players together, after which the game is cut off without rewards.
        split_by: what tells problems of the two splits apart.
        held_out: share of the problems that is held out, where they differ by what is first shown.

    Raises:
        ValueError: the package is missing, or there is no such game, or it refuses an argument.
    """
    require("players", players, players is None or 1 <= players <= MAX_PLAYERS, f"1 to {MAX_PLAYERS}")
    require("turns", turns, turns >= 1, "1 or more")
    require_package(PREFIX + name, "textarena")
    made = {"name": name, "args": args or {}, "players": players, "turns": turns}
    spec = Spec(PREFIX + name, "envs.adapters.textarena_adapter:make_game", made)
    return hosted(spec, Splitting(split, split_by, held_out))
