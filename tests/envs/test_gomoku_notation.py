from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.conformance import assert_conforms
from envs.gomoku import Gomoku
from envs.gomoku_match import GomokuMatch
from envs.gomoku_notation import NOTATIONS, notation
from envs.gomoku_players import PLAYERS
from envs.gomoku_rules import Board
from envs.protocol import Action

LETTERS = NOTATIONS["letters"]
TIC_TAC_TOE = {"size": 3, "line": 3, "points": "letters"}


@pytest.mark.parametrize("points", sorted(NOTATIONS))
@given(st.integers(3, 5), st.integers(0, 8), st.randoms(use_true_random=False))
def test_what_is_written_of_a_legal_move_is_read_as_that_move(points: str, size, stones, random) -> None:
    board = Board.empty(size, 3)
    while not board.over and board.stones < stones:
        board = board.play(random.choice(board.legal_moves()))
    used = notation(points, size)
    for move in board.legal_moves():
        assert used.read(board, f" {used.move(board, move)}.") == move


def test_letters_stand_where_the_board_is_free() -> None:
    board = Board.parse("X.O\n...\n..X", 3)
    assert LETTERS.board(board) == "XbO\ndef\nghX"
    assert [LETTERS.move(board, move) for move in board.legal_moves()] == list("bdefgh")


@pytest.mark.parametrize("text", ["", "B", "ab", "b2", "1", "z"])
def test_what_is_no_letter_of_the_board_is_no_move(text: str) -> None:
    assert LETTERS.read(Board.empty(3, 3), text) is None


def test_the_first_letter_that_stands_alone_counts() -> None:
    found = LETTERS.read(Board.empty(3, 3), "my move: e, not a")
    assert str(found) == "b2"


@pytest.mark.parametrize("make", [Gomoku, GomokuMatch])
def test_a_board_that_is_too_large_and_an_unknown_notation_are_refused(make) -> None:
    with pytest.raises(ValueError, match=r"points: 'letters'.*coordinates.*size 5"):
        make(size=6, line=4, points="letters")
    with pytest.raises(ValueError, match=r"points: 'digits'.*coordinates, letters"):
        make(size=3, line=3, points="digits")


def test_with_letters_the_environments_keep_their_promises() -> None:
    assert_conforms("gomoku", TIC_TAC_TOE, seeds=3)
    assert_conforms("gomoku_match", TIC_TAC_TOE, seeds=3)


def test_the_same_game_is_played_whatever_it_is_written_in() -> None:
    lettered, plain = Gomoku(**TIC_TAC_TOE), Gomoku(size=3, line=3)
    for seed in range(20):
        shown = lettered.reset(seed).text
        board = Board.parse(plain.reset(seed).text.rsplit("\n", 1)[0], 3)
        assert shown.rsplit("\n", 1)[0] == LETTERS.board(board)
        move = PLAYERS["heuristic"].choose(board, Random(seed))
        first = lettered.step(Action(LETTERS.move(board, move)))
        second = plain.step(Action(str(move)))
        assert (first.reward, first.done, first.info) == (second.reward, second.done, second.info)


def test_what_letters_said_is_recomputed_from_the_log() -> None:
    match = GomokuMatch(**TIC_TAC_TOE)
    situation, steps, paid = match.reset(1), [], []
    while not situation.done:
        (side,) = situation.to_act
        steps.append({side: match.demonstration(side).text})
        situation = match.step({side: Action(steps[-1][side])})
        paid.append(dict(situation.rewards))
    assert paid[-1]
    assert match.recompute(1, steps) == paid
