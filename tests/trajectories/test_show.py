"""The readable view: trained tokens stand out from context, and recorded text cannot drive the terminal."""

import json
from dataclasses import replace
from io import StringIO

from hypothesis import given
from rich.console import Console

from opentinker_core.trajectories.fsm import TrajectoryBuilder
from opentinker_core.trajectories.show import Decode, mean_reward, render, spans, summary
from opentinker_core.trajectories.types import UNTURNED, EndReason, Trajectory
from tests.trajectories.strategies import demonstration, trajectories, two_turns

DIM, GREEN, CYAN = "\x1b[2m", "\x1b[1;32m", "\x1b[1;36m"


def letters(ids: list[int]) -> str:
    return "".join(chr(ord("a") + token - 10) for token in ids)


def shown(
    trajectory: Trajectory, decode: Decode | None = None, *, colour: bool = True, **options: bool
) -> str:
    console = Console(
        file=StringIO(), force_terminal=colour, color_system="standard" if colour else None, width=100
    )
    console.print(render(trajectory, decode, **options))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_context_is_dim_and_each_turn_has_its_colour() -> None:
    text = shown(two_turns(), letters)
    for piece in (f"{DIM}ab\x1b", f"{GREEN}kl\x1b", f"{DIM}c\x1b", f"{CYAN}m\x1b", f"{DIM}d\x1b"):
        assert piece in text
    assert all(
        word in text for word in ("adder@3", "adder@4", "reward 1.25", "stop", "length", "ended: context")
    )


def test_without_colours_trained_tokens_stand_in_brackets() -> None:
    assert "ab⟦kl⟧c⟦m⟧d" in shown(two_turns(), letters, colour=False, brackets=True)


def test_without_a_tokenizer_ids_and_the_recorded_prompt_are_shown() -> None:
    text = shown(replace(two_turns(), info={"prompt": "3 + 4 ="}), colour=False, brackets=True)
    assert "prompt: 3 + 4 =" in text
    assert "10 11 ⟦20 21⟧ 12 ⟦22⟧ 13" in text


def test_a_failed_episode_shows_its_error_and_no_reward() -> None:
    failed = replace(two_turns(), end_reason=EndReason.FAILED, info={"error": "ValueError: no"})
    text = shown(failed, colour=False)
    assert "reward missing" in text
    assert "error: ValueError: no" in text


def test_recorded_text_is_neither_markup_nor_terminal_codes() -> None:
    text = shown(two_turns(), lambda ids: "[red]\x1b[2Jx\x9b", colour=False)
    assert "[red]␛[2Jx\ufffd" in text
    assert "\x1b" not in text


@given(trajectories())
def test_spans_cover_every_token_once(trajectory: Trajectory) -> None:
    pieces = list(spans(trajectory))
    assert [token for ids, _ in pieces for token in ids] == trajectory.tokens_T.tolist()
    assert [turn for _, turn in pieces if turn is not None] == list(trajectory.turns)
    marked = [turn is not None for ids, turn in pieces for _ in ids]
    assert marked == trajectory.mask_T.tolist()


def test_the_summary_is_json_with_text_and_tokens_on_request() -> None:
    value = json.loads(json.dumps(summary(two_turns(), letters, tokens=True)))
    assert value["text"] == "abklcmd"
    assert [turn["text"] for turn in value["turns"]] == ["kl", "m"]
    assert value["logprobs"] == [0, 0, -0.5, -1.5, 0, -2.5, 0]
    assert "token_ids" not in summary(two_turns())


def test_missing_rewards_do_not_enter_the_mean() -> None:
    failed = replace(two_turns(), member=1, end_reason=EndReason.FAILED)
    assert mean_reward([failed, demonstration()]) == 1.0
    assert mean_reward([failed]) is None


def test_an_agent_that_won_before_its_first_turn_has_its_reward_and_nothing_to_train() -> None:
    builder = TrajectoryBuilder(trajectory_id="w", agent="solver", environment="arithmetic", seed=7, group=1)
    won = replace(builder.terminate(EndReason.DONE), info={UNTURNED: 1.0})
    text = shown(won, colour=False)
    assert "reward 1 " in text
    assert "no turn of this agent: it is not trained on" in text
    assert summary(won)["reward"] == 1.0
    assert mean_reward([won, two_turns()]) == (1.0 + 1.25) / 2
