import itertools

import pytest
from hypothesis import given

from envs.gomoku_rules import EMPTY, Board, Move, parse_move
from tests.envs.gomoku_games import games, has_line


def turned(text: str) -> str:
    return "\n".join("".join(column) for column in zip(*reversed(text.split("\n")), strict=True))


def mirrored(text: str) -> str:
    return "\n".join(row[::-1] for row in text.split("\n"))


@given(games())
def test_a_side_has_won_exactly_when_it_has_a_line(boards: list[Board]) -> None:
    for board in boards:
        assert {stone for stone in "XO" if has_line(str(board), board.line, stone)} == {board.winner} - {None}
        assert board.over == (board.winner is not None or EMPTY not in board.cells)
    assert [board.over for board in boards] == [False] * (len(boards) - 1) + [True]


@given(games())
def test_sides_take_turns_and_no_point_is_played_twice(boards: list[Board]) -> None:
    for before, after in itertools.pairwise(boards):
        (index,) = (i for i in range(before.size**2) if before.cells[i] != after.cells[i])
        move = before.move_at(index)
        assert after.cells[index] == before.to_move == "XO"[before.stones % 2]
        assert before.is_legal(move)
        assert not after.is_legal(move)
        with pytest.raises(ValueError, match=rf"^move: {move} is not accepted; accepted: "):
            after.play(move)
    assert boards[-1].legal_moves() == []
    assert boards[0].stones == 0


@given(games())
def test_legal_are_the_empty_points(boards: list[Board]) -> None:
    for board in boards[:-1]:
        rows = str(board).split("\n")
        empty = [Move(i, j) for i, row in enumerate(rows) for j, cell in enumerate(row) if cell == "."]
        assert board.legal_moves() == empty
        assert all(board.is_legal(move) for move in empty)


@given(games())
def test_what_is_written_is_read_again(boards: list[Board]) -> None:
    for board in boards:
        assert Board.parse(str(board), board.line) == board


@given(games())
def test_turned_and_mirrored_positions_have_one_canonical_text(boards: list[Board]) -> None:
    for board in boards[::5]:
        texts = [str(board), mirrored(str(board))]
        for _ in range(3):
            texts += [turned(texts[-2]), turned(texts[-1])]
        canonical = {Board.parse(text, board.line).canonical() for text in texts}
        assert canonical == {min(text.replace("\n", "") for text in texts)}


@pytest.mark.parametrize("size", [3, 4, 9, 19])
def test_moves_are_read_as_they_are_written(size: int) -> None:
    moves = Board.empty(size, 3).legal_moves()
    assert [parse_move(str(move)) for move in moves] == moves
    assert len({str(move) for move in moves}) == size**2
    assert (str(moves[0]), str(moves[1]), str(moves[size])) == ("a1", "b1", "a2")


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("b2", "b2"),
        ("B2", "b2"),
        ("  s19\n", "s19"),
        ("I play (c3), not d4.", "c3"),
        ("a0 b05 c3", "c3"),
        ("ab1 1a a1b a_1 c3_ b-2 d100 x1y2 é1 c3", "c3"),
        ("X:c3", "c3"),
        ("z99", "z99"),
        ("", None),
        ("2,2", None),
        ("b 2", None),
        ("b٢", None),
        ("bb2", None),
        ("日b2", None),
    ],
)
def test_the_first_well_formed_move_of_a_text_is_read(text: str, move: str | None) -> None:
    read = parse_move(text)
    assert (str(read) if read else None) == move


def test_more_stones_in_a_row_than_needed_win_too() -> None:
    board = Board.parse("XX.XX\nOO...\nOO...\n.....\n.....", 4)
    assert board.winner is None
    assert board.play(Move(0, 2)).winner == "X"


@pytest.mark.parametrize("move", [Move(-1, 0), Move(0, -1), Move(3, 0), Move(0, 3), Move(98, 25)])
def test_off_the_board_is_not_legal(move: Move) -> None:
    board = Board.empty(3, 3)
    assert not board.is_legal(move)
    with pytest.raises(ValueError, match=r"accepted: an empty point of the board"):
        board.play(move)


def test_a_won_game_takes_no_move() -> None:
    board = Board.parse("XXX\nOO.\n...", 3)
    assert (board.winner, board.over, board.legal_moves()) == ("X", True, [])
    with pytest.raises(
        ValueError, match=r"^move: c2 is not accepted; accepted: a move, but the game is over"
    ):
        board.play(Move(1, 2))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "...",
        "..\n..\n..",
        "...\n..\n...",
        "X.x\n...\n...",
        "...\n...\n...\n",
        "XX.\n...\n...",
        "O..\n...\n...",
    ],
)
def test_what_is_no_board_of_a_game_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"(board|size): .* is not accepted; accepted: "):
        Board.parse(text, 3)


@pytest.mark.parametrize("text", ["XXX\nOOO\n...", "XXX\nOO.\nO..", "OOO\nXX.\nXX."])
def test_only_the_side_that_moved_last_can_have_a_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^board: .* is not accepted; accepted: no line of the side"):
        Board.parse(text, 3)


@pytest.mark.parametrize(
    ("size", "line", "field"),
    [(2, 3, "size"), (20, 5, "size"), (9, 2, "line"), (9, 7, "line"), (4, 5, "line")],
)
def test_sizes_and_lines_have_limits(size: int, line: int, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: . ?.* is not accepted; accepted: 3 to "):
        Board.empty(size, line)
