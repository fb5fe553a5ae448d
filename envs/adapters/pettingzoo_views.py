"""What a game of PettingZoo shows as text: some that are known, and all others by their spaces."""

from typing import Any

import numpy as np

from envs.adapters.choices import Choices
from envs.adapters.libraries import RefusedError


class View:
    """Any game: what an agent observes, by its space; actions by number, or by names that were given."""

    rules = ""
    changing = False
    """Whether the names of actions belong to the state, so that only legal ones have any."""

    def __init__(self, env: Any, actions: list[str] | None) -> None:
        self._actions = actions

    def text(self, env: Any, agent: Any, observation: Any) -> str:
        """What `agent` observes."""
        from envs.adapters.spaces import written

        return written(env.observation_space(agent), observation)

    def choices(self, env: Any, agent: Any, legal: list[int]) -> Choices:
        """The actions of `agent`, of which some are legal now."""
        space = env.action_space(agent)
        return Choices(int(space.n), self._actions or self.names(env), int(space.start))

    def names(self, env: Any) -> list[str]:
        """Names of all actions; none: they go by their numbers."""
        return []


class TicTacToe(View):
    """`classic/tictactoe_v3`."""

    rules = "Three in a row win. x is you, o the other. Points are numbered 0 to 8, row by row.\n"


class ConnectFour(View):
    """`classic/connect_four_v3`."""

    rules = "Four in a row win; pieces fall down. x is you, o the other. Say a column, 0 to 6.\n"


class Go(View):
    """`classic/go_v5`."""

    rules = "Go. x is you, o the other. Points are numbered from 0, row by row.\n"

    def text(self, env: Any, agent: Any, observation: Any) -> str:
        """The stones; earlier positions, which are shown as well, are what the agent has seen."""
        from envs.adapters.spaces import board

        return board(np.asarray(observation["observation"])[:, :, :2])

    def names(self, env: Any) -> list[str]:
        """Points, and `pass`."""
        points = int(env.action_space(env.possible_agents[0]).n) - 1
        return [*map(str, range(points)), "pass"]


class RockPaperScissors(View):
    """`classic/rps_v2`."""

    rules = "Both choose at once; who beats the other wins the round.\n"

    def text(self, env: Any, agent: Any, observation: Any) -> str:
        """What the other chose last."""
        chosen = env.unwrapped._moves[int(observation)].lower()
        return f"the other chose {chosen}"

    def names(self, env: Any) -> list[str]:
        """`rock`, `paper`, `scissors`, ..."""
        return [move.lower() for move in env.unwrapped._moves[:-1]]


class Chess(View):
    """`classic/chess_v6`."""

    rules = "Chess. Capitals are white. Say a move by its two squares, as in e2e4 or e7e8q.\n"
    changing = True

    def text(self, env: Any, agent: Any, observation: Any) -> str:
        """The position."""
        position = env.unwrapped.board
        side = "white" if position.turn else "black"
        return f"{position}\n{side} to move; {position.fen()}"

    def choices(self, env: Any, agent: Any, legal: list[int]) -> Choices:
        """Legal moves as UCI writes them."""
        from pettingzoo.classic.chess import chess_utils

        player, position = env.possible_agents.index(agent), env.unwrapped.board
        moves = {number: chess_utils.action_to_move(position, number, player).uci() for number in legal}
        return Choices(int(env.action_space(agent).n), moves)


_VIEWS: dict[str, type[View]] = {
    "tictactoe_v3": TicTacToe,
    "connect_four_v3": ConnectFour,
    "go_v5": Go,
    "rps_v2": RockPaperScissors,
    "chess_v6": Chess,
}
"""By the name in a game's metadata."""


def view_of(env: Any, actions: list[str] | None) -> View:
    """How a game is shown.

    Raises:
        RefusedError: what it shows has no text.
    """
    from envs.adapters.spaces import unreadable

    kind = _VIEWS.get(str(env.metadata.get("name")), View)
    if kind.text is View.text:
        for agent in env.possible_agents:
            if why := unreadable(env.observation_space(agent)):
                raise RefusedError(f"{agent} has {why}")
    if actions is not None and kind.changing:
        raise RefusedError("its actions cannot be named")
    return kind(env, actions)
