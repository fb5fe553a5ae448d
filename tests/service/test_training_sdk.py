"""The official SDK trains, saves and loads against a live server."""

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.service.live import Live

TOKENS = [1, 5, 9, 13, 17, 21]


def datum(tokens: list[int] = TOKENS, weight: float = 1.0) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], np.int64),
            "weights": np.full(len(tokens) - 1, weight, np.float32),
        },
    )


def loss(training: tinker.TrainingClient, step: bool = True) -> float:
    result = training.forward_backward([datum()], "cross_entropy")
    if step:
        training.optim_step(types.AdamParams(learning_rate=1e-2))
    return float(result.result(60).metrics["loss:sum"])


@pytest.fixture(scope="module")
def client(live: Live) -> tinker.ServiceClient:
    return live.client()


@pytest.fixture
def training(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client("tiny", rank=4, seed=7).result(60)


def test_training_lowers_the_loss_and_sums_over_tokens(training: tinker.TrainingClient) -> None:
    losses = [loss(training) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert 3 * 5 < losses[0] < 6 * 5  # about ln 99 a token


def test_info_tells_the_model(training: tinker.TrainingClient) -> None:
    info = training.get_info()
    assert info.model_data.model_name == "tiny"
    assert (info.is_lora, info.lora_rank) == (True, 4)
    assert training.get_tokenizer().decode(TOKENS)


def test_a_saved_state_is_gone_on_from_to_the_same_losses(
    client: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    for _ in range(3):
        loss(training)
    path = training.save_state("three").result(60).path
    assert path == f"tinker://{training.model_id}/weights/three"
    expected = [loss(training) for _ in range(3)]

    resumed = client.create_training_client_from_state_with_optimizer(path).result(60)
    assert [loss(resumed) for _ in range(3)] == expected
    assert resumed.get_info().lora_rank == 4

    training.load_state_with_optimizer(path).result(60)
    assert [loss(training) for _ in range(3)] == expected

    fresh = client.create_training_client_from_state(path).result(60)
    again = [loss(fresh) for _ in range(3)]
    assert again[0] == expected[0]
    assert again[1:] != expected[1:], "the optimizer should have begun afresh"


def test_sampler_weights_have_a_path_or_a_sampler_of_their_own(
    live: Live, training: tinker.TrainingClient
) -> None:
    loss(training)
    named = training.save_weights_for_sampler("first").result(60)
    assert named.path == f"tinker://{training.model_id}/sampler_weights/first"
    ephemeral = training.save_weights_and_get_sampling_client().result(60)
    model = live.service.records.model("default", training.model_id)
    versions = live.service.catalog("default").versions(model.policy_name)
    assert [(one.step, one.checkpoint) for one in versions] == [(1, None)], "one version a step"
    handles = live.service.records.samplers("default", model.session_id)
    assert handles[-1].version == versions[0]
    assert ephemeral is not None


def test_a_name_is_used_once_unless_it_is_to_be_overwritten(training: tinker.TrainingClient) -> None:
    training.save_state("mine").result(60)
    loss(training)
    with pytest.raises(tinker.RequestFailedError, match="exists already") as failed:
        training.save_state("mine").result(60)
    assert failed.value.category == "user"
    training.save_state("mine", overwrite=True).result(60)
    assert loss(training) > 0


def test_what_is_wrong_is_refused_at_once_and_does_not_stop_what_follows(
    training: tinker.TrainingClient,
) -> None:
    with pytest.raises(tinker.APIStatusError, match="path"):
        training.save_state("../../etc").result(60)
    with pytest.raises(tinker.APIStatusError, match="ttl_seconds"):
        training.save_state("short", ttl_seconds=5).result(60)
    with pytest.raises(tinker.APIStatusError, match="learning_rate"):
        training.optim_step(types.AdamParams(learning_rate=-1.0)).result(60)
    assert loss(training) > 0


def test_a_model_that_is_not_served_is_named(client: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.NotFoundError, match=r"huge.*accepted: tiny"):
        client.create_lora_training_client("huge").result(60)


def test_a_batch_that_the_sdk_cuts_into_chunks_is_one_batch(training: tinker.TrainingClient) -> None:
    data = [datum([1 + i % 50, 2 + i % 40, 3 + i % 30], weight=0.25) for i in range(1500)]
    result = training.forward_backward(data, "cross_entropy").result(120)
    norm = training.optim_step(types.AdamParams(learning_rate=0.0)).result(60).metrics["grad_norm"]
    assert len(result.loss_fn_outputs) == 1500
    halves = []
    for part in (data[:700], data[700:]):
        halves.append(training.forward_backward(part, "cross_entropy").result(120))
    again = training.optim_step(types.AdamParams(learning_rate=0.0)).result(60).metrics["grad_norm"]
    assert again == pytest.approx(norm, rel=1e-5)
    rows = [row["logprobs"].data for half in halves for row in half.loss_fn_outputs]
    assert np.allclose(rows, [row["logprobs"].data for row in result.loss_fn_outputs], atol=1e-6)
    assert result.metrics["loss:sum"] == pytest.approx(sum(h.metrics["loss:sum"] for h in halves), rel=1e-5)


def test_a_custom_loss_has_the_gradient_of_the_same_loss_by_name(training: tinker.TrainingClient) -> None:
    def likelihood(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict]:
        return -torch.cat(logprobs).sum(), {"tokens": float(sum(map(len, logprobs)))}

    still = types.AdamParams(learning_rate=0.0)
    named = training.forward_backward([datum(), datum(TOKENS[::-1])], "cross_entropy").result(60)
    norm = training.optim_step(still).result(60).metrics["grad_norm"]
    bare = [datum(), datum(TOKENS[::-1])]
    for one in bare:
        del one.loss_fn_inputs["weights"]
    custom = training.forward_backward_custom(bare, likelihood)
    step = training.optim_step(still)  # is submitted while the client computes its loss
    assert custom.result(60).metrics["tokens"] == 10
    assert step.result(60).metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert named.metrics["loss:sum"] > 0


def test_forward_gives_logprobs_and_no_gradient(training: tinker.TrainingClient) -> None:
    trained = training.forward_backward([datum()], "cross_entropy").result(60)
    training.optim_step(types.AdamParams(learning_rate=0.0)).result(60)
    looked = training.forward([datum()], "cross_entropy").result(60)
    assert looked.metrics["loss:sum"] == pytest.approx(trained.metrics["loss:sum"], abs=1e-5)
    assert np.allclose(
        looked.loss_fn_outputs[0]["logprobs"].data, trained.loss_fn_outputs[0]["logprobs"].data, atol=1e-6
    )
    step = training.optim_step(types.AdamParams(learning_rate=0.0)).result(60)
    assert step.metrics["grad_norm"] == 0


def test_the_seed_and_the_layers_are_as_asked_for(live: Live, client: tinker.ServiceClient) -> None:
    def trained(**asked: object) -> tuple[list[float], tuple[str, ...]]:
        training = client.create_lora_training_client("tiny", rank=4, **asked).result(60)
        losses = [loss(training) for _ in range(3)]
        policy = live.service.records.model("default", training.model_id).policy_name
        targets = live.service.catalog("default").policy(policy).lora.target_modules
        return losses, tuple(targets)

    attention = ("k_proj", "o_proj", "q_proj", "v_proj")
    first, targets = trained(seed=1, train_mlp=False, train_unembed=False)
    assert targets == attention
    again, _ = trained(seed=1, train_mlp=False, train_unembed=False)
    other, _ = trained(seed=2, train_mlp=False, train_unembed=False)
    assert first == again
    assert first[1:] != other[1:]
    _, targets = trained(seed=1, train_attn=False, train_mlp=False)
    assert targets == ("lm_head",)
