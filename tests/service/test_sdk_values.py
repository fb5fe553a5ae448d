"""What the official SDK gets from a live server is what PEFT and torch compute of the same weights, to 1e-5.

A policy with trained weights is downloaded as a PEFT directory. Each test starts from it, on the server and
in PEFT: the losses are formulas in plain torch, the gradients autograd's, the steps torch's own AdamW. A
gradient is seen by what a step does to the downloaded weights; with a large `eps` the step is the gradient,
scaled, so that no element's precision is hidden by Adam's normalization.
"""

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tinker import types
from torch import Tensor

from opentinker_core.service.tinker.wire import WireDatum
from tests.service.live import Live
from tests.service.policies import PROMPT
from tests.service.tinker.formulas import FORMULAS, Alone, data_for

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # some of the SDK's methods are deprecated

CLOSE = 1e-5
PLAIN = {"learning_rate": 100.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e4}
"""A step along the gradient: it changes the weights by a hundredth of it."""


class Policy:
    """A policy on the server, and how it began."""

    def __init__(self, live: Live, folder: Path) -> None:
        self.live, self.folder, self.key = live, folder, live.key()
        self.training = live.client().create_lora_training_client("tiny", rank=4, seed=7).result(60)
        for seed in range(3):  # a fresh adapter computes nothing, and half of its gradient is 0
            self.training.forward_backward(datums(data_for("cross_entropy", seed)), "cross_entropy")
            self.training.optim_step(types.AdamParams(learning_rate=1e-2)).result(60)
        self.state = self.training.save_state("start").result(60).path
        self.start = self.download(self.training.save_weights_for_sampler("start").result(60).path)
        self._saved = 0

    def download(self, path: str) -> Path:
        """The PEFT directory at a `tinker://` path."""
        run, _, name = path.removeprefix("tinker://").split("/")
        url = f"{self.live.url}/api/v1/training_runs/{run}/checkpoints/sampler_weights/{name}/archive"
        answer = httpx.get(url, headers={"X-API-Key": self.key}, timeout=60)
        assert answer.status_code == 200, answer.text
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
            archive.extractall(self.folder / name, filter="data")
        return self.folder / name

    def restart(self) -> Alone:
        """Go back to the start on the server, with a fresh optimizer; gives the same in PEFT."""
        self.training.load_state(self.state).result(60)
        return Alone(self.live.service.settings.home, self.start)

    def save(self) -> str:
        """Save what the policy is now, for a sampler."""
        self._saved += 1
        return self.training.save_weights_for_sampler(f"after-{self._saved}").result(60).path


@pytest.fixture(scope="module")
def policy(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(live, tmp_path_factory.mktemp("peft"))


def datums(data: Sequence[WireDatum]) -> list[types.Datum]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(wire.tokens_N.tolist()), loss_fn_inputs=dict(wire.inputs)
        )
        for wire in data
    ]


def spread(loss_fn: str) -> list[WireDatum]:
    """Data whose ratios lie on both sides of all default bounds."""
    data = data_for(loss_fn)
    for wire in data:
        if "logprobs" in wire.inputs:
            wire.inputs["logprobs"][:] = 1.5 * wire.inputs["logprobs"] - 0.5
    return data


def adamw(alone: Alone, weight_decay: float = 0.0, **params: float) -> torch.optim.Optimizer:
    """Torch's own, by the SDK's names of its parameters."""
    betas = params["beta1"], params["beta2"]
    return torch.optim.AdamW(
        alone.parameters.values(),
        lr=params["learning_rate"],
        betas=betas,
        eps=params["eps"],
        weight_decay=weight_decay,
    )


def assert_same_logprobs(
    alone: Alone, data: Sequence[WireDatum], result: types.ForwardBackwardOutput
) -> None:
    assert len(result.loss_fn_outputs) == len(data)
    for wire, output in zip(data, result.loss_fn_outputs, strict=True):
        targets = wire.inputs["target_tokens"]
        with torch.no_grad():
            expected = alone.logprobs(wire.tokens_N, targets).numpy()
        given = output["logprobs"].to_numpy()
        assert given.shape == targets.shape
        np.testing.assert_allclose(given, expected, rtol=CLOSE, atol=CLOSE)


def assert_same_change(policy: Policy, alone: Alone, path: str) -> None:
    """What was done to the weights since the start is the same."""
    before, after = (
        load_file(one / "adapter_model.safetensors") for one in (policy.start, policy.download(path))
    )
    assert before.keys() == alone.parameters.keys()
    ours = torch.cat([(after[name] - before[name]).flatten() for name in before])
    theirs = torch.cat([(alone.parameters[name].detach() - before[name]).flatten() for name in before])
    assert theirs.norm() > 1e-3
    assert (ours - theirs).norm() <= CLOSE * theirs.norm()


def assert_same_samples(policy: Policy, alone: Alone, path: str) -> None:
    """A sampler of these weights scores a prompt, and what it draws, as PEFT does."""
    sampler = policy.training.create_sampling_client(path).result(60)
    shape = types.SamplingParams(max_tokens=6, seed=3, stop=[])
    (sequence,) = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, shape).result(60).sequences
    tokens = np.array([*PROMPT, *sequence.tokens])
    with torch.no_grad():
        expected = alone.logprobs(tokens[:-1], tokens[1:]).numpy()
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens.tolist())).result(60)
    assert scored[0] is None
    np.testing.assert_allclose(scored[1:], expected, rtol=CLOSE, atol=CLOSE)
    np.testing.assert_allclose(sequence.logprobs_np, expected[len(PROMPT) - 1 :], rtol=CLOSE, atol=CLOSE)


def check(
    policy: Policy, data: list[WireDatum], loss_fn: str, config: Mapping[str, float] | None = None
) -> None:
    """Loss, logprobs and gradient of a loss, and what a sampler has of its step."""
    alone, sent = policy.restart(), datums(data)
    looked = policy.training.forward(sent, loss_fn, config)  # type: ignore[arg-type]
    result = policy.training.forward_backward(sent, loss_fn, config).result(60)  # type: ignore[arg-type]
    stepped = policy.training.optim_step(types.AdamParams(**PLAIN))
    loss, gradients = alone.loss_and_gradients(data, FORMULAS[loss_fn], config or {})
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=CLOSE, abs=CLOSE)
    assert looked.result(60).metrics["loss:sum"] == pytest.approx(loss, rel=CLOSE, abs=CLOSE)
    assert_same_logprobs(alone, data, result)
    assert_same_logprobs(alone, data, looked.result(60))
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
    assert stepped.result(60).metrics is not None
    assert (stepped.result(60).metrics or {})["grad_norm"] == pytest.approx(norm, rel=CLOSE)
    adamw(alone, **PLAIN).step()
    path = policy.save()
    assert_same_change(policy, alone, path)
    assert_same_samples(policy, alone, path)


@pytest.mark.parametrize("loss_fn", FORMULAS)
def test_each_loss(policy: Policy, loss_fn: str) -> None:
    check(policy, spread(loss_fn), loss_fn)


@pytest.mark.parametrize(
    ("loss_fn", "config"),
    [
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}),
        ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("gspo", {"clip_low_threshold": 0.01, "clip_high_threshold": 1.01}),
        ("dro", {"beta": 1.5}),
    ],
)
def test_their_config(policy: Policy, loss_fn: str, config: dict[str, float]) -> None:
    check(policy, spread(loss_fn), loss_fn, config)


def test_bounds_of_single_tokens(policy: Policy) -> None:
    data = []
    for wire in data_for("ppo"):
        low, high = (
            np.linspace(*ends, len(wire.tokens_N), dtype=np.float32) for ends in ((0.1, 0.9), (1, 5))
        )
        bounds = {"clip_low_threshold": low, "clip_high_threshold": high}
        data.append(WireDatum(wire.tokens_N, {**wire.inputs, **bounds}))
    check(policy, data, "ppo")


def test_several_targets_a_position(policy: Policy) -> None:
    """With weights of both signs, of which some are 0: so the SDK may send the arrays as sparse ones."""
    check(policy, [*data_for("cross_entropy", 0, 3), *data_for("cross_entropy", 2)], "cross_entropy")


def test_sparse_targets(policy: Policy) -> None:
    dense = data_for("cross_entropy", 4, 6)
    for wire in dense:
        none = np.random.default_rng(5).random(wire.inputs["weights"].shape) < 0.8
        wire.inputs["weights"][none] = 0
        wire.inputs["target_tokens"][none] = 0
    alone = policy.restart()
    sent = [
        types.Datum(
            model_input=types.ModelInput.from_ints(wire.tokens_N.tolist()),
            loss_fn_inputs={name: torch.tensor(array) for name, array in wire.inputs.items()},
        )
        for wire in dense
    ]
    assert any(one.loss_fn_inputs["weights"].sparse_crow_indices for one in sent)
    result = policy.training.forward_backward(sent, "cross_entropy").result(60)
    policy.training.optim_step(types.AdamParams(**PLAIN)).result(60)
    loss, _ = alone.loss_and_gradients(dense, FORMULAS["cross_entropy"], {})
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=CLOSE, abs=CLOSE)
    assert_same_logprobs(alone, dense, result)
    adamw(alone, **PLAIN).step()
    assert_same_change(policy, alone, policy.save())


def preference(logprobs: Sequence[Tensor]) -> Tensor:
    """A loss of pairs, as DPO's: no sum over tokens, and no loss of a single datum."""
    pairs = zip(logprobs[::2], logprobs[1::2], strict=True)
    return -torch.stack([torch.nn.functional.logsigmoid(0.3 * (a.sum() - b.sum())) for a, b in pairs]).mean()


@pytest.mark.parametrize("targets", [None, 3])
def test_a_custom_loss(policy: Policy, targets: int | None) -> None:
    def custom(_: list[types.Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        return preference(logprobs), {"pairs": len(logprobs) / 2}

    data = data_for("cross_entropy", 6, targets)[:4]
    for wire in data:
        del wire.inputs["weights"]  # type: ignore[attr-defined]
    alone = policy.restart()
    result = policy.training.forward_backward_custom(datums(data), custom)
    policy.training.optim_step(types.AdamParams(**PLAIN))
    loss = preference([alone.logprobs(wire.tokens_N, wire.inputs["target_tokens"]) for wire in data])
    assert result.result(60).metrics["loss:sum"] == pytest.approx(loss.item(), rel=CLOSE, abs=CLOSE)
    assert result.result(60).metrics["pairs"] == 2
    assert_same_logprobs(alone, data, result.result(60))
    loss.backward()
    adamw(alone, **PLAIN).step()
    path = policy.save()
    assert_same_change(policy, alone, path)
    assert_same_samples(policy, alone, path)


def test_gradients_of_several_losses_add_up_until_the_step(policy: Policy) -> None:
    alone, losses = policy.restart(), ("ppo", "cross_entropy", "dro")
    for loss_fn in losses:
        policy.training.forward_backward(datums(data_for(loss_fn, 8)), loss_fn)  # type: ignore[arg-type]
    policy.training.optim_step(types.AdamParams(**PLAIN)).result(60)
    torch.stack([alone.loss(data_for(one, 8), FORMULAS[one], {}) for one in losses]).sum().backward()
    adamw(alone, **PLAIN).step()
    assert_same_change(policy, alone, policy.save())


@pytest.mark.parametrize(
    "params",
    [
        {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-1},
        {"learning_rate": 3e-3, "beta1": 0.5, "beta2": 0.99, "eps": 1e-2, "weight_decay": 0.1},
        {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "grad_clip_norm": 0.5},
    ],
    ids=["moments", "decay", "clip"],
)
def test_three_steps_are_adamws(policy: Policy, params: dict[str, float]) -> None:
    alone = policy.restart()
    own = {name: value for name, value in params.items() if name != "grad_clip_norm"}
    optimizer = adamw(alone, **own)
    for seed in range(3):
        data = data_for("cross_entropy", seed)
        result = policy.training.forward_backward(datums(data), "cross_entropy")
        policy.training.optim_step(types.AdamParams(**params))
        loss, _ = alone.loss_and_gradients(data, FORMULAS["cross_entropy"], {})
        assert result.result(60).metrics["loss:sum"] == pytest.approx(loss, rel=CLOSE, abs=CLOSE)
        if "grad_clip_norm" in params:
            norm = torch.nn.utils.clip_grad_norm_(alone.parameters.values(), params["grad_clip_norm"])
            assert norm > params["grad_clip_norm"]
        optimizer.step()
    path = policy.save()
    assert_same_change(policy, alone, path)
    assert_same_samples(policy, alone, path)
