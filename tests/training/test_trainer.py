"""The trainer's primitives: gradients that no layout changes, exact checkpoints, and real learning."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opentinker_core.config.schema import LoRAConfig, Normalizer, ObjectiveConfig, OptimizerConfig
from opentinker_core.errors import UsageError
from opentinker_core.objectives.compose import rl_objective
from opentinker_core.objectives.cross_entropy import cross_entropy
from opentinker_core.objectives.normalizers import token_scales
from opentinker_core.sampling.protocol import SampleRequest, SamplingParams
from opentinker_core.training.trainer import LayoutSettings
from opentinker_core.trajectories.errors import TrajectoryError
from opentinker_core.trajectories.types import Datum
from tests.tiny import LORA, TinyEngine, requests, rl_datums

OPTIMIZER = OptimizerConfig(learning_rate=1e-2)


@pytest.fixture(scope="module")
def engine(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyEngine:
    engine = TinyEngine.open(tiny_home, tmp_path_factory.mktemp("trainer"))
    engine.random_policy("p")
    return engine


@pytest.fixture(scope="module")
def datums(engine: TinyEngine) -> list[Datum]:
    params = SamplingParams(max_tokens=10, top_k=40, stop_token_ids=(engine.ids("5")[0],))
    asked = requests(engine, engine.publish("p"), params, samples=5)
    return rl_datums(asked, engine.sampler.sample(asked))


def _loss_and_gradient(
    engine: TinyEngine, datums: list[Datum], layout: LayoutSettings
) -> tuple[float, torch.Tensor, list[np.ndarray]]:
    engine.trainer.layout = layout
    result = engine.trainer.forward_backward(
        "p",
        datums,
        rl_objective(ObjectiveConfig(kl_coefficient=0.1)),
        token_scales(Normalizer.SEQUENCES, datums, 10),
        reference_logprobs=engine.trainer.forward(None, datums),
    )
    return result.loss, engine.gradient("p"), result.logprobs


@pytest.mark.parametrize(("budget", "share", "pack"), product([24, 100, 4096], [False, True], [False, True]))
def test_no_layout_changes_loss_gradient_or_logprobs(
    engine: TinyEngine, datums: list[Datum], budget: int, share: bool, pack: bool
) -> None:
    plain = LayoutSettings(micro_batch_tokens=10_000, share_prefix=False, pack=False)
    loss, gradient, logprobs = _loss_and_gradient(engine, datums, plain)
    other_loss, other, other_logprobs = _loss_and_gradient(
        engine, datums, LayoutSettings(budget, share, pack)
    )
    assert other_loss == pytest.approx(loss, rel=1e-5)
    assert (other - gradient).norm() < 1e-5 * gradient.norm()
    for a, b in zip(logprobs, other_logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@settings(
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(order=st.permutations(range(15)))
def test_row_order_changes_nothing(engine: TinyEngine, datums: list[Datum], order: list[int]) -> None:
    loss, gradient, _ = _loss_and_gradient(engine, datums, LayoutSettings())
    other_loss, other, _ = _loss_and_gradient(engine, [datums[i] for i in order], LayoutSettings())
    assert other_loss == pytest.approx(loss, rel=1e-5)
    assert (other - gradient).norm() < 1e-5 * gradient.norm()


def test_gradients_accumulate_over_calls_until_the_step(engine: TinyEngine, datums: list[Datum]) -> None:
    _, gradient, _ = _loss_and_gradient(engine, datums, LayoutSettings())
    scales = token_scales(Normalizer.SEQUENCES, datums, 10)
    for part in (slice(0, 4), slice(4, None)):
        engine.trainer.forward_backward(
            "p",
            datums[part],
            rl_objective(ObjectiveConfig(kl_coefficient=0.1)),
            scales[part],
            reference_logprobs=engine.trainer.forward(None, datums[part]),
        )
    assert (engine.gradient("p") - gradient).norm() < 1e-5 * gradient.norm()


def _supervised(engine: TinyEngine, prompt: str, completion: str) -> Datum:
    tokens = np.array(engine.ids(prompt + completion), np.int64)
    mask = np.arange(len(tokens)) >= len(prompt)
    return Datum(tokens[:-1], tokens[1:], mask[1:], weights_N=mask[1:].astype(np.float32))


def test_overfitting_one_prompt_to_one_token_reaches_certainty(engine: TinyEngine) -> None:
    """Fails if the first generated token is masked, or predicted from the wrong position."""
    engine.trainer.create("overfit", LORA, 0)
    datum = _supervised(engine, "3+4=", "7")
    scales = token_scales(Normalizer.TOKENS, [datum], 1)
    for _ in range(60):
        engine.trainer.forward_backward("overfit", [datum], cross_entropy, scales)
        engine.trainer.optim_step("overfit", OPTIMIZER)
    request = SampleRequest(engine.ids("3+4="), SamplingParams(max_tokens=1), engine.publish("overfit"), (0,))
    sequence = engine.sampler.sample([request])[0][0]
    assert engine.tokenizer.decode(sequence.tokens) == "7"
    assert np.exp(sequence.logprobs[0]) > 0.99


def test_a_fresh_policy_is_the_base_model(engine: TinyEngine, datums: list[Datum]) -> None:
    engine.trainer.create("fresh", LoRAConfig(), 0)
    for ours, base in zip(
        engine.trainer.forward("fresh", datums), engine.trainer.forward(None, datums), strict=True
    ):
        assert np.array_equal(ours, base)


def test_a_step_changes_the_targeted_factors_and_nothing_of_the_base(
    engine: TinyEngine, datums: list[Datum]
) -> None:
    engine.trainer.create("q", LORA, 3)
    names = {n.rpartition(".")[0].rpartition(".")[2] for n, _ in engine.state("q").adapter.parameters()}
    assert names == set(LORA.target_modules)
    base = {name: p.clone() for name, p in engine.model.named_parameters()}
    before = engine.weights("q")
    other = engine.weights("p")
    _train(engine, "q", datums, 2)
    assert not torch.equal(engine.weights("q"), before)
    assert torch.equal(engine.weights("p"), other)
    assert all(torch.equal(p, base[name]) for name, p in engine.model.named_parameters())


def _train(engine: TinyEngine, policy: str, datums: list[Datum], steps: int) -> list[float]:
    engine.trainer.layout = LayoutSettings()
    losses = []
    for _ in range(steps):
        scales = token_scales(Normalizer.TOKENS, datums, 10)
        result = engine.trainer.forward_backward(policy, datums, rl_objective(ObjectiveConfig()), scales)
        engine.trainer.optim_step(policy, OPTIMIZER)
        losses.append(result.loss)
    return losses


def test_a_checkpoint_goes_on_bitwise_where_it_was_saved(
    engine: TinyEngine, datums: list[Datum], tmp_path: Path
) -> None:
    engine.random_policy("a", seed=5)
    _train(engine, "a", datums, 3)
    engine.trainer.save_checkpoint("a", tmp_path / "c")
    straight = _train(engine, "a", datums, 4)
    engine.trainer.load_checkpoint("b", tmp_path / "c")
    resumed = _train(engine, "b", datums, 4)
    assert straight == resumed
    assert torch.equal(engine.weights("a"), engine.weights("b"))
    assert engine.state("b").step == 7


def test_clipping_bounds_the_step_and_reports_the_norm_before_it(
    engine: TinyEngine, datums: list[Datum]
) -> None:
    engine.random_policy("clip")
    scales = [1000 * scale for scale in token_scales(Normalizer.TOKENS, datums, 10)]
    engine.trainer.forward_backward("clip", datums, rl_objective(ObjectiveConfig()), scales)
    metrics = engine.trainer.optim_step("clip", OptimizerConfig(grad_clip_norm=0.5))
    assert metrics["grad_norm"] > 0.5


def test_long_batches_recompute_the_head_without_changing_the_gradient(engine: TinyEngine) -> None:
    """More positions than one chunk of the head: the checkpointed path, under the right adapter."""
    text = "".join(str(i % 10) for i in range(400))
    datums = [_supervised(engine, f"{i}+", text) for i in range(4)]
    scales = token_scales(Normalizer.TOKENS, datums, 1)
    engine.trainer.layout = LayoutSettings(micro_batch_tokens=4096)
    engine.trainer.forward_backward("p", datums, cross_entropy, scales)
    chunked = engine.gradient("p")
    engine.trainer.layout = LayoutSettings(micro_batch_tokens=500)
    engine.trainer.forward_backward("p", datums, cross_entropy, scales)
    whole = engine.gradient("p")
    assert (chunked - whole).norm() < 1e-5 * whole.norm()


def test_an_unknown_policy_is_named(engine: TinyEngine, datums: list[Datum]) -> None:
    with pytest.raises(UsageError, match="'nobody' has no resident state"):
        engine.trainer.optim_step("nobody", OPTIMIZER)


@pytest.mark.parametrize(("field", "value"), [("temperature", 0.5), ("top_p", 0.9), ("top_k", 3)])
def test_datums_of_one_call_share_their_sampled_distribution(
    engine: TinyEngine, datums: list[Datum], field: str, value: float
) -> None:
    mixed = [*datums, replace(datums[0], **{field: value})]  # type: ignore[arg-type]
    expected = rf"datums\[15\]\.{field}: {value} .* {getattr(datums[0], field)} as in datums\[0\]"
    for policy in ("p", None):
        with pytest.raises(UsageError, match=expected):
            engine.trainer.forward(policy, mixed)
    scales = token_scales(Normalizer.TOKENS, mixed, 10)
    with pytest.raises(UsageError, match=expected):
        engine.trainer.forward_backward("p", mixed, rl_objective(ObjectiveConfig()), scales)
    assert not engine.has_gradient("p")


def test_no_datums_are_refused_for_a_gradient_and_nothing_for_logprobs(engine: TinyEngine) -> None:
    assert engine.trainer.forward("p", []) == engine.trainer.forward(None, []) == []
    with pytest.raises(UsageError, match=r"datums: \[\] is not accepted; accepted: at least one datum"):
        engine.trainer.forward_backward("p", [], cross_entropy, [])


def test_datums_with_weights_and_with_advantages_do_not_mix(engine: TinyEngine, datums: list[Datum]) -> None:
    supervised = replace(_supervised(engine, "3+4=", "7"), top_k=datums[0].top_k)
    mixed = [datums[0], supervised]
    assert [len(logprobs_N) for logprobs_N in engine.trainer.forward("p", mixed)] == [len(d) for d in mixed]
    with pytest.raises(TrajectoryError, match="one kind of signal"):
        engine.trainer.forward_backward("p", mixed, cross_entropy, token_scales(Normalizer.TOKENS, mixed, 10))
    assert not engine.has_gradient("p")
