"""Tenants that train at once get what each would get alone."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tinker
from tinker import types

from tests.service.live import Live

RANKS_AND_LOSSES = (
    (1, "cross_entropy"),
    (2, "importance_sampling"),
    (3, "ppo"),
    (4, "cispo"),
    (8, "dro"),
    (16, "gspo"),
    (5, "cross_entropy"),
    (32, "importance_sampling"),
)
STEPS = 4


def batch(tenant: int, step: int, loss: str) -> list[types.Datum]:
    draw = np.random.default_rng((tenant, step))
    data = []
    for _ in range(2):
        tokens = draw.integers(1, 99, size=int(draw.integers(4, 24)))
        count = len(tokens) - 1
        inputs: dict[str, np.ndarray] = {"target_tokens": tokens[1:].astype(np.int64)}
        if loss == "cross_entropy":
            inputs["weights"] = draw.normal(size=count).astype(np.float32)
        else:
            inputs["logprobs"] = draw.uniform(-6, -3, size=count).astype(np.float32)
            inputs["advantages"] = draw.normal(size=count).astype(np.float32)
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = np.ones(count, np.float32)
        data.append(
            types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)
        )
    return data


def trained(client: tinker.ServiceClient, tenant: int) -> list[float]:
    rank, loss = RANKS_AND_LOSSES[tenant]
    training = client.create_lora_training_client("tiny", rank=rank, seed=tenant).result(120)
    losses = []
    for step in range(STEPS):
        passed = training.forward_backward(batch(tenant, step, loss), loss)
        stepped = training.optim_step(types.AdamParams(learning_rate=3e-3))
        losses.append(passed.result(120).metrics["loss:sum"])
        losses.append(stepped.result(120).metrics["grad_norm"])
    return losses


def test_eight_tenants_with_other_ranks_and_losses_get_the_losses_of_their_solo_runs(live: Live) -> None:
    clients = [live.client(f"tenant-{tenant}") for tenant in range(len(RANKS_AND_LOSSES))]
    alone = [trained(client, tenant) for tenant, client in enumerate(clients)]
    with ThreadPoolExecutor(len(clients)) as pool:
        together = list(pool.map(trained, clients, range(len(clients))))
    assert np.allclose(together, alone, rtol=1e-5, atol=1e-6)
    statistics = live.service.engine("tiny", "default").statistics()
    sizes = statistics.kinds["forward_backward"].batch_sizes  # type: ignore[index]
    assert max(sizes) > 1, "some of it should have run together"
