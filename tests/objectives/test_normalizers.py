"""One divisor over the global batch, so that no way of laying out the rows changes loss or gradient."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opentinker_core.config.schema import Normalizer, ObjectiveConfig
from opentinker_core.errors import UsageError
from opentinker_core.objectives.compose import rl_objective
from opentinker_core.objectives.cross_entropy import cross_entropy
from opentinker_core.objectives.normalizers import token_scales
from opentinker_core.objectives.types import Objective, SignalBatch, combine_metrics, finalize_metrics
from opentinker_core.trajectories.datums import to_datum
from opentinker_core.trajectories.packing import Batch, arrange, micro_batches, pack
from opentinker_core.trajectories.types import Datum, Trajectory
from tests.trajectories.strategies import trajectory_lists, two_turns


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


class Model(torch.nn.Module):
    """A small causal model in float64 that sees exactly what the batch's attention lets it see."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator))

        self.tokens, self.positions, self.head = parameter(10, 6), parameter(64, 6), parameter(6, 10)

    def logprobs(self, batch: Batch) -> Tensor:
        hidden_BNH = self.tokens[batch.input_tokens_BN] + self.positions[batch.position_BN]
        seen_BNN = torch.from_numpy(batch.attention_matrix()).double()
        mixed_BNH = torch.tanh(seen_BNN @ hidden_BNH / seen_BNN.sum(-1, keepdim=True))
        logprobs_BNV = (mixed_BNH @ self.head).log_softmax(-1)
        targets_BN1 = torch.from_numpy(batch.target_tokens_BN)[:, :, None]
        return logprobs_BNV.gather(-1, targets_BN1).squeeze(-1)[torch.from_numpy(batch.mask_BN)]


def _loss_and_gradient(
    objective: Objective, datums: list[Datum], scales: list[np.ndarray], layout: list[list[list[int]]]
) -> tuple[dict[str, float], Tensor]:
    """`layout`: micro-batches of rows of datum indices."""
    model, metrics = Model(), []
    for rows in layout:
        order = [index for row in rows for index in row]
        local = [[order.index(index) for index in row] for row in rows]
        batch = arrange(
            [datums[index] for index in order], local, [scales[index] for index in order], pad_id=9
        )
        logprobs_M = model.logprobs(batch)
        reference_M = torch.full_like(logprobs_M, -2.0).detach()
        signal = SignalBatch.of(batch, dtype=torch.float64, reference_logprobs_M=reference_M)
        loss, part = objective(logprobs_M, signal)
        loss.backward()
        metrics.append(part)
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]
    return finalize_metrics(combine_metrics(metrics)), gradient


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
    objective, indices, lengths = OBJECTIVES[name], list(range(len(datums))), [len(datum) for datum in datums]
    shuffled = list(indices)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    expected, gradient = _loss_and_gradient(objective, datums, scales, [[[index] for index in indices]])
    layouts = {
        "one at a time": [[[index]] for index in indices],
        "another order": [[[index] for index in shuffled]],
        "micro-batches": [[[index] for index in part] for part in micro_batches(lengths, budget)],
        "packed": [[row] for row in pack(lengths, budget)],
    }
    for layout in layouts.values():
        metrics, other = _loss_and_gradient(objective, datums, scales, layout)
        assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-9)
        torch.testing.assert_close(other, gradient, rtol=1e-9, atol=1e-9)


def _one_row_a_turn(trajectory: Trajectory, advantage: float) -> list[Datum]:
    """The rows of an episode whose turns were recorded one by one: each with its whole context."""
    rows = []
    for turn in trajectory.turns:
        mask_N = np.zeros(turn.end - 1, bool)
        mask_N[turn.start - 1 :] = True
        rows.append(
            Datum(
                input_tokens_N=trajectory.tokens_T[: turn.end - 1].astype(np.int64),
                target_tokens_N=trajectory.tokens_T[1 : turn.end].astype(np.int64),
                mask_N=mask_N,
                advantages_N=np.where(mask_N, np.float32(advantage), np.float32(0)),
                sampler_logprobs_N=np.where(mask_N, trajectory.logprobs_T[1 : turn.end], np.float32(0)),
                trajectory_id=trajectory.trajectory_id,
            )
        )
    return rows


@settings(max_examples=25, deadline=None)
@given(trajectory_lists(min_size=2), st.sampled_from(Normalizer))
def test_splitting_an_episode_into_rows_changes_nothing(
    episodes: list[Trajectory], normalizer: Normalizer
) -> None:
    whole = [to_datum(episode, advantages=place - 1.25) for place, episode in enumerate(episodes)]
    split = [row for place, episode in enumerate(episodes) for row in _one_row_a_turn(episode, place - 1.25)]
    results = []
    for datums in (whole, split):
        scales = token_scales(normalizer, datums, max_tokens=16)
        layout = [[[index] for index in range(len(datums))]]
        results.append(_loss_and_gradient(OBJECTIVES["importance_sampling"], datums, scales, layout))
    (expected, gradient), (metrics, other) = results
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(other, gradient, rtol=1e-9, atol=1e-9)


def test_signals_follow_the_order_of_the_mask() -> None:
    batch = arrange([to_datum(two_turns(), advantages=[1.0, -2.0])], [[0]])
    signal = SignalBatch.of(batch)
    assert signal.advantages_M is not None
    assert signal.advantages_M.tolist() == [1, 1, -2]
    assert signal.sampler_logprobs_M is not None
    assert signal.sampler_logprobs_M.tolist() == [-0.5, -1.5, -2.5]
    assert signal.row_M.tolist() == [0, 0, 0]
    assert signal.weights_M is None
