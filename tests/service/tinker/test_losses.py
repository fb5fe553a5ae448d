"""The public losses: values and gradients are those of PEFT and plain torch; what does not fit is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import UsageError
from opentinker_core.service.tinker.losses import LOSSES, forward_result, output, policy_batch
from opentinker_core.service.tinker.wire import WireDatum
from opentinker_core.training.trainer import ForwardBackward, LayoutSettings, PolicyBatch
from tests.service.tinker.formulas import FORMULAS, VOCABULARY, Alone, data_for
from tests.tiny import TinyEngine

LIMITS = {"vocabulary": VOCABULARY, "max_length": 256}
LORA = LoRAConfig(rank=3, alpha=3.0, target_modules=("q_proj", "v_proj", "gate_proj", "down_proj"))


@pytest.fixture(scope="module")
def engine(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyEngine:
    engine = TinyEngine.open(tiny_home, tmp_path_factory.mktemp("losses"))
    engine.random_policy("p", lora=LORA)
    assert engine.model.config.vocab_size == LIMITS["vocabulary"]
    return engine


@pytest.fixture(scope="module")
def alone(engine: TinyEngine, tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    directory = tmp_path_factory.mktemp("peft") / "p"
    engine.trainer.publish_snapshot("p", directory)
    return Alone(tiny_home, directory)


def _with(data: list[WireDatum], **more: np.ndarray | float) -> list[WireDatum]:
    return [
        WireDatum(
            wire.tokens_N,
            {
                **wire.inputs,
                **{n: np.broadcast_to(np.float32(v), len(wire.tokens_N)) for n, v in more.items()},
            },
        )
        for wire in data
    ]


def _run(engine: TinyEngine, batch: PolicyBatch) -> tuple[ForwardBackward, dict[str, Tensor]]:
    (result,) = engine.trainer.forward_backward_all([batch])
    assert isinstance(result, ForwardBackward), result
    gradient = engine.state("p").gradient
    assert gradient is not None
    found = {}
    for name, factors in gradient.factors.items():
        found[f"base_model.model.{name}.lora_A.weight"] = factors.A_RK.clone()
        found[f"base_model.model.{name}.lora_B.weight"] = factors.Bt_RN.T.clone()
    engine.trainer.discard_gradient("p")
    return result, found


def _assert_same(
    engine: TinyEngine, alone: Alone, data: list[WireDatum], loss_fn: str, **config: float
) -> None:
    batch = policy_batch("p", data, loss_fn, config, **LIMITS)
    result, gradients = _run(engine, batch)
    loss, expected = alone.loss_and_gradients(data, FORMULAS[loss_fn], config)
    assert result.loss == pytest.approx(loss, rel=1e-5, abs=1e-5)
    assert gradients.keys() == expected.keys()
    ours, theirs = (torch.cat([g[n].reshape(-1) for n in sorted(g)]) for g in (gradients, expected))
    assert theirs.norm() > 1e-3
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    outputs, metrics = output(result)
    assert metrics["loss:sum"] == result.loss
    for wire, given in zip(data, outputs, strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(
                given["logprobs"],
                alone.logprobs(wire.tokens_N, wire.inputs["target_tokens"]).numpy(),
                atol=2e-5,
            )


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_values_and_gradients_are_those_of_peft(engine: TinyEngine, alone: Alone, loss_fn: str) -> None:
    _assert_same(engine, alone, data_for(loss_fn), loss_fn)


@pytest.mark.parametrize(
    ("loss_fn", "config"),
    [
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}),
        ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("gspo", {"clip_low_threshold": 0.01, "clip_high_threshold": 1.01}),
        ("dro", {"beta": 1.5}),
    ],
)
def test_their_config_is_heeded(
    engine: TinyEngine, alone: Alone, loss_fn: str, config: dict[str, float]
) -> None:
    default = policy_batch("p", data_for(loss_fn), loss_fn, {}, **LIMITS)
    other = policy_batch("p", data_for(loss_fn), loss_fn, config, **LIMITS)
    assert _run(engine, default)[0].loss != pytest.approx(_run(engine, other)[0].loss, rel=1e-3)
    _assert_same(engine, alone, data_for(loss_fn), loss_fn, **config)


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
def test_bounds_may_differ_by_token(engine: TinyEngine, alone: Alone, loss_fn: str) -> None:
    data = [
        WireDatum(
            wire.tokens_N,
            {
                **wire.inputs,
                "clip_low_threshold": np.linspace(0.1, 0.9, len(wire.tokens_N), dtype=np.float32),
                "clip_high_threshold": np.linspace(1, 5, len(wire.tokens_N), dtype=np.float32),
            },
        )
        for wire in data_for(loss_fn)
    ]
    _assert_same(engine, alone, data, loss_fn)
    # Those of one datum do not touch the others, which have the config's.
    _assert_same(engine, alone, [data[0], *data_for(loss_fn)[1:]], loss_fn, clip_low_threshold=0.7)


@pytest.mark.parametrize("layout", [LayoutSettings(), LayoutSettings(40, share_prefix=True, pack=True)])
def test_cross_entropy_takes_several_targets_a_position(
    engine: TinyEngine, alone: Alone, layout: LayoutSettings
) -> None:
    before, engine.trainer.layout = engine.trainer.layout, layout
    mixed = [
        *data_for("cross_entropy", 1, 4),
        *data_for("cross_entropy", 2),
        *data_for("cross_entropy", 3, 1),
    ]
    for data in (data_for("cross_entropy", 0, 3), mixed):
        _assert_same(engine, alone, data, "cross_entropy")
    outputs, _ = output(_run(engine, policy_batch("p", mixed, "cross_entropy", {}, **LIMITS))[0])
    assert [o["logprobs"].shape for o in outputs] == [w.inputs["target_tokens"].shape for w in mixed]
    engine.trainer.layout = before


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_a_forward_pass_reports_the_same_and_leaves_no_gradient(engine: TinyEngine, loss_fn: str) -> None:
    targets = 2 if loss_fn == "cross_entropy" else None
    batch = policy_batch("p", data_for(loss_fn, 5, targets), loss_fn, {}, **LIMITS)
    result, _ = _run(engine, batch)
    logprobs = engine.trainer.forward("p", batch.datums)
    assert not engine.has_gradient("p")
    forward = forward_result(batch, logprobs)
    assert forward.loss == pytest.approx(result.loss, rel=1e-5)
    for a, b in zip(forward.logprobs, result.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_what_has_no_advantage_may_have_any_logprob(engine: TinyEngine) -> None:
    for loss_fn in ("importance_sampling", "ppo", "cispo"):
        plain = data_for(loss_fn)
        odd = []
        for index, wire in enumerate(plain):
            nothing = wire.inputs["advantages"] == 0
            logprobs = np.where(
                nothing, np.float32([-np.inf, np.nan, -1e30, 0, 3][index]), wire.inputs["logprobs"]
            )
            odd.append(WireDatum(wire.tokens_N, {**wire.inputs, "logprobs": logprobs}))
        one, other = (_run(engine, policy_batch("p", data, loss_fn, {}, **LIMITS)) for data in (plain, odd))
        assert one[0].loss == other[0].loss
        assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def test_ratios_beyond_what_floats_hold_stay_finite(engine: TinyEngine) -> None:
    for loss_fn in LOSSES[1:]:
        far = _with(data_for(loss_fn), logprobs=-1e6)
        result, gradients = _run(engine, policy_batch("p", far, loss_fn, {}, **LIMITS))
        assert np.isfinite(result.loss)
        assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


def test_company_changes_no_bit(engine: TinyEngine) -> None:
    """Losses and numbers of targets of all kinds in one pass."""
    batches = []
    for index, (loss_fn, targets) in enumerate(
        [("cross_entropy", 5), ("gspo", None), ("cross_entropy", None), ("ppo", None), ("cross_entropy", 2)]
    ):
        engine.random_policy(f"q{index}", seed=index, lora=LORA)
        batches.append(policy_batch(f"q{index}", data_for(loss_fn, index, targets), loss_fn, {}, **LIMITS))
    together = engine.trainer.forward_backward_all(batches)
    gradients = [engine.gradient(f"q{index}") for index in range(len(batches))]
    for index, batch in enumerate(batches):
        (single,) = engine.trainer.forward_backward_all([batch])
        with_others = together[index]
        assert isinstance(single, ForwardBackward)
        assert isinstance(with_others, ForwardBackward)
        assert single.loss == with_others.loss
        assert torch.equal(engine.gradient(f"q{index}"), gradients[index])
        for a, b in zip(single.logprobs, with_others.logprobs, strict=True):
            np.testing.assert_array_equal(a, b)


def _ppo_datum(**changes: object) -> list[WireDatum]:
    inputs = {
        "target_tokens": np.array([1, 2, 3]),
        "logprobs": np.float32([-1, -2, -3]),
        "advantages": np.float32([0, 1, -1]),
    }
    inputs |= changes
    return [WireDatum(np.array([0, 1, 2]), {n: a for n, a in inputs.items() if a is not None})]


@pytest.mark.parametrize(
    ("data", "loss_fn", "config", "says"),
    [
        (_ppo_datum(), "stable_reinforce", {}, "loss_fn: 'stable_reinforce'.*cross_entropy"),
        (_ppo_datum(), "custom", {"loss_id": "x"}, "loss_fn: 'custom'"),
        (_ppo_datum(), "", {}, "loss_fn: ''"),
        (_ppo_datum(), "ppo", {"beta": 1.0}, "loss_fn_config: 'beta'.*clip_low_threshold"),
        (_ppo_datum(), "importance_sampling", {"beta": 1.0}, "accepted by importance_sampling: none"),
        (_ppo_datum(), "ppo", {"clip_low_threshold": "low"}, "clip_low_threshold: 'low'"),
        (_ppo_datum(), "ppo", {"clip_low_threshold": float("nan")}, "clip_low_threshold: nan"),
        (_ppo_datum(), "ppo", {"clip_low_threshold": 2.0}, "clip_low_threshold: 2.0.*at most"),
        (_ppo_datum(), "dro", {"beta": float("inf")}, "beta: inf"),
        ([], "ppo", {}, "at least one datum"),
        (_ppo_datum(), "cross_entropy", {}, "weights is missing"),
        (_ppo_datum(), "gspo", {}, "sequence_ratio_mask is missing"),
        (_ppo_datum(mask=np.float32([1, 1, 1])), "ppo", {}, "'mask' is not accepted"),
        (_ppo_datum(logprobs=None), "ppo", {}, "logprobs is missing"),
        (_ppo_datum(target_tokens=np.array([1, 2])), "ppo", {}, r"shape \[2\].*\[3\]"),
        (_ppo_datum(target_tokens=np.array([[1], [2], [3]])), "ppo", {}, r"shape \[3, 1\]"),
        (_ppo_datum(target_tokens=np.float32([1, 2, 3])), "ppo", {}, "float32.*int64"),
        (_ppo_datum(target_tokens=np.array([1, 2, 99])), "ppo", {}, "token 99.*0 to 98"),
        (_ppo_datum(target_tokens=np.array([1, 2, -100])), "ppo", {}, "token -100"),
        (_ppo_datum(advantages=np.float32([1, 2])), "ppo", {}, r"advantages: shape \[2\]"),
        (_ppo_datum(advantages=np.float32([1, 2, np.nan])), "ppo", {}, "advantages: nan"),
        (_ppo_datum(logprobs=np.float32([0, 0, -np.inf])), "ppo", {}, r"logprobs\[2\]: -inf"),
        (_ppo_datum(logprobs=np.float32([-np.inf, 0, 0])), "dro", {}, r"logprobs\[0\]: -inf"),
        (_ppo_datum(clip_low_threshold=np.float32([0, 0, 2])), "ppo", {}, "at position 2"),
        (_ppo_datum(clip_high_threshold=np.float32([1, np.nan, 1])), "ppo", {}, "at position 1"),
        (_ppo_datum(clip_low_threshold=np.float32([0, 0, 0])), "dro", {}, "'clip_low_threshold'"),
        ([WireDatum(np.array([], np.int64), {})], "ppo", {}, "0 tokens"),
        ([WireDatum(np.zeros(257, np.int64), {})], "ppo", {}, "257 tokens.*256"),
        ([WireDatum(np.array([0, 100]), {})], "ppo", {}, "token 100"),
    ],
)
def test_what_does_not_fit_is_refused(
    data: list[WireDatum], loss_fn: str, config: dict[str, float | str], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        policy_batch("p", data, loss_fn, config, **LIMITS)
