from collections.abc import Callable, Iterator
from typing import Any

import pytest

from envs.adapters.textarena_adapter import make_game
from envs.conformance import assert_conforms
from envs.conformance.subject import global_random_kept
from envs.multi import MultiEnvironment, Situation
from envs.protocol import Action
from envs.registry import available, make_multi

TIC_TAC_TOE = "textarena/TicTacToe-v0"
THREE = "textarena/ThreePlayerTicTacToe-v0"
GUESS = "textarena/GuessTheNumber-v0"
Makes = Callable[..., Any]


@pytest.mark.parametrize(("id", "new_process"), [(GUESS, False), (THREE, True)])
def test_games_conform(id: str, new_process: bool) -> None:
    assert_conforms(id, seeds=2, new_process=new_process)


@pytest.fixture
def here() -> Iterator[Makes]:
    """Makes games in this process, where they seed and draw from the global generators."""
    with global_random_kept():
        yield lambda name, players=None, turns=1000: make_game(name, {}, players, turns)


def say(game: MultiEnvironment, **texts: str | None) -> Situation:
    return game.step({name: None if text is None else Action(text) for name, text in texts.items()})


def test_two_play_in_turn_and_hear_what_is_new(here: Makes) -> None:
    game = here("TicTacToe-v0")
    assert game.agents == ("player_0", "player_1")
    shown = game.reset(1).observations["player_0"].text
    assert shown.startswith("\n[GAME] You are Player 0 in Tic Tac Toe.\n")
    assert "Available Moves: '[0]', '[1]'" in shown
    say(game, player_0="[4]")
    shown = say(game, player_1="[0]").observations["player_0"].text
    assert "[Player 1] [0]\n[GAME] Player 1 placed their symbol (X) in cell 0." in shown
    assert "[Player 0]" not in shown
    assert "Tic Tac Toe" not in shown
    say(game, player_0="[3]")
    say(game, player_1="[1]")
    ended = say(game, player_0="[5]")
    assert (ended.done, ended.rewards) == (True, {"player_0": 1.0, "player_1": -1.0})
    assert ended.info["players"]["0"]["reason"] == "Player 0 has won!"


def test_what_a_game_calls_invalid_is_its_own_affair(here: Makes) -> None:
    game = here("TicTacToe-v0")
    game.reset(1)
    again = say(game, player_0="hello")
    assert again.to_act == ("player_0",)
    assert "attempted an invalid move" in again.observations["player_0"].text
    ended = say(game, player_0="hello")
    assert ended.rewards == {"player_0": -1.0, "player_1": 1.0}


def test_three_play_in_turn(here: Makes) -> None:
    game = here("ThreePlayerTicTacToe-v0")
    assert game.agents == ("player_0", "player_1", "player_2")
    game.reset(1)
    say(game, player_0="[0]")
    say(game, player_1="[1]")
    assert say(game, player_2="[2]").to_act == ("player_0",)


def test_who_leaves_loses(here: Makes) -> None:
    two = here("TicTacToe-v0")
    two.reset(1)
    assert say(two, player_1=None).rewards == {"player_0": 1.0, "player_1": -1.0}
    three = here("ThreePlayerTicTacToe-v0")
    three.reset(1)
    ended = say(three, player_1=None)
    assert (ended.done, ended.rewards) == (True, {"player_0": 0.0, "player_1": -1.0, "player_2": 0.0})


def test_one_plays_alone(here: Makes) -> None:
    game = here("GuessTheNumber-v0")
    assert "between 1 and 20" in game.reset(3).text
    low, high = 1, 20
    for _ in range(5):
        guess = (low + high) // 2
        result = game.step(Action(f"I say [{guess}]"))
        if result.done:
            break
        assert "I say" not in result.observation.text
        low, high = (guess + 1, high) if "higher" in result.observation.text else (low, guess - 1)
    assert (result.done, result.reward) == (True, 1.0)
    assert result.info["truncated"] is False


def test_a_game_that_takes_too_long_is_cut_off_and_says_so(here: Makes) -> None:
    game = here("TicTacToe-v0", turns=2)
    game.reset(1)
    say(game, player_0="[0]")
    ended = say(game, player_1="[1]")
    assert (ended.done, ended.rewards, ended.info) == (True, {}, {"truncated": True})


def test_a_game_that_does_not_ask_how_many_play_is_still_one_for_several(here: Makes) -> None:
    assert here("QuantumTicTacToe-v0").agents == ("player_0", "player_1")


def test_a_reason_in_the_place_of_a_reward_is_the_penalty_of_an_invalid_move(here: Makes) -> None:
    game = here("Countdown-v0")
    game.reset(1)
    assert not game.step(Action("hello")).done
    result = game.step(Action("hello"))
    assert (result.done, result.reward) == (True, -1.0)


def test_more_may_play_than_the_fewest(here: Makes) -> None:
    game = here("LiarsDice-v0", players=4)
    assert len(game.agents) == 4
    assert game.reset(1).to_act


@pytest.mark.parametrize(
    ("id", "args", "message"),
    [
        ("textarena/Nothing-v0", {}, "Nothing-v0 not found in registry"),
        (TIC_TAC_TOE, {"players": 3}, "players: 3 cannot play it: AssertionError"),
        (TIC_TAC_TOE, {"players": 0}, "players: 0 is not accepted; accepted: 1 to 15"),
        (TIC_TAC_TOE, {"turns": 0}, "turns: 0 is not accepted"),
    ],
)
def test_wrong_requests_name_what_is_wrong(id: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_multi(id, **args)


def test_it_is_listed() -> None:
    (info,) = [info for info in available() if info.id.startswith("textarena/")]
    assert {"players", "turns"} <= {argument.name for argument in info.arguments}
