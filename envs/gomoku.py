"""`gomoku`: a game on a square board against a scripted opponent; tic-tac-toe is size 3, line 3."""

from random import Random
from typing import Any, Literal

from envs.arguments import require
from envs.draws import draws_needed, split_of, stable_hash
from envs.gomoku_notation import Points, notation
from envs.gomoku_players import PLAYERS
from envs.gomoku_rules import Board, Move, Stone
from envs.protocol import Action, Observation, Split, StepResult


class Gomoku:
    """Get `line` stones in a row before the opponent does; rewards 1 for a win, `draw` for a draw, else 0.

    A game begins with a position of a few random stones, from which the agent is to move. It is
    shown as rows of `.`, `X` and `O`, then the agent's side, as in `X:`. The first well-formed move
    of an action counts: a letter for the column and a number for the row, `a1` being top left. An
    action without one, or with one that is not legal, loses the game.

    A problem is the position the agent is first shown, and turned or mirrored it is the same one:
    none is in both splits, and no later position of an episode is the first of another, as it has
    more stones. Well into a game, both splits can come to the same position.

    Args:
        size: rows and columns, 3 to 19.
        line: stones in a row that win, 3 to 6; more win as well.
        opponent: `random` plays any legal move; `heuristic` wins, blocks and builds lines.
        side: the agent's stones; `seed`: either, drawn by the episode's seed.
        opening: random stones before the agent's first move; one more if else the opponent were
            to move.
        draw: reward of a full board without a line.
        retries: actions without a legal move that an episode forgives.
        show: after the opponent's move show the whole `board` again, or the `move` alone.
        points: how points are written: by `coordinates`, or by `letters`, which stand on the board
            where it is free (up to size 5; see `envs.gomoku_notation`).
        instruction: text put before the first position.
        held_out: share of all problems that is held out.
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        size: int = 9,
        line: int = 5,
        opponent: Literal["random", "heuristic"] = "random",
        side: Literal["seed", "X", "O"] = "seed",
        opening: int = 2,
        draw: float = 0.5,
        retries: int = 0,
        show: Literal["board", "move"] = "board",
        points: Points = "coordinates",
        instruction: str = "",
        held_out: float = 0.2,
    ) -> None:
        self._empty = Board.empty(size, line)
        require("opponent", opponent, opponent in PLAYERS, ", ".join(PLAYERS))
        require("side", side, side in ("seed", "X", "O"), "seed, X, O")
        require("opening", opening, 1 <= opening <= size, f"1 to {size}, as size is {size}")
        require("draw", draw, 0 <= draw <= 1, "0 to 1")
        require("retries", retries, retries >= 0, "0 or more")
        require("show", show, show in ("board", "move"), "board, move")
        require("held_out", held_out, 0 <= held_out < 1, "at least 0, less than 1")
        self._split: Split = split
        self._opponent = PLAYERS[opponent]
        self._sides: tuple[Stone, ...] = ("X", "O") if side == "seed" else (side,)
        self._opening = opening
        self._draw_reward = draw
        self._retries = retries
        self._show_board = show == "board"
        self._notation = notation(points, size)
        self._instruction = instruction
        self._held_out = held_out
        self._seed = 0
        self._board: Board | None = None
        """The position of the running episode; None: none is running."""
        self._side: Stone = "X"
        self._opened: list[str] = []
        self._moves: list[str] = []
        self._illegal = 0
        self._draw(0)

    def reset(self, seed: int) -> Observation:
        """Start the episode of `seed`: the position is shown, and the agent is to move."""
        self._seed = seed
        self._board, self._opened = self._draw(seed)
        self._side = self._board.to_move
        self._moves, self._illegal = [], 0
        return Observation.user(f"{self._instruction}{self._notation.board(self._board)}\n{self._side}:")

    def step(self, action: Action) -> StepResult:
        """Play the agent's move and the opponent's answer to it.

        Raises:
            RuntimeError: no episode is running.
        """
        board = self._running()
        move = self._notation.read(board, action.text)
        if move is None or not board.is_legal(move):
            return self._refuse("no move" if move is None else "illegal")
        board = self._play(board, move)
        if board.over:
            return self._end(board.winner)
        answer = self._opponent.choose(board, self._random("opponent", board))
        board = self._play(board, answer)
        if board.over:
            return self._end(board.winner)
        self._board = board
        shown = f"{self._notation.board(board)}\n" if self._show_board else ""
        said = self._notation.move(board, answer)
        following = Observation.user(f"\n{self._other}:{said}\n{shown}{self._side}:")
        return StepResult(following, 0.0, False, self._info(None))

    def demonstration(self) -> Action:
        """The heuristic player's move: a good one; the best one only as far as it can see."""
        board = self._running()
        move = PLAYERS["heuristic"].choose(board, self._random("demonstration", board))
        return Action(self._notation.move(board, move))

    @property
    def _other(self) -> Stone:
        return "O" if self._side == "X" else "X"

    def _running(self) -> Board:
        if self._board is None:
            raise RuntimeError("no episode is running: call reset first")
        return self._board

    def _random(self, purpose: str, board: Board) -> Random:
        """The draws of one move: they depend on the episode's seed and on how far the game is."""
        return Random(stable_hash("gomoku", purpose, self._seed, board.stones))

    def _play(self, board: Board, move: Move) -> Board:
        self._moves.append(str(move))
        return board.play(move)

    def _refuse(self, why: str) -> StepResult:
        self._illegal += 1
        if self._illegal > self._retries:
            return self._end(self._other)
        return StepResult(Observation.user(f"\n{why}\n{self._side}:"), 0.0, False, self._info(None))

    def _end(self, winner: Stone | None) -> StepResult:
        self._board = None
        reward = self._draw_reward if winner is None else float(winner == self._side)
        return StepResult(Observation(()), reward, True, self._info(winner or "draw"))

    def _info(self, winner: str | None) -> dict[str, Any]:
        """For the record; `winner` is None while the game goes on, and `draw` if it ended in one."""
        return {
            "side": self._side,
            "opening": self._opened,
            "moves": list(self._moves),
            "winner": winner,
            "illegal": self._illegal,
        }

    def _draw(self, seed: int) -> tuple[Board, list[str]]:
        """Draw openings until one of the split comes: fixed by the seed."""
        # where there are few problems, a split may be a smaller share than was asked for
        for draw in range(10 * draws_needed(self._split, self._held_out)):
            random = Random(stable_hash("gomoku", "opening", seed, draw))
            board, moves = self._open(random)
            if not board.over and split_of(board.canonical(), self._held_out) == self._split:
                return board, moves
        raise ValueError(f"held_out: {self._held_out!r} leaves no opening in the split {self._split!r}")

    def _open(self, random: Random) -> tuple[Board, list[str]]:
        """A position of random stones in which the agent, whose side is drawn first, is to move."""
        side = random.choice(self._sides)
        board, moves = self._empty, list[str]()
        while not board.over and (board.stones < self._opening or board.to_move != side):
            move = PLAYERS["random"].choose(board, random)
            board = board.play(move)
            moves.append(str(move))
        return board, moves
