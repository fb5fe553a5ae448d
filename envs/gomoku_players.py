"""Scripted players of the games of `envs.gomoku_rules`: `random` and `heuristic`."""

from collections.abc import Mapping
from random import Random
from types import MappingProxyType
from typing import Protocol

from envs.gomoku_rules import EMPTY, Board, Move, windows

_BASE = 64
"""More than twice the windows that one point lies in (at most 24): one longer line outweighs all shorter."""


class Player(Protocol):
    """Somebody who plays a side; keeps nothing between moves."""

    def choose(self, board: Board, random: Random) -> Move:
        """A legal move of the side to move; all chance in it comes from `random`.

        Raises:
            ValueError: the game is over.
        """
        ...


class RandomPlayer:
    """Any legal move, all equally likely."""

    def choose(self, board: Board, random: Random) -> Move:
        """Draw one of the legal moves.

        Raises:
            ValueError: the game is over.
        """
        _require_running(board)
        return random.choice(board.legal_moves())


class HeuristicPlayer:
    """Wins where it can, blocks where it must, else makes its lines longer and spoils the other's.

    It looks one move ahead only. What a point is worth is the sum over the windows (`line` points in
    a row) around it that only one side has stones in: more for more stones, double for its own.
    """

    def choose(self, board: Board, random: Random) -> Move:
        """The best point; of equally good ones, `random` draws one.

        Raises:
            ValueError: the game is over.
        """
        _require_running(board)
        worth = _worth(board)
        best = max(worth.values())
        return board.move_at(random.choice([index for index, value in worth.items() if value == best]))


PLAYERS: Mapping[str, Player] = MappingProxyType({"random": RandomPlayer(), "heuristic": HeuristicPlayer()})
"""The players by name."""


def _worth(board: Board) -> dict[int, int]:
    """What each empty point is worth to the side to move, by its place in `cells`."""
    own = board.to_move
    other = "O" if own == "X" else "X"
    worth = {index: 0 for index, cell in enumerate(board.cells) if cell == EMPTY}
    for window in windows(board.size, board.line):
        cells = [board.cells[index] for index in window]
        mine, theirs = cells.count(own), cells.count(other)
        if mine and theirs:
            continue
        value = _BASE**theirs if theirs else 2 * _BASE**mine
        if mine == board.line - 1:
            value *= _BASE  # a win goes before any number of threats
        for index, cell in zip(window, cells, strict=True):
            if cell == EMPTY:
                worth[index] += value
    return worth


def _require_running(board: Board) -> None:
    if board.over:
        raise ValueError(f"board: {str(board)!r:.400} is not accepted; accepted: a game that is not over")
