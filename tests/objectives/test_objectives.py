"""Each objective against values computed by hand, its gradient against finite differences."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from opentinker_core.config.schema import ObjectiveConfig
from opentinker_core.objectives.cispo import cispo
from opentinker_core.objectives.compose import rl_objective
from opentinker_core.objectives.cross_entropy import cross_entropy
from opentinker_core.objectives.dro import dro
from opentinker_core.objectives.gspo import gspo
from opentinker_core.objectives.importance_sampling import importance_sampling
from opentinker_core.objectives.kl import kl_penalty, kl_per_token
from opentinker_core.objectives.ppo import ppo
from opentinker_core.objectives.types import Objective, SignalBatch, combine_metrics, finalize_metrics

Row = tuple[float, float, float, float, float]
"""logprob, sampler logprob, reference logprob, advantage, token scale"""

logprobs = st.floats(-5, 0)
rows = st.lists(
    st.tuples(logprobs, logprobs, logprobs, st.floats(-2, 2), st.floats(0.01, 1)), min_size=1, max_size=12
)


def tensor(values: list[float], *, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def batch_of(rows: list[Row], *, grad: bool = True) -> tuple[Tensor, SignalBatch]:
    logprobs_M, sampler_M, reference_M, advantages_M, scales_M = (
        list(column) for column in zip(*rows, strict=True)
    )
    batch = SignalBatch(
        token_scales_M=tensor(scales_M),
        row_M=torch.arange(len(rows)),
        weights_M=tensor(advantages_M),
        advantages_M=tensor(advantages_M),
        sampler_logprobs_M=tensor(sampler_M),
        reference_logprobs_M=tensor(reference_M),
    )
    return tensor(logprobs_M, grad=grad), batch


def gradient(objective: Objective, logprobs_M: Tensor, batch: SignalBatch) -> Tensor:
    loss, _ = objective(logprobs_M, batch)
    (grad,) = torch.autograd.grad(loss, logprobs_M)
    return grad


# Ratios 1.5, 0.5, 1.5, 0.5 with advantages 1, 1, -1, -1: the first and the last are clipped.
CLIPPING: list[Row] = [
    (math.log(0.3), math.log(0.2), -1.0, 1.0, 1.0),
    (math.log(0.2), math.log(0.4), -1.0, 1.0, 1.0),
    (math.log(0.3), math.log(0.2), -1.0, -1.0, 1.0),
    (math.log(0.2), math.log(0.4), -1.0, -1.0, 1.0),
]


def test_cross_entropy_by_hand() -> None:
    logprobs_M, batch = batch_of([(-1.0, 0, 0, 2.0, 0.5), (-3.0, 0, 0, 1.0, 0.25)])
    loss, metrics = cross_entropy(logprobs_M, batch)
    assert loss.item() == pytest.approx(1.0 * 2 * 0.5 + 3.0 * 0.25)
    assert finalize_metrics(metrics) == pytest.approx({"loss": 1.75, "tokens": 2, "nll": 2.0})
    assert gradient(cross_entropy, logprobs_M, batch).tolist() == [-1.0, -0.25]


def test_importance_sampling_by_hand() -> None:
    logprobs_M, batch = batch_of([(math.log(0.3), math.log(0.2), 0, 2.0, 0.5), (-1.0, -1.0, 0, -1.0, 1.0)])
    loss, _ = importance_sampling(logprobs_M, batch)
    assert loss.item() == pytest.approx(-1.5 * 2 * 0.5 + 1.0)
    assert gradient(importance_sampling, logprobs_M, batch).tolist() == pytest.approx([-1.5, 1.0])


def test_ppo_clips_only_what_would_go_further() -> None:
    logprobs_M, batch = batch_of(CLIPPING)
    loss, metrics = ppo(logprobs_M, batch, clip_low=0.2, clip_high=0.28)
    assert loss.item() == pytest.approx(-(1.28 + 0.5 - 1.5 - 0.8))
    assert gradient(ppo, logprobs_M, batch).tolist() == pytest.approx([0, -0.5, 1.5, 0])
    assert finalize_metrics(metrics)["clip_fraction"] == 0.5


def test_ppo_s_upper_bound_is_its_own() -> None:
    between = batch_of([(math.log(0.25), math.log(0.2), -1.0, 1.0, 1.0)])  # ratio 1.25
    assert ppo(*between, clip_low=0.2, clip_high=0.28)[1]["clip_fraction"] == 0
    assert ppo(*between, clip_low=0.28, clip_high=0.2)[1]["clip_fraction"] == 1


def test_ratios_are_measured_before_clipping() -> None:
    for objective in (ppo, importance_sampling):
        _, metrics = objective(*batch_of(CLIPPING))
        numbers = finalize_metrics(metrics)
        assert numbers["ratio_mean"] == pytest.approx(1.0)
        assert numbers["ratio_min"] == pytest.approx(0.5)
        assert numbers["ratio_max"] == pytest.approx(1.5)
        assert numbers["sampler_kl_k1"] == pytest.approx(-(math.log(1.5) + math.log(0.5)) / 2)
        assert numbers["sampler_kl_k3"] == pytest.approx(-(math.log(1.5) + math.log(0.5)) / 2)


def test_kl_to_the_reference_by_hand() -> None:
    logprobs_M, batch = batch_of([(-1.0, 0, -2.0, 0, 0.5), (-2.0, 0, -1.0, 0, 1.0)])
    loss, metrics = kl_penalty(logprobs_M, batch, 0.1)
    k3 = [math.exp(-1) - 1 + 1, math.exp(1) - 1 - 1]
    assert loss.item() == pytest.approx(0.1 * (0.5 * k3[0] + k3[1]))
    assert metrics["reference_kl"].item() == pytest.approx(sum(k3))
    (grad,) = torch.autograd.grad(loss, logprobs_M)
    assert grad.tolist() == pytest.approx([0.1 * 0.5 * 1.0, 0.1 * -1.0])


def test_the_expected_gradient_of_the_penalty_is_that_of_the_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, generator=generator, requires_grad=True)
    reference = torch.randn(7, dtype=torch.float64, generator=generator).log_softmax(0)
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    # The expectation over tokens sampled from the policy, each weighted by its probability.
    estimate = (policy.exp().detach() * kl_per_token(policy, reference)).sum()
    (estimated,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    torch.testing.assert_close(estimated, exact)
    torch.testing.assert_close(estimate, (policy.exp() * (policy - reference)).sum())


@given(rows)
def test_ppo_is_importance_sampling_where_nothing_is_clipped(rows: list[Row]) -> None:
    logprobs_M, batch = batch_of(rows)
    unclipped = partial(ppo, clip_low=1.0, clip_high=math.inf)
    assert unclipped(logprobs_M, batch)[0].item() == importance_sampling(logprobs_M, batch)[0].item()
    torch.testing.assert_close(
        gradient(unclipped, logprobs_M, batch), gradient(importance_sampling, logprobs_M, batch)
    )


@given(rows)
def test_supervised_is_importance_sampling_at_ratio_one(rows: list[Row]) -> None:
    on_policy = [(logprob, logprob, *rest) for logprob, _, *rest in rows]
    logprobs_M, batch = batch_of(on_policy)  # type: ignore[arg-type]
    supervised = gradient(cross_entropy, logprobs_M, batch)
    for objective in (importance_sampling, ppo):
        torch.testing.assert_close(
            gradient(objective, logprobs_M, batch), supervised, rtol=1e-12, atol=1e-300
        )


@pytest.mark.parametrize("objective", [cross_entropy, importance_sampling, ppo])
def test_gradients_agree_with_finite_differences(objective: Objective) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(5, 20, dtype=torch.float64, generator=generator)
    advantages = (values[3] - 0.5).tolist()
    rows = list(
        zip(
            (-values[0]).tolist(),
            (-values[1]).tolist(),
            (-values[2]).tolist(),
            advantages,
            values[4].tolist(),
            strict=True,
        )
    )
    logprobs_M, batch = batch_of(rows)
    assert torch.autograd.gradcheck(lambda logprobs: objective(logprobs, batch)[0], (logprobs_M,))


@given(rows, st.lists(st.integers(0, 2), min_size=12, max_size=12))
def test_loss_gradient_and_metrics_combine_over_any_split(rows: list[Row], part_of: list[int]) -> None:
    objective = rl_objective(ObjectiveConfig(name="ppo", kl_coefficient=0.1))
    logprobs_M, batch = batch_of(rows)
    whole_loss, whole = objective(logprobs_M, batch)
    split_loss, metrics = 0.0, []
    for part in range(3):
        chosen = [row for row, place in zip(rows, part_of, strict=False) if place == part]
        if chosen:
            loss, part_metrics = objective(*batch_of(chosen))
            split_loss += loss.item()
            metrics.append(part_metrics)
    assert split_loss == pytest.approx(whole_loss.item(), abs=1e-12)
    assert finalize_metrics(combine_metrics(metrics)) == pytest.approx(finalize_metrics(whole), abs=1e-12)


def test_extreme_log_ratios_stay_finite() -> None:
    logprobs_M, batch = batch_of([(0.0, -500.0, -500.0, 1.0, 1.0), (-500.0, 0.0, 0.0, -1.0, 1.0)])
    loss, metrics = rl_objective(ObjectiveConfig(name="importance_sampling", kl_coefficient=0.1))(
        logprobs_M, batch
    )
    assert torch.isfinite(loss)
    assert all(torch.isfinite(value) for value in metrics.values())
    assert metrics["ratio_max"].item() == pytest.approx(math.exp(20))


def test_the_configured_objective_adds_the_penalty() -> None:
    logprobs_M, batch = batch_of(CLIPPING)
    config = ObjectiveConfig(name="ppo", clip_low=0.1, clip_high=0.1, kl_coefficient=0.5)
    loss, metrics = rl_objective(config)(logprobs_M, batch)
    expected = ppo(logprobs_M, batch, clip_low=0.1, clip_high=0.1)[0] + kl_penalty(logprobs_M, batch, 0.5)[0]
    assert loss.item() == metrics["loss"].item() == expected.item()
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize(
    ("objective", "field"),
    [
        (cross_entropy, "weights_M"),
        (ppo, "advantages_M"),
        (importance_sampling, "advantages_M"),
        (partial(kl_penalty, coefficient=1.0), "reference_logprobs_M"),
    ],
)
def test_a_missing_signal_is_named(objective: Objective, field: str) -> None:
    empty = SignalBatch(token_scales_M=tensor([1.0]), row_M=torch.tensor([0]))
    with pytest.raises(ValueError, match=field):
        objective(tensor([-1.0]), empty)


def _tinker_batch(
    rows: list[tuple[float, float, float, float]], datum: list[int]
) -> tuple[Tensor, SignalBatch]:
    """Of (logprob, sampler logprob, advantage, sequence mask)."""
    logprobs_M, sampler_M, advantages_M, mask_M = (list(column) for column in zip(*rows, strict=True))
    batch = SignalBatch(
        token_scales_M=torch.ones(len(rows), dtype=torch.float64),
        row_M=torch.tensor(datum),
        advantages_M=tensor(advantages_M),
        sampler_logprobs_M=tensor(sampler_M),
        sequence_mask_M=tensor(mask_M),
    )
    return tensor(logprobs_M, grad=True), batch


HALVED, DOUBLED = (math.log(0.2), math.log(0.4)), (math.log(0.4), math.log(0.2))


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    logprobs_M, batch = _tinker_batch([(*DOUBLED, 3.0, 1), (*HALVED, -1.0, 1)], [0, 0])
    loss, metrics = cispo(logprobs_M, batch, ratio_low=0.75, ratio_high=1.5)
    assert loss.item() == pytest.approx(-(1.5 * 3 * math.log(0.4) - 0.75 * math.log(0.2)))
    objective = partial(cispo, ratio_low=0.75, ratio_high=1.5)
    assert gradient(objective, logprobs_M, batch).tolist() == pytest.approx([-4.5, 0.75])
    assert finalize_metrics(metrics)["clip_fraction"] == 1


def test_dro_by_hand() -> None:
    logprobs_M, batch = _tinker_batch([(-1.0, -3.0, 2.0, 1), (-1.0, 0.0, 0.0, 1)], [0, 0])
    loss, _ = dro(logprobs_M, batch, beta=0.5)
    assert loss.item() == pytest.approx(-(-1.0 * 2 - 0.25 * 4) + 0.25)
    assert gradient(partial(dro, beta=0.5), logprobs_M, batch).tolist() == pytest.approx([-2 + 1, -0.5])


def test_gspo_has_one_ratio_a_sequence_of_the_tokens_in_its_mask() -> None:
    # Over the mask the first sequence's ratio is 2, the second's 0.5; the third has no mask and ratio 1.
    rows = [
        (*HALVED, 5.0, 0),
        (*DOUBLED, 1.0, 1),
        (*DOUBLED, -1.0, 1),
        (*HALVED, -1.0, 1),
        (*DOUBLED, 2.0, 0),
    ]
    logprobs_M, batch = _tinker_batch(rows, [0, 0, 0, 1, 2])
    loss, metrics = gspo(logprobs_M, batch, ratio_low=0.8, ratio_high=1.2)
    assert loss.item() == pytest.approx(-(1.2 * 5 + 1.2 - 2 - 0.8 + 2))
    assert gradient(gspo, logprobs_M, batch).tolist() == pytest.approx([0, 0, 2, 0, -2])
    assert finalize_metrics(metrics)["clip_fraction"] == pytest.approx(3 / 5)


@pytest.mark.parametrize("objective", [ppo, cispo, gspo])
def test_a_batch_s_own_bounds_take_the_place_of_the_objective_s(objective: Objective) -> None:
    logprobs_M, batch = _tinker_batch([(*DOUBLED, 1.0, 1), (*DOUBLED, 1.0, 1)], [0, 1])
    bounded = replace(batch, ratio_low_M=tensor([0.1, 0.1]), ratio_high_M=tensor([1.1, 9.0]))
    first, second = (-gradient(objective, logprobs_M, bounded)).tolist()
    assert second == pytest.approx(2)
    assert first == pytest.approx(1.1 if objective is cispo else 0)
