from collections import Counter

import pytest

from envs.conformance import assert_conforms
from envs.gomoku import Gomoku
from envs.gomoku_rules import Board, Move, parse_move
from envs.protocol import Action, Demonstrates, StepResult

SMALL = {"size": 5, "line": 4, "opponent": "heuristic"}


def demonstrated(environment: Gomoku, seed: int) -> tuple[str, list[StepResult], list[str]]:
    """Play a game by demonstrations: the first text, the results and the actions."""
    first = environment.reset(seed).text
    results, actions = list[StepResult](), list[str]()
    while not results or not results[-1].done:
        actions.append(environment.demonstration().text)
        results.append(environment.step(Action(actions[-1])))
    return first, results, actions


def board_of(text: str, line: int) -> Board:
    """The board that stands before the last line of an observation."""
    rows = text.split("\n")[:-1]
    return Board.parse("\n".join(row for row in rows if ":" not in row and row), line)


def move(text: str) -> Move:
    read = parse_move(text)
    assert read is not None
    return read


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"size": 3, "line": 3, "opponent": "heuristic", "draw": 0.25, "retries": 2},
        {"size": 19, "line": 6, "side": "O", "opening": 5, "show": "move", "instruction": "Play.\n"},
    ],
    ids=["default", "tic-tac-toe", "large"],
)
def test_it_keeps_the_promises(args: dict) -> None:
    assert_conforms("gomoku", args, seeds=3)


@pytest.mark.parametrize("args", [SMALL, {"size": 3, "line": 3, "opponent": "random"}], ids=["5", "3"])
def test_the_record_tells_the_game_that_was_shown_and_its_reward(args: dict) -> None:
    environment = Gomoku(**args, draw=0.25)
    assert isinstance(environment, Demonstrates)
    ends = Counter[str]()
    for seed in range(60):
        first, results, actions = demonstrated(environment, seed)
        info, line = results[-1].info, args["line"]
        board = Board.empty(args["size"], line)
        for played in info["opening"]:
            board = board.play(move(played))
        side = board.to_move
        assert first == f"{board}\n{side}:"
        moves = iter(info["moves"])
        for result, action in zip(results, actions, strict=True):
            assert next(moves) == action
            board = board.play(move(action))
            if not board.over:
                answer = next(moves)
                board = board.play(move(answer))
            assert result.done == board.over
            if not result.done:
                other = "O" if side == "X" else "X"
                assert result.observation.text == f"\n{other}:{answer}\n{board}\n{side}:"
                assert (result.reward, result.info["winner"]) == (0.0, None)
        assert next(moves, None) is None
        assert info["side"] == side
        assert info["winner"] == (board.winner or "draw")
        assert results[-1].reward == {side: 1.0, "draw": 0.25}.get(info["winner"], 0.0)
        assert info["illegal"] == 0
        ends["draw" if board.winner is None else "won" if board.winner == side else "lost"] += 1
    assert set(ends) >= {"won", "draw"}


def test_all_three_ends_come() -> None:
    environment = Gomoku(**SMALL, show="move")
    rewards = {demonstrated(environment, seed)[1][-1].reward for seed in range(80)}
    assert rewards == {0.0, 0.5, 1.0}


def test_only_the_move_is_shown_on_request() -> None:
    environment = Gomoku(**SMALL, show="move", side="O", instruction="Four in a row.\n")
    first = environment.reset(0).text
    assert first.startswith("Four in a row.\n")
    assert first.endswith("\nO:")
    result = environment.step(environment.demonstration())
    assert result.observation.text == f"\nX:{result.info['moves'][-1]}\nO:"


@pytest.mark.parametrize("text", ["", "no idea", "z99", "f6", "1,1", "taken"])
def test_without_a_legal_move_the_game_is_lost(text: str) -> None:
    environment = Gomoku(**SMALL)
    environment.reset(7)
    opening = environment.step(environment.demonstration()).info["opening"]
    environment.reset(7)
    result = environment.step(Action(opening[0] if text == "taken" else text))
    assert (result.reward, result.done) == (0.0, True)
    assert result.observation.text == ""
    assert (result.info["illegal"], result.info["moves"]) == (1, [])
    assert {result.info["winner"], result.info["side"]} == {"X", "O"}
    with pytest.raises(RuntimeError):
        environment.step(Action("a1"))


def test_retries_forgive_so_many_in_an_episode() -> None:
    environment = Gomoku(**SMALL, retries=2, side="X")
    environment.reset(7)
    first = environment.step(Action("what?"))
    assert (first.observation.text, first.reward, first.done) == ("\nno move\nX:", 0.0, False)
    played = environment.step(environment.demonstration())
    assert not played.done
    second = environment.step(Action(played.info["moves"][0]))
    assert (second.observation.text, second.info["illegal"], second.done) == ("\nillegal\nX:", 2, False)
    assert environment.step(Action("what?")).done
    environment.reset(7)
    assert environment.step(Action("what?")).info["illegal"] == 1


def test_the_first_move_of_an_action_counts() -> None:
    environment = Gomoku(**SMALL)
    environment.reset(3)
    chosen = environment.demonstration().text
    result = environment.step(Action(f"I take {chosen.upper()}, not a1 or z99."))
    assert result.info["moves"][0] == chosen


def firsts(split: str, seeds: int, **args: object) -> Counter[str]:
    """How often each problem is the first one shown: boards up to turning and mirroring."""
    environment = Gomoku(split, **args)  # type: ignore[arg-type]
    line = int(str(args["line"]))
    return Counter(board_of(environment.reset(seed).text, line).canonical() for seed in range(seeds))


def test_the_splits_share_no_first_position_turned_or_mirrored_and_miss_none() -> None:
    train = firsts("train", 1500, size=3, line=3)
    held_out = firsts("held_out", 500, size=3, line=3)
    assert not train.keys() & held_out.keys()
    everything = set()
    for first in Board.empty(3, 3).legal_moves():
        two = [
            Board.empty(3, 3).play(first).play(second)
            for second in Board.empty(3, 3).legal_moves()
            if second != first
        ]
        everything |= {board.canonical() for board in two}
        everything |= {board.play(third).canonical() for board in two for third in board.legal_moves()}
    assert train.keys() | held_out.keys() == everything


def test_a_held_out_first_position_is_never_come_to_in_training() -> None:
    held_out = set(firsts("held_out", 300, size=3, line=3))
    training = Gomoku("train", size=3, line=3)
    shown = set()
    for seed in range(300):
        first, results, _ = demonstrated(training, seed)
        texts = [first, *(result.observation.text for result in results if not result.done)]
        shown |= {board_of(text, 3).canonical() for text in texts}
    assert not shown & held_out


@pytest.mark.parametrize(("side", "opening", "stones"), [("X", 3, 4), ("O", 3, 3), ("X", 4, 4), ("O", 4, 5)])
def test_the_agent_moves_first_and_its_side_can_be_chosen(side: str, opening: int, stones: int) -> None:
    environment = Gomoku(side=side, opening=opening)  # type: ignore[arg-type]
    for seed in range(5):
        text = environment.reset(seed).text
        assert text.endswith(f"\n{side}:")
        assert board_of(text, 5).stones == stones


def test_sides_are_drawn_by_seed_otherwise() -> None:
    environment = Gomoku()
    drawn = Counter(environment.reset(seed).text[-2] for seed in range(100))
    assert set(drawn) == {"X", "O"}
    assert min(drawn.values()) > 30


def test_no_game_is_over_before_it_begins() -> None:
    environment = Gomoku(size=4, line=3, opening=4)
    for seed in range(200):
        board = board_of(environment.reset(seed).text, 3)
        assert not board.over


def test_the_demonstrations_nearly_always_beat_the_random_player() -> None:
    environment = Gomoku(size=6, line=4, opponent="random")
    rewards = [demonstrated(environment, seed)[1][-1].reward for seed in range(60)]
    assert sum(rewards) >= 0.95 * len(rewards)


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"size": 2}, "size"),
        ({"size": 20}, "size"),
        ({"line": 2}, "line"),
        ({"size": 4}, "line"),
        ({"opponent": "nobody"}, "opponent"),
        ({"side": "x"}, "side"),
        ({"opening": 0}, "opening"),
        ({"opening": 10}, "opening"),
        ({"draw": 1.5}, "draw"),
        ({"retries": -1}, "retries"),
        ({"show": "nothing"}, "show"),
        ({"held_out": 1.0}, "held_out"),
    ],
)
def test_wrong_values_are_refused_with_field_and_accepted_values(args: dict, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: .* is not accepted; accepted: "):
        Gomoku(**args)


def test_an_empty_split_is_refused_when_made() -> None:
    with pytest.raises(ValueError, match=r"held_out: 0\.0 leaves no opening in the split 'held_out'"):
        Gomoku("held_out", size=3, line=3, held_out=0.0)
