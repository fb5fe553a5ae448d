"""One divisor over the global batch, so that no way of laying out the rows changes loss or gradient."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker_core.config.schema import Normalizer, ObjectiveConfig
from opentinker_core.errors import UsageError
from opentinker_core.objectives.compose import rl_objective
from opentinker_core.objectives.cross_entropy import cross_entropy
from opentinker_core.objectives.normalizers import token_scales
from opentinker_core.objectives.types import SignalBatch
from opentinker_core.trajectories.datums import to_datum
from opentinker_core.trajectories.errors import TrajectoryError
from opentinker_core.trajectories.packing import MicroBatch, micro_batches
from opentinker_core.trajectories.types import Datum, Trajectory
from tests.objectives.layouts import PLAIN, Layout, assert_same, loss_and_gradient, one_row_a_turn
from tests.trajectories.strategies import demonstration, trajectory_lists, two_turns, with_masked_turns


def _datum(trajectory_id: str, tokens: int) -> Datum:
    return Datum(
        input_tokens_N=np.arange(tokens + 1),
        target_tokens_N=np.arange(1, tokens + 2),
        mask_N=np.array([False] + [True] * tokens),
        weights_N=np.array([0] + [1] * tokens, np.float32),
        trajectory_id=trajectory_id,
    )


THREE_ROWS_OF_TWO = [_datum("a", 3), _datum("a", 1), _datum("b", 2)]


@pytest.mark.parametrize(
    ("normalizer", "per_row"),
    [
        (Normalizer.NONE, [1, 1, 1]),
        (Normalizer.TOKENS, [1 / 6, 1 / 6, 1 / 6]),
        (Normalizer.SEQUENCES, [1 / 8, 1 / 8, 1 / 4]),
        (Normalizer.CONSTANT, [1 / 20, 1 / 20, 1 / 20]),
    ],
)
def test_scales_by_hand(normalizer: Normalizer, per_row: list[float]) -> None:
    scales = token_scales(normalizer, THREE_ROWS_OF_TWO, max_tokens=10)
    for datum, scales_N, expected in zip(THREE_ROWS_OF_TWO, scales, per_row, strict=True):
        assert scales_N.dtype == np.float32
        assert scales_N.tolist() == [np.float32(expected) if trained else 0 for trained in datum.mask_N]


def test_rows_without_an_id_are_trajectories_of_their_own() -> None:
    scales = token_scales(Normalizer.SEQUENCES, [_datum("", 4), _datum("", 2)], max_tokens=0)
    assert [scales_N.sum() for scales_N in scales] == [0.5, 0.5]


def test_a_constant_needs_a_limit() -> None:
    with pytest.raises(UsageError, match="max_tokens: 0"):
        token_scales(Normalizer.CONSTANT, THREE_ROWS_OF_TWO, max_tokens=0)


OBJECTIVES = {
    "importance_sampling": rl_objective(ObjectiveConfig(name="importance_sampling")),
    "ppo": rl_objective(ObjectiveConfig(name="ppo", kl_coefficient=0.1)),
    "cross_entropy": cross_entropy,
}


def _to_datum(name: str, episode: Trajectory, signal: float) -> Datum:
    if name == "cross_entropy":
        return to_datum(episode, weights=signal)
    return to_datum(episode, advantages=signal)


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=25, deadline=None)
@given(
    episodes=trajectory_lists(min_size=2),
    normalizer=st.sampled_from(Normalizer),
    budget=st.integers(8, 80),
    random=st.randoms(use_true_random=False),
)
def test_no_layout_changes_loss_or_gradient(
    name: str, episodes: list[Trajectory], normalizer: Normalizer, budget: int, random: object
) -> None:
    datums = [_to_datum(name, episode, place - 1.25) for place, episode in enumerate(episodes)]
    scales = token_scales(normalizer, datums, max_tokens=16)
    objective, shuffled = OBJECTIVES[name], list(range(len(datums)))
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    expected = loss_and_gradient(objective, datums, scales)
    other_order = [datums[i] for i in shuffled], [scales[i] for i in shuffled]
    layouts = {
        "one at a time": Layout(budget=1),
        "micro-batches": Layout(budget),
        "packed": Layout(budget, pack=True),
        "packed into few rows": Layout(pack=True),
        "shared prefixes": Layout(budget, share_prefix=True),
        "both": Layout(budget, share_prefix=True, pack=True),
    }
    assert_same(loss_and_gradient(objective, *other_order), expected)
    for layout in layouts.values():
        assert_same(loss_and_gradient(objective, datums, scales, layout), expected)
        assert_same(loss_and_gradient(objective, *other_order, layout), expected)


@settings(max_examples=25, deadline=None)
@given(trajectory_lists(min_size=2), st.sampled_from(Normalizer))
def test_splitting_an_episode_into_rows_changes_nothing(
    episodes: list[Trajectory], normalizer: Normalizer
) -> None:
    whole = [to_datum(episode, advantages=place - 1.25) for place, episode in enumerate(episodes)]
    split = [row for place, episode in enumerate(episodes) for row in one_row_a_turn(episode, place - 1.25)]
    objective = OBJECTIVES["importance_sampling"]
    scales = token_scales(normalizer, whole, max_tokens=16)
    split_scales = token_scales(normalizer, split, max_tokens=16)
    expected = loss_and_gradient(objective, whole, scales)
    for layout in (PLAIN, Layout(40), Layout(40, share_prefix=True, pack=True)):
        assert_same(loss_and_gradient(objective, split, split_scales, layout), expected)


@settings(max_examples=25, deadline=None)
@given(st.lists(with_masked_turns(), min_size=1, max_size=4), st.sampled_from(Normalizer))
def test_a_masked_turn_gives_no_gradient_and_enters_no_normalizer(
    masked: list[tuple[Trajectory, frozenset[int]]], normalizer: Normalizer
) -> None:
    datums = [
        replace(to_datum(episode, advantages=place - 1.25, without=without), trajectory_id=f"t{place}")
        for place, (episode, without) in enumerate(masked)
    ]
    rows = [
        replace(row, trajectory_id=f"t{place}")
        for place, (episode, without) in enumerate(masked)
        for turn, row in enumerate(one_row_a_turn(episode, place - 1.25))
        if turn not in without
    ]
    objective = OBJECTIVES["importance_sampling"]
    expected = loss_and_gradient(objective, rows, token_scales(normalizer, rows, max_tokens=16))
    scales = token_scales(normalizer, datums, max_tokens=16)
    for layout in (PLAIN, Layout(40), Layout(40, share_prefix=True, pack=True)):
        assert_same(loss_and_gradient(objective, datums, scales, layout), expected)


def _only_batch(datums: list[Datum]) -> MicroBatch:
    (batch,) = micro_batches(datums, 10_000)
    return batch


def test_signals_are_those_of_the_weighted_positions() -> None:
    datums = [to_datum(two_turns(), advantages=[1.0, -2.0])]
    scales = [np.arange(5, dtype=np.float32)]
    signal = SignalBatch.of(_only_batch(datums), datums, scales, [np.arange(-5.0, 0)])
    assert signal.advantages_M is not None
    assert signal.advantages_M.tolist() == [1, 1, -2]
    assert signal.sampler_logprobs_M is not None
    assert signal.sampler_logprobs_M.tolist() == [-0.5, -1.5, -2.5]
    assert signal.reference_logprobs_M is not None
    assert signal.reference_logprobs_M.tolist() == [-4, -3, -1]
    assert signal.token_scales_M.tolist() == [1, 2, 4]
    assert signal.row_M.tolist() == [0, 0, 0]
    assert signal.weights_M is None


def test_supervised_signals_have_weights_only() -> None:
    datums = [to_datum(two_turns(), weights=[3.0, 0.5]), to_datum(demonstration(), weights=1.0)]
    signal = SignalBatch.of(_only_batch(datums), datums, [np.ones(5), np.full(2, 0.25)], dtype=torch.float64)
    assert signal.weights_M is not None
    assert signal.weights_M.dtype == signal.token_scales_M.dtype == torch.float64
    assert signal.weights_M.tolist() == [3, 3, 0.5, 1, 1]
    assert signal.token_scales_M.tolist() == [1, 1, 1, 0.25, 0.25]
    assert signal.row_M.tolist() == [0, 0, 0, 1, 1]
    assert signal.advantages_M is signal.sampler_logprobs_M is signal.reference_logprobs_M is None


def test_signals_refuse_what_does_not_fit_together() -> None:
    supervised = to_datum(demonstration(), weights=1.0)
    sampled = to_datum(two_turns(), advantages=1.0)
    batch, mixed = _only_batch([supervised]), [supervised, sampled]
    with pytest.raises(TrajectoryError, match="one kind of signal"):
        SignalBatch.of(_only_batch(mixed), mixed, [np.ones(2), np.ones(5)])
    with pytest.raises(TrajectoryError, match=r"token_scales: \[3\]"):
        SignalBatch.of(batch, [supervised], [np.ones(3)])
    with pytest.raises(TrajectoryError, match=r"token_scales: \[\]"):
        SignalBatch.of(batch, [supervised], [])
    with pytest.raises(TrajectoryError, match=r"reference_logprobs: \[1\]"):
        SignalBatch.of(batch, [supervised], [np.ones(2)], [np.ones(1)])
