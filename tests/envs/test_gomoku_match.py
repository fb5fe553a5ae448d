import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.gomoku_match import AGENTS, GomokuMatch
from envs.gomoku_rules import Board
from envs.multi import MultiDemonstrates, MultiEnvironment, Recomputes, Situation
from envs.protocol import Action
from tests.envs.gomoku_games import has_line


def play(match: GomokuMatch, seed: int, *texts: str) -> list[Situation]:
    situations = [match.reset(seed)]
    for text in texts:
        situations.append(match.step({situations[-1].to_act[0]: Action(text)}))
    return situations


def position(situation: Situation, side: str) -> Board:
    rows = [row for row in situation.observations[side].text.split("\n") if set(row) <= set(".XO")]
    size = len(rows[-1])
    return Board.parse("\n".join(rows[-size:]), 3)


@given(st.integers(0, 2**40), st.randoms(use_true_random=False), st.sampled_from(["score", "zero_sum"]))
def test_sides_alternate_and_the_line_wins(seed: int, random, rewards) -> None:
    match = GomokuMatch(size=4, line=3, rewards=rewards)
    situation, steps, paid, board = match.reset(seed), [], [], None
    while not situation.done:
        (side,) = situation.to_act
        shown = position(situation, side)
        assert shown.to_move == side
        assert board is None or shown == board
        move = random.choice(shown.legal_moves())
        board = shown.play(move)
        situation = match.step({side: Action(str(move))})
        steps.append({side: str(move)})
        paid.append(dict(situation.rewards))
        assert situation.done or situation.to_act == (("O" if side == "X" else "X"),)
    assert board is not None
    winner = next((side for side in AGENTS if has_line(str(board), 3, side)), None)
    best, level, worst = (1, 0.5, 0) if rewards == "score" else (1, 0, -1)
    expected = {side: level if winner is None else best if side == winner else worst for side in AGENTS}
    assert paid == [{}] * (len(steps) - 1) + [expected]
    assert match.recompute(seed, steps) == paid
    assert situation.info["winner"] == (winner or "draw")


def test_the_other_is_told_the_move_and_the_position() -> None:
    match = GomokuMatch(size=3, line=3, opening=1)
    first = match.reset(5)
    assert first.to_act == ("O",)
    assert first.observations["O"].text == f"{first.observations['X'].text}\nO:"
    move = str(position(first, "O").legal_moves()[0])
    told = match.step({"O": Action(f"I play {move}!")}).observations
    assert set(told) == {"X"}
    assert told["X"].text.startswith(f"\nO:{move}\n")
    assert told["X"].text.endswith("\nX:")


@pytest.mark.parametrize(("text", "how"), [("pass", "no move"), ("z99", "illegal")])
def test_no_legal_move_loses(text: str, how: str) -> None:
    match = GomokuMatch()
    situation = play(match, 1, text)[-1]
    assert situation.done
    assert dict(situation.rewards) == {"X": -1, "O": 1}
    assert situation.info["how"] == how
    assert match.recompute(1, [{"X": text}]) == [dict(situation.rewards)]


@pytest.mark.parametrize("leaver", AGENTS)
def test_who_leaves_loses_in_turn_or_not(leaver: str) -> None:
    match = GomokuMatch(rewards="score")
    match.reset(3)
    situation = match.step({leaver: None})
    assert situation.done
    assert dict(situation.rewards) == {side: float(side != leaver) for side in AGENTS}
    assert match.recompute(3, [{leaver: None}]) == [dict(situation.rewards)]


def test_what_is_no_turn_is_refused_and_changes_nothing() -> None:
    match = GomokuMatch()
    with pytest.raises(RuntimeError, match="call reset first"):
        match.step({"X": Action("a1")})
    assert match.reset(1).to_act == ("X",)
    with pytest.raises(ValueError, match=r"^actions: those of O; accepted: one or more of X$"):
        match.step({"O": Action("a1")})
    with pytest.raises(ValueError, match=r"^actions: those of nobody; accepted"):
        match.step({})
    assert not match.step({"X": Action(str(position(match.reset(1), "X").legal_moves()[0]))}).done


def test_splits_share_no_opening() -> None:
    train, held_out = (GomokuMatch(split, size=3, line=3) for split in ("train", "held_out"))
    openings = [
        {position(match.reset(seed), "X").canonical() for seed in range(60)} for match in (train, held_out)
    ]
    assert not openings[0] & openings[1]
    assert all(openings)


def test_it_is_an_environment_that_recomputes_and_demonstrates() -> None:
    assert isinstance(GomokuMatch(), MultiEnvironment)
    assert isinstance(GomokuMatch(), Recomputes)
    assert isinstance(GomokuMatch(), MultiDemonstrates)


def test_demonstrations_beat_random_moves() -> None:
    match, wins = GomokuMatch(size=3, line=3), 0
    for seed in range(30):
        situation, able = match.reset(seed), AGENTS[seed % 2]
        while not situation.done:
            (side,) = situation.to_act
            assert match.demonstration(side) == match.demonstration(side)
            legal = position(situation, side).legal_moves()
            move = match.demonstration(side) if side == able else Action(str(legal[seed % len(legal)]))
            situation = match.step({side: move})
        wins += situation.info["winner"] == able
        assert situation.info["how"] in ("line", "full")
    assert wins >= 24


def test_it_demonstrates_to_the_side_to_move_alone() -> None:
    match = GomokuMatch()
    with pytest.raises(RuntimeError, match="call reset first"):
        match.demonstration("X")
    match.reset(1)
    with pytest.raises(ValueError, match=r"^agent: 'O' may not act now; accepted: X$"):
        match.demonstration("O")


@pytest.mark.parametrize(
    "arguments", [{"rewards": "money"}, {"opening": 0}, {"show": "all"}, {"held_out": 1}, {"size": 2}]
)
def test_refuses_what_it_cannot_play(arguments: dict) -> None:
    name, value = next(iter(arguments.items()))
    with pytest.raises(ValueError, match=f"^{name}: {value!r} is not accepted; accepted: "):
        GomokuMatch(**arguments)
