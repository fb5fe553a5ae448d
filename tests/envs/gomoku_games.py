"""Random games of m,n,k, and lines found without the rules' own code."""

import itertools
from random import Random

from hypothesis import strategies as st

from envs.gomoku_rules import Board

DIRECTIONS = [(0, 1), (1, 0), (1, 1), (1, -1)]


@st.composite
def games(draw: st.DrawFn) -> list[Board]:
    """All positions of a game of random moves, played to its end."""
    size = draw(st.integers(3, 8))
    boards = [Board.empty(size, draw(st.integers(3, min(size, 6))))]
    random = Random(draw(st.integers(0, 2**32)))
    while not boards[-1].over:
        boards.append(boards[-1].play(random.choice(boards[-1].legal_moves())))
    return boards


def has_line(text: str, line: int, stone: str) -> bool:
    """Whether a side has a line: looked for from each of its stones in every direction."""
    rows = text.split("\n")
    points = itertools.product(range(len(rows)), repeat=2)
    stones = {(i, j) for i, j in points if rows[i][j] == stone}
    return any(
        all((i + k * down, j + k * right) in stones for k in range(line))
        for i, j in stones
        for down, right in DIRECTIONS
    )
