"""Correction for sampler and trainer not being the same: by hand, and whatever the layout of the rows."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from opentinker_core.config.schema import CorrectionConfig, Normalizer, ObjectiveConfig
from opentinker_core.errors import UsageError
from opentinker_core.objectives.compose import rl_objective
from opentinker_core.objectives.correction import correction_weights
from opentinker_core.objectives.importance_sampling import importance_sampling
from opentinker_core.objectives.normalizers import token_scales
from opentinker_core.objectives.ppo import ppo
from opentinker_core.objectives.types import Objective, SignalBatch, finalize_metrics
from opentinker_core.sampling.protocol import SamplingParams
from opentinker_core.training.trainer import LayoutSettings
from opentinker_core.trajectories.datums import to_datum
from opentinker_core.trajectories.types import Datum, Trajectory
from tests.objectives.layouts import Layout, assert_same, loss_and_gradient, one_row_a_turn
from tests.tiny import TinyEngine, requests, rl_datums
from tests.trajectories.strategies import trajectory_lists

KINDS, LEVELS = ["truncate", "mask"], ["token", "sequence", "geometric"]
EVERY = [(kind, level) for kind in KINDS for level in LEVELS]


def correction(kind: str, level: str = "token", **bounds: float) -> CorrectionConfig:
    return CorrectionConfig.model_validate({"kind": kind, "level": level, **bounds})


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch_of(ratios: list[float], rows: list[int], advantages: list[float]) -> tuple[Tensor, SignalBatch]:
    """Logprobs -1 of a policy that is `ratios` times as likely to say each token as the sampler was."""
    logprobs_M = torch.full((len(ratios),), -1.0, dtype=torch.float64, requires_grad=True)
    return logprobs_M, SignalBatch(
        token_scales_M=torch.full((len(ratios),), 0.5, dtype=torch.float64),
        row_M=torch.tensor(rows),
        advantages_M=tensor(advantages),
        sampler_logprobs_M=-1.0 - tensor(ratios).log(),
    )


# Two trajectories: the ratios of the first multiply to 3, those of the second to 0.4.
RATIOS, ROWS, ADVANTAGES = [3.0, 0.5, 2.0, 0.4, 1.0], [0, 0, 0, 1, 1], [1.0, 1.0, 1.0, -2.0, -2.0]
BATCH = (RATIOS, ROWS, ADVANTAGES)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (correction("truncate"), [2, 0.5, 2, 0.4, 1]),
        (correction("truncate", low=0.5), [2, 0.5, 2, 0.5, 1]),
        (correction("mask"), [0, 0.5, 2, 0, 1]),
        (correction("mask", low=0.45, high=3.5), [3, 0.5, 2, 0, 1]),
        (correction("truncate", "sequence", high=2.5), [2.5] * 3 + [0.4] * 2),
        (correction("truncate", "sequence"), [3] * 3 + [0.4] * 2),
        (correction("mask", "sequence", low=0.3), [0] * 3 + [0.4] * 2),
        (correction("mask", "sequence"), [0] * 5),
        (correction("truncate", "geometric"), [1.01] * 3 + [math.sqrt(0.4)] * 2),
        (correction("mask", "geometric", low=0.5, high=1.5), [3 ** (1 / 3)] * 3 + [math.sqrt(0.4)] * 2),
    ],
    ids=str,
)
def test_weights_and_gradients_by_hand(config: CorrectionConfig, expected: list[float]) -> None:
    logprobs_M, batch = batch_of(*BATCH)
    assert correction_weights(logprobs_M, batch, config).tolist() == pytest.approx(expected)
    for objective in (importance_sampling, ppo):
        loss, metrics = objective(logprobs_M, batch, correction=config)
        (gradient,) = torch.autograd.grad(loss, logprobs_M)
        by_hand = [-w * a * 0.5 for w, a in zip(expected, ADVANTAGES, strict=True)]
        assert loss.item() == pytest.approx(sum(by_hand))
        assert gradient.tolist() == pytest.approx(by_hand)
        assert finalize_metrics(metrics)["correction_weight_mean"] == pytest.approx(sum(expected) / 5)


def test_the_clip_is_around_the_old_policy_and_the_weight_from_the_sampler() -> None:
    # pi / pi_old is 1.5, 0.5, 1.5, 0.5; pi_old / mu is 4, 1, 0.25, 1.
    logprobs_M = tensor([0.3, 0.1, 0.3, 0.1]).log().requires_grad_()
    old_M = tensor([0.2] * 4).log()
    batch = SignalBatch(
        token_scales_M=torch.ones(4, dtype=torch.float64),
        row_M=torch.arange(4),
        advantages_M=tensor([1, 1, -1, -1]),
        sampler_logprobs_M=tensor([0.05, 0.2, 0.8, 0.2]).log(),
        old_logprobs_M=old_M,
    )
    loss, metrics = ppo(logprobs_M, batch, clip_low=0.2, clip_high=0.28, correction=correction("truncate"))
    assert loss.item() == pytest.approx(-(2 * 1.28 + 0.5 - 0.25 * 1.5 - 0.8))
    (gradient,) = torch.autograd.grad(loss, logprobs_M)
    assert gradient.tolist() == pytest.approx([0, -0.5, 0.25 * 1.5, 0])
    numbers = finalize_metrics(metrics)
    assert (numbers["clip_fraction"], numbers["ratio_max"]) == pytest.approx((0.5, 4))


@pytest.mark.parametrize(("kind", "level"), EVERY)
@pytest.mark.parametrize("objective", [importance_sampling, ppo])
def test_gradients_agree_with_finite_differences(objective: Objective, kind: str, level: str) -> None:
    generator = torch.Generator().manual_seed(3)
    old_M, sampler_M, logprobs_M = (-torch.rand(3, 12, dtype=torch.float64, generator=generator)).unbind()
    batch = SignalBatch(
        token_scales_M=torch.rand(12, dtype=torch.float64, generator=generator),
        row_M=torch.arange(12) // 4,
        advantages_M=torch.randn(12, dtype=torch.float64, generator=generator),
        sampler_logprobs_M=sampler_M,
        old_logprobs_M=old_M,
    )
    loss = partial(objective, correction=correction(kind, level, low=0.8, high=1.6))
    assert torch.autograd.gradcheck(lambda logprobs: loss(logprobs, batch)[0], (logprobs_M.requires_grad_(),))


ratios = st.lists(
    st.tuples(st.floats(0.05, 20), st.integers(0, 2), st.floats(-2, 2)), min_size=1, max_size=12
)


@given(ratios)
def test_without_bounds_truncated_is_plain_importance_sampling(rows: list[tuple[float, int, float]]) -> None:
    logprobs_M, batch = batch_of(*(list(column) for column in zip(*rows, strict=True)))  # type: ignore[arg-type]
    plain, _ = importance_sampling(logprobs_M, batch)
    bounded, _ = importance_sampling(logprobs_M, batch, correction=correction("truncate", high=1e9))
    assert bounded.item() == pytest.approx(plain.item())
    torch.testing.assert_close(
        torch.autograd.grad(bounded, logprobs_M), torch.autograd.grad(plain, logprobs_M)
    )


@given(ratios, st.sampled_from(EVERY))
def test_weights_stay_within_bounds_and_are_one_a_trajectory(
    rows: list[tuple[float, int, float]], which: tuple[str, str]
) -> None:
    kind, level = which
    columns = [list(column) for column in zip(*rows, strict=True)]
    logprobs_M, batch = batch_of(*columns)  # type: ignore[arg-type]
    weights_M = correction_weights(logprobs_M, batch, correction(kind, level, low=0.5, high=2))
    inside_M = (weights_M >= 0.5) & (weights_M <= 2)
    assert bool((inside_M | (weights_M == 0) if kind == "mask" else inside_M).all())
    assert not weights_M.requires_grad
    if level != "token":
        assert all(weights_M[batch.row_M == row].unique().numel() == 1 for row in set(columns[1]))


def test_metrics_are_of_the_raw_ratios_whatever_the_correction() -> None:
    plain = finalize_metrics(importance_sampling(*batch_of(*BATCH))[1])
    assert plain["ratio_min"] == pytest.approx(0.4)
    assert plain["ratio_mean"] == pytest.approx(6.9 / 5)
    assert plain["ratio_max"] == pytest.approx(3)
    assert plain["ratio_ess"] == pytest.approx(6.9**2 / 14.41 / 5)
    assert plain["ratio_outside"] == pytest.approx(2 / 5)
    k1 = [-math.log(r) for r in RATIOS]
    assert plain["sampler_kl_k1"] == pytest.approx(sum(k1) / 5)
    assert plain["sampler_kl_k3"] == pytest.approx((6.9 - 5 + sum(k1)) / 5)
    for kind, level in EVERY:
        config = correction(kind, level)
        corrected = finalize_metrics(importance_sampling(*batch_of(*BATCH), correction=config)[1])
        same = [name for name in plain if name not in ("loss", "ratio_outside")]
        assert {name: corrected[name] for name in same} == {name: plain[name] for name in same}
    wide = correction("truncate", high=3.5)
    assert finalize_metrics(ppo(*batch_of(*BATCH), correction=wide)[1])["ratio_outside"] == 0


def test_metrics_of_trajectories_count_each_once() -> None:
    numbers = finalize_metrics(ppo(*batch_of(*BATCH), correction=correction("mask", "sequence", low=0.3))[1])
    assert numbers["sequences"] == pytest.approx(2)
    assert numbers["sequence_ratio_mean"] == pytest.approx(1.7)
    assert (numbers["sequence_ratio_min"], numbers["sequence_ratio_max"]) == pytest.approx((0.4, 3))
    assert numbers["sequence_ratio_ess"] == pytest.approx(3.4**2 / 9.16 / 2)
    assert numbers["sequence_ratio_outside"] == pytest.approx(0.5)


def test_equal_policies_are_a_full_sample_with_nothing_outside() -> None:
    for kind, level in EVERY:
        same = batch_of([1.0] * 4, [0, 0, 1, 1], [1.0] * 4)
        numbers = finalize_metrics(ppo(*same, correction=correction(kind, level))[1])
        assert numbers["ratio_ess"] == numbers["correction_weight_mean"] == pytest.approx(1)
        assert numbers["ratio_outside"] == numbers["sampler_kl_k1"] == pytest.approx(0)


def _objectives() -> dict[str, Objective]:
    return {
        f"{name}-{kind}-{level}": rl_objective(
            ObjectiveConfig.model_validate(
                {"name": name, "correction": {"kind": kind, "level": level, "low": 0.2, "high": 5}}
            )
        )
        for name, (kind, level) in zip(["ppo", "importance_sampling"] * 3, EVERY, strict=True)
    }


@pytest.mark.parametrize("name", _objectives())
@settings(max_examples=15, deadline=None)
@given(
    episodes=trajectory_lists(min_size=2),
    normalizer=st.sampled_from(Normalizer),
    budget=st.integers(8, 80),
    random=st.randoms(use_true_random=False),
)
def test_no_layout_changes_loss_gradient_or_metrics(
    name: str, episodes: list[Trajectory], normalizer: Normalizer, budget: int, random: object
) -> None:
    datums = [_near(episode, place - 1.25) for place, episode in enumerate(episodes)]
    scales = token_scales(normalizer, datums, max_tokens=16)
    objective, order = _objectives()[name], list(range(len(datums)))
    random.shuffle(order)  # type: ignore[attr-defined]
    expected = loss_and_gradient(objective, datums, scales)
    for layout in (Layout(1), Layout(budget, pack=True), Layout(budget, share_prefix=True, pack=True)):
        assert_same(loss_and_gradient(objective, datums, scales, layout), expected)
        shuffled = [datums[i] for i in order], [scales[i] for i in order]
        assert_same(loss_and_gradient(objective, *shuffled, layout), expected)


@pytest.mark.parametrize("name", _objectives())
@settings(max_examples=15, deadline=None)
@given(trajectory_lists(min_size=2), st.sampled_from(Normalizer))
def test_splitting_a_trajectory_into_rows_changes_nothing(
    name: str, episodes: list[Trajectory], normalizer: Normalizer
) -> None:
    objective = _objectives()[name]
    whole = [_near(episode, place - 1.25) for place, episode in enumerate(episodes)]
    split = [
        replace(
            row, sampler_logprobs_N=np.where(row.mask_N, near.sampler_logprobs_N[: len(row)], np.float32(0))
        )
        for place, (episode, near) in enumerate(zip(episodes, whole, strict=True))
        for row in one_row_a_turn(episode, place - 1.25)
        if near.sampler_logprobs_N is not None
    ]
    scales = [token_scales(normalizer, datums, max_tokens=16) for datums in (whole, split)]
    expected = loss_and_gradient(objective, whole, scales[0])
    for layout in (Layout(), Layout(1), Layout(40, share_prefix=True, pack=True)):
        assert_same(loss_and_gradient(objective, split, scales[1], layout, old=True), expected)


def _near(episode: Trajectory, advantage: float) -> Datum:
    """The datum of an episode; its sampler logprobs are such that some ratios are in bounds, some are not."""
    datum = to_datum(episode, advantages=advantage)
    draws = np.random.default_rng(len(datum)).uniform(-4, -0.5, len(datum)).astype(np.float32)
    return replace(datum, sampler_logprobs_N=np.where(datum.mask_N, draws, np.float32(0)))


def test_rows_of_a_trajectory_in_several_micro_batches_need_the_old_logprobs() -> None:
    datums = [_row("a"), _row("a")]
    scales = token_scales(Normalizer.TOKENS, datums, max_tokens=1)
    objective = rl_objective(
        ObjectiveConfig(correction=correction("mask", "sequence")),
    )
    with pytest.raises(UsageError, match=r"level: sequence needs whole trajectories.*old_logprobs"):
        loss_and_gradient(objective, datums, scales, Layout(1))
    loss_and_gradient(objective, datums, scales, Layout(100))  # both in one
    loss_and_gradient(objective, [_row("a"), _row("b")], scales, Layout(1))


def _row(trajectory: str) -> Datum:
    return Datum(
        input_tokens_N=np.arange(4),
        target_tokens_N=np.arange(1, 5),
        mask_N=np.array([False, True, True, True]),
        advantages_N=np.array([0, 1, 1, 1], np.float32),
        sampler_logprobs_N=np.array([0, -2, -2, -2], np.float32),
        trajectory_id=trajectory,
    )


@pytest.mark.parametrize("level", LEVELS)
def test_the_trainer_learns_nothing_from_what_is_masked(tiny_home: Path, tmp_path: Path, level: str) -> None:
    engine = TinyEngine.open(tiny_home, tmp_path)
    engine.random_policy("p")
    asked = requests(engine, engine.publish("p"), SamplingParams(max_tokens=6))
    datums = rl_datums(asked, engine.sampler.sample(asked))
    # The second datum says that the sampler found its tokens e times as likely as it really did.
    shift = np.where(datums[1].mask_N, np.float32(1), np.float32(0))
    assert datums[1].sampler_logprobs_N is not None
    damaged = np.minimum(datums[1].sampler_logprobs_N + shift, 0)
    off = [datums[0], replace(datums[1], sampler_logprobs_N=damaged), *datums[2:]]
    without = [replace(off[1], advantages_N=np.zeros(len(off[1]), np.float32)), off[0], *off[2:]]
    plain = rl_objective(ObjectiveConfig(name="importance_sampling"))
    masked = rl_objective(ObjectiveConfig(correction=correction("mask", level, low=0.98, high=1.02)))

    def gradient(objective: Objective, datums: list[Datum], tokens: int, old: bool = False) -> Tensor:
        engine.trainer.layout = LayoutSettings(micro_batch_tokens=tokens)
        scales = token_scales(Normalizer.NONE, datums, max_tokens=6)
        given = engine.trainer.forward("p", datums) if old else None
        engine.trainer.forward_backward("p", datums, objective, scales, old_logprobs=given)
        return engine.gradient("p")

    expected = gradient(plain, without, 4096)
    for tokens, old in ((4096, False), (30, False), (30, True)):
        torch.testing.assert_close(gradient(masked, off, tokens, old), expected, rtol=1e-3, atol=1e-4)
    assert float((gradient(plain, off, 4096) - expected).norm()) > 1


def test_bounds_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValidationError, match="low 3 and high 2; accepted: low below high"):
        correction("mask", low=3)
    with pytest.raises(ValidationError, match="'none', 'truncate' or 'mask'"):
        correction("clip")
