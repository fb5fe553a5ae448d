"""How positions and moves of gomoku are written: by `coordinates` (`b3`), or by `letters` on free points."""

import re
from collections.abc import Mapping
from string import ascii_lowercase
from types import MappingProxyType
from typing import Literal, Protocol

from envs.arguments import require
from envs.gomoku_rules import EMPTY, Board, Move, parse_move

Points = Literal["coordinates", "letters"]
_LETTER = re.compile(r"(?<!\w)([a-z])(?!\w)")


class Notation(Protocol):
    """Writes what agents are shown, and reads what they say."""

    def board(self, board: Board) -> str:
        """The rows of a position, from top to bottom."""
        ...

    def move(self, board: Board, move: Move) -> str:
        """How a move on `board` is said."""
        ...

    def read(self, board: Board, text: str) -> Move | None:
        """The first well-formed move in a text, legal or not; None: there is none."""
        ...


class Coordinates:
    """Free points are dots; a move is a letter for the column and a number for the row, `a1` top left."""

    def board(self, board: Board) -> str:
        """As `Board` writes itself."""
        return str(board)

    def move(self, board: Board, move: Move) -> str:
        """As in `b3`."""
        return str(move)

    def read(self, board: Board, text: str) -> Move | None:
        """See `gomoku_rules.parse_move`."""
        return parse_move(text)


class Letters:
    """Each point has a letter, row by row from `a`, and shows it while it is free; that letter is the move.

    What may be said stands on the board, and is one character: easier than coordinates for models
    of characters. There are enough letters for boards of up to 5 by 5 points.
    """

    def board(self, board: Board) -> str:
        """As in `Xbc\\ndOf\\nghi`."""
        shown = "".join(
            letter if cell == EMPTY else cell
            for letter, cell in zip(ascii_lowercase, board.cells, strict=False)
        )
        return "\n".join(shown[start : start + board.size] for start in range(0, board.size**2, board.size))

    def move(self, board: Board, move: Move) -> str:
        """The letter of the point."""
        return ascii_lowercase[move.row * board.size + move.column]

    def read(self, board: Board, text: str) -> Move | None:
        """The first small letter that stands alone, if the board is large enough to have it."""
        found = _LETTER.search(text)
        index = ascii_lowercase.index(found[1]) if found else board.size**2
        return board.move_at(index) if index < board.size**2 else None


NOTATIONS: Mapping[str, Notation] = MappingProxyType({"coordinates": Coordinates(), "letters": Letters()})
"""The notations by name."""


def notation(points: str, size: int) -> Notation:
    """The notation called `points`, for boards of `size`.

    Raises:
        ValueError: there is none of this name, or it has too few letters.
    """
    require("points", points, points in NOTATIONS, ", ".join(NOTATIONS))
    fits = points != "letters" or size**2 <= len(ascii_lowercase)
    require("points", points, fits, f"coordinates, as size is {size}; letters up to size 5")
    return NOTATIONS[points]
