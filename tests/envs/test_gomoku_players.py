from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.gomoku_players import PLAYERS, Player
from envs.gomoku_rules import Board, Move, Stone
from tests.envs.gomoku_games import games, has_line


def winning(board: Board, stone: Stone) -> set[Move]:
    """Where a side would have a line, were it its turn."""
    rows = str(board).split("\n")
    found = set()
    for move in board.legal_moves():
        row = rows[move.row]
        placed = [*rows]
        placed[move.row] = row[: move.column] + stone + row[move.column + 1 :]
        if has_line("\n".join(placed), board.line, stone):
            found.add(move)
    return found


def winner(x: Player, o: Player, size: int, line: int, seed: int) -> Stone | None:
    random = Random(seed)
    board = Board.empty(size, line)
    while not board.over:
        board = board.play((x if board.to_move == "X" else o).choose(board, random))
    return board.winner


@pytest.mark.parametrize("name", PLAYERS)
@given(boards=games(), seed=st.integers(0, 2**32))
def test_players_choose_legal_moves_and_draw_from_the_given_generator_alone(
    name: str, boards: list[Board], seed: int
) -> None:
    for board in boards[:-1:5]:
        move = PLAYERS[name].choose(board, Random(seed))
        assert board.is_legal(move)
        assert PLAYERS[name].choose(board, Random(seed)) == move


@given(games())
def test_the_heuristic_wins_where_it_can_and_blocks_where_it_must(boards: list[Board]) -> None:
    for board in boards[:-1:3]:
        wins = winning(board, board.to_move)
        threats = winning(board, "O" if board.to_move == "X" else "X")
        if wins or threats:
            assert PLAYERS["heuristic"].choose(board, Random(0)) in (wins or threats)


def test_a_win_goes_before_blocking_any_number_of_threats() -> None:
    # at c3, X would make two lines at once; O wins at b7
    board = Board.parse(".......\n.X.X...\n.......\n.X.X...\n.......\n......O\nO.O....", 3)
    assert winning(board, "O") == {Move(6, 1)}
    assert Move(2, 2) in winning(board, "X")
    assert PLAYERS["heuristic"].choose(board, Random(0)) == Move(6, 1)


def test_where_both_have_stones_no_line_can_come_and_none_is_blocked() -> None:
    board = Board.parse("XOO.\n....\n...X\n....", 4)
    assert PLAYERS["heuristic"].choose(board, Random(0)) == Move(2, 2)


def test_equally_good_points_are_drawn() -> None:
    board = Board.parse("...\n.X.\n...", 3)
    drawn = Counter(str(PLAYERS["heuristic"].choose(board, Random(seed))) for seed in range(200))
    assert set(drawn) == {"a1", "c1", "a3", "c3"}
    assert min(drawn.values()) > 20


def test_the_random_player_plays_everything() -> None:
    board = Board.parse("X.O\n.X.\nO..", 3)
    drawn = {PLAYERS["random"].choose(board, Random(seed)) for seed in range(200)}
    assert drawn == set(board.legal_moves())


@pytest.mark.parametrize(("size", "line", "games"), [(6, 4, 150), (9, 5, 50)])
def test_the_heuristic_beats_the_random_player_on_both_sides(size: int, line: int, games: int) -> None:
    heuristic, random = PLAYERS["heuristic"], PLAYERS["random"]
    as_x = sum(winner(heuristic, random, size, line, seed) == "X" for seed in range(games))
    as_o = sum(winner(random, heuristic, size, line, seed) == "O" for seed in range(games))
    assert min(as_x, as_o) >= 0.9 * games


@pytest.mark.parametrize("name", PLAYERS)
def test_nobody_moves_when_the_game_is_over(name: str) -> None:
    with pytest.raises(ValueError, match=r"^board: 'XXX.*is not accepted; accepted: a game that is not over"):
        PLAYERS[name].choose(Board.parse("XXX\nOO.\n...", 3), Random(0))
