"""The rules of m,n,k games on square boards: `size` by `size` points, `line` stones in a row win.

Tic-tac-toe is size 3, line 3; gomoku is size 15, line 5. `X` moves first. More than `line` stones in a
row win as well. Nothing here knows of agents, rewards or texts around the board.

Nouns: `Move` (a point), `Board` (a position: it never changes, a move gives another one).
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from string import ascii_lowercase
from typing import Literal, NamedTuple

from envs.arguments import require

Stone = Literal["X", "O"]
EMPTY = "."
SIZES = range(3, 20)
LINES = range(3, 7)

_DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))
_MOVE = re.compile(r"(?<!\w)([A-Za-z])([1-9][0-9]?)(?!\w)")


class Move(NamedTuple):
    """A point, counted from 0 from the top left; written as a letter for the column, a number for the row.

    `a1` is the top left point, `b1` right of it, `a2` below it.
    """

    row: int
    column: int

    def __str__(self) -> str:
        return f"{ascii_lowercase[self.column]}{self.row + 1}"


def parse_move(text: str) -> Move | None:
    """The first well-formed move in a text, on the board or not; None: there is none.

    Well-formed is one letter, small or capital, and a number from 1 to 99 without leading zeros,
    with no letter, digit or underscore before or after it.
    """
    found = _MOVE.search(text)
    return Move(int(found[2]) - 1, ascii_lowercase.index(found[1].lower())) if found else None


@dataclass(frozen=True)
class Board:
    """A position, and who has won it. Made by `Board.empty`, `Board.parse` and `play`."""

    size: int
    line: int
    cells: str
    """Row by row: `.` (empty), `X` or `O`."""
    winner: Stone | None = None

    @classmethod
    def empty(cls, size: int, line: int) -> "Board":
        """A board without stones.

        Raises:
            ValueError: size or line are not accepted.
        """
        require("size", size, size in SIZES, f"{SIZES[0]} to {SIZES[-1]}")
        longest = min(size, LINES[-1])
        require("line", line, LINES[0] <= line <= longest, f"{LINES[0]} to {longest}, as size is {size}")
        return cls(size, line, EMPTY * size**2)

    @classmethod
    def parse(cls, text: str, line: int) -> "Board":
        """The board that `str` writes as `text`.

        Raises:
            ValueError: it is no board, or one whose stones or lines no game can have.
        """
        rows = text.split("\n")
        cells = "".join(rows)
        square = all(len(row) == len(rows) for row in rows) and set(cells) <= {EMPTY, "X", "O"}
        require("board", text, square, "as many rows as columns of . X and O")
        empty = cls.empty(len(rows), line)
        ahead = cells.count("X") - cells.count("O")
        require("board", text, ahead in (0, 1), "as many X as O, or one more")
        won = {cells[window[0]] for window in windows(empty.size, line) if _is_line(cells, window)}
        last: Stone = "X" if ahead else "O"
        require("board", text, won <= {last}, f"no line of the side that is to move, as {last} moved last")
        return cls(empty.size, line, cells, last if won else None)

    def __str__(self) -> str:
        """The rows from top to bottom, as in `X.O\\n.X.\\n..O`."""
        return "\n".join(self.cells[start : start + self.size] for start in range(0, self.size**2, self.size))

    @property
    def stones(self) -> int:
        """How many stones lie on the board."""
        return len(self.cells) - self.cells.count(EMPTY)

    @property
    def to_move(self) -> Stone:
        """Whose turn it is (would be, when the game is over)."""
        return "O" if self.stones % 2 else "X"

    @property
    def over(self) -> bool:
        """Somebody has won, or the board is full: a draw."""
        return self.winner is not None or EMPTY not in self.cells

    def is_legal(self, move: Move) -> bool:
        """Whether the side to move may play there."""
        return not self.over and self._holds(move) and self.cells[self._index(move)] == EMPTY

    def legal_moves(self) -> list[Move]:
        """All of them, row by row; none when the game is over."""
        if self.over:
            return []
        return [self.move_at(index) for index, cell in enumerate(self.cells) if cell == EMPTY]

    def play(self, move: Move) -> "Board":
        """The position after a move of the side to move.

        Raises:
            ValueError: the move is not legal.
        """
        if not self.is_legal(move):
            free = "a move, but the game is over" if self.over else "an empty point of the board"
            raise ValueError(f"move: {_written(move)} is not accepted; accepted: {free}")
        stone, index = self.to_move, self._index(move)
        cells = self.cells[:index] + stone + self.cells[index + 1 :]
        placed = Board(self.size, self.line, cells)
        return Board(self.size, self.line, cells, stone) if placed._in_line(move, stone) else placed

    def canonical(self) -> str:
        """The same text for all positions that turning and mirroring the board make of one another."""
        return min("".join(self.cells[index] for index in order) for order in symmetries(self.size))

    def move_at(self, index: int) -> Move:
        """The point of a place in `cells`."""
        return Move(*divmod(index, self.size))

    def _index(self, move: Move) -> int:
        return move.row * self.size + move.column

    def _holds(self, move: Move) -> bool:
        return 0 <= move.row < self.size and 0 <= move.column < self.size

    def _in_line(self, move: Move, stone: Stone) -> bool:
        """Whether the stone at `move` is one of `line` or more in a row."""
        for down, right in _DIRECTIONS:
            forth = self._run(move, down, right, stone)
            if 1 + forth + self._run(move, -down, -right, stone) >= self.line:
                return True
        return False

    def _run(self, move: Move, down: int, right: int, stone: Stone) -> int:
        """How many stones of a kind follow a point in a direction."""
        length = 0
        there = Move(move.row + down, move.column + right)
        while self._holds(there) and self.cells[self._index(there)] == stone:
            length += 1
            there = Move(there.row + down, there.column + right)
        return length


@lru_cache(maxsize=128)
def windows(size: int, line: int) -> tuple[tuple[int, ...], ...]:
    """All places where `line` stones in a row can lie: indices into `cells`."""
    found = []
    for row in range(size):
        for column in range(size):
            for down, right in _DIRECTIONS:
                last_row, last_column = row + (line - 1) * down, column + (line - 1) * right
                if last_row < size and 0 <= last_column < size:
                    step = down * size + right
                    found.append(tuple(row * size + column + i * step for i in range(line)))
    return tuple(found)


@lru_cache(maxsize=32)
def symmetries(size: int) -> tuple[tuple[int, ...], ...]:
    """The eight orders of `cells` that turning and mirroring a board give, itself the first."""
    order = tuple(range(size**2))
    points = [(row, column) for row in range(size) for column in range(size)]
    found = []
    for _ in range(4):
        found += [order, tuple(order[row * size + size - 1 - column] for row, column in points)]
        order = tuple(order[(size - 1 - column) * size + row] for row, column in points)
    return tuple(found)


def _is_line(cells: str, window: tuple[int, ...]) -> bool:
    return cells[window[0]] != EMPTY and len({cells[index] for index in window}) == 1


def _written(move: Move) -> str:
    """A move for an error's text: those off the board may have no letter."""
    on_a_board = move.row >= 0 and 0 <= move.column < len(ascii_lowercase)
    return str(move) if on_a_board else f"row {move.row}, column {move.column}"
