"""`gomoku_match`: two agents play a game on a square board; tic-tac-toe is size 3, line 3."""

from collections.abc import Sequence
from random import Random
from typing import Literal

from envs.arguments import require
from envs.draws import draws_needed, split_of, stable_hash
from envs.gomoku_notation import Points, notation
from envs.gomoku_players import PLAYERS
from envs.gomoku_rules import Board
from envs.multi import Actions, Situation, Spoken, check_actions, require_turn
from envs.protocol import Action, Observation, Split

AGENTS: tuple[str, ...] = ("X", "O")
_REWARDS = {"score": (1.0, 0.5, 0.0), "zero_sum": (1.0, 0.0, -1.0)}
"""Win, draw, loss."""


class GomokuMatch:
    """The agents `X` and `O` take turns; who gets `line` stones in a row first wins.

    A game begins with a position of a few random stones, which both are shown as rows of `.`, `X`
    and `O`. Who is to move sees its side last, as in `X:`; the first well-formed move of its
    action counts: a letter for the column and a number for the row, `a1` being top left. The other
    is then told the move and the position. An action without a move, or with one that is not legal,
    loses the game, and so does leaving it. Rewards come with the last move, to both.

    The demonstrations are the moves of the heuristic player, which looks one move ahead.

    A problem is the position at the start, turned or mirrored the same one; none is in both splits.

    Args:
        size: rows and columns, 3 to 19.
        line: stones in a row that win, 3 to 6; more win as well.
        rewards: `score`: 1 for a win, 0.5 for a draw, 0 for a loss; `zero_sum`: 1, 0, -1.
        opening: random stones before the first move.
        show: after a move show the whole `board` again, or the `move` alone.
        points: how points are written: by `coordinates`, or by `letters`, which stand on the board
            where it is free (up to size 5; see `envs.gomoku_notation`).
        held_out: share of all problems that is held out.
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        size: int = 5,
        line: int = 4,
        rewards: Literal["score", "zero_sum"] = "zero_sum",
        opening: int = 2,
        show: Literal["board", "move"] = "board",
        points: Points = "coordinates",
        held_out: float = 0.2,
    ) -> None:
        self._empty = Board.empty(size, line)
        require("rewards", rewards, rewards in _REWARDS, ", ".join(_REWARDS))
        require("opening", opening, 1 <= opening <= size, f"1 to {size}, as size is {size}")
        require("show", show, show in ("board", "move"), "board, move")
        require("held_out", held_out, 0 <= held_out < 1, "at least 0, less than 1")
        self._split: Split = split
        self._win, self._drawn, self._loss = _REWARDS[rewards]
        self._opening = opening
        self._show_board = show == "board"
        self._notation = notation(points, size)
        self._held_out = held_out
        self._board = self._empty
        self._moves: list[str] = []
        self._seed = 0
        self._situation = Situation(())
        self._open(0)

    @property
    def agents(self) -> tuple[str, ...]:
        """`X` and `O`."""
        return AGENTS

    def reset(self, seed: int) -> Situation:
        """Start the game of `seed`: both see the position."""
        self._seed, self._board, self._moves = seed, self._open(seed), []
        position = self._notation.board(self._board)
        shown: dict[str, Observation] = {side: Observation.user(position) for side in AGENTS}
        shown[self._board.to_move] = Observation.user(f"{position}\n{self._board.to_move}:")
        self._situation = Situation((self._board.to_move,), observations=shown)
        return self._situation

    def step(self, actions: Actions) -> Situation:
        """Play the move of the side to move, or end the game of one who leaves.

        Raises:
            RuntimeError: no game is running.
            ValueError: it is not this agent's turn.
        """
        check_actions(self._situation, actions)
        side = self._board.to_move
        left = [agent for agent in AGENTS if agent in actions and actions[agent] is None]
        if left:
            return self._end(_other(left[0]) if len(left) == 1 else None, "left")
        action = actions[side]
        move = self._notation.read(self._board, action.text) if action is not None else None
        if move is None or not self._board.is_legal(move):
            return self._end(_other(side), "no move" if move is None else "illegal")
        self._board = self._board.play(move)
        self._moves.append(str(move))
        if self._board.over:
            return self._end(self._board.winner, "line" if self._board.winner else "full")
        said = self._notation.move(self._board, move)
        position = f"{self._notation.board(self._board)}\n" if self._show_board else ""
        following = Observation.user(f"\n{side}:{said}\n{position}{_other(side)}:")
        self._situation = Situation((_other(side),), observations={_other(side): following})
        return self._situation

    def demonstration(self, agent: str) -> Action:
        """The heuristic player's move; of equally good ones, the episode's seed and the turn draw one."""
        require_turn(self._situation, agent)
        random = Random(stable_hash("gomoku_match", "demonstration", self._seed, self._board.stones))
        move = PLAYERS["heuristic"].choose(self._board, random)
        return Action(self._notation.move(self._board, move))

    def recompute(self, seed: int, steps: Sequence[Spoken]) -> list[dict[str, float]]:
        """Replay a log of moves on the rules alone; what comes after the game's end earns nothing."""
        board, rewards = self._open(seed), list[dict[str, float]]()
        over = False
        for step in steps:
            gone = sorted(agent for agent, text in step.items() if text is None)
            move = self._notation.read(board, step.get(board.to_move) or "")
            loser: str | None = None
            if gone:
                loser = gone[0] if len(gone) == 1 else None
            elif move is None or not board.is_legal(move):
                loser = board.to_move
            else:
                board = board.play(move)
                loser = None if board.winner is None else _other(board.winner)
            ends = not over and bool(gone or board.over or loser)
            rewards.append(self._shares(None if loser is None else _other(loser)) if ends else {})
            over = over or ends
        return rewards

    def _end(self, winner: str | None, how: str) -> Situation:
        info = {"winner": winner or "draw", "how": how, "moves": list(self._moves)}
        self._situation = Situation((), rewards=self._shares(winner), info=info)
        return self._situation

    def _shares(self, winner: str | None) -> dict[str, float]:
        if winner is None:
            return dict.fromkeys(AGENTS, self._drawn)
        return {side: self._win if side == winner else self._loss for side in AGENTS}

    def _open(self, seed: int) -> Board:
        """Draw positions until one of the split comes: fixed by the seed."""
        # where there are few problems, a split may be a smaller share than was asked for
        for draw in range(10 * draws_needed(self._split, self._held_out)):
            random = Random(stable_hash("gomoku_match", seed, draw))
            board = self._empty
            while not board.over and board.stones < self._opening:
                board = board.play(PLAYERS["random"].choose(board, random))
            if not board.over and split_of(board.canonical(), self._held_out) == self._split:
                return board
        raise ValueError(f"held_out: {self._held_out!r} leaves no opening in the split {self._split!r}")


def _other(side: str) -> str:
    return "O" if side == "X" else "X"
