"""Versions trained through the SDK, and what the model itself says of them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import tinker
import torch
from tinker import types

from opentinker_core.models.loading import load_model
from opentinker_core.models.source import resolve
from opentinker_core.sampling.protocol import SampledSequence, SampleRequest
from tests.service.live import Live

PROMPT = [21, 15, 21, 33]
"""`1+1=`"""


def trained(live: Live, name: str, tenant: str = "default", steps: int = 1) -> tinker.TrainingClient:
    """A training client whose policy is called `name` and differs from the base model by large steps."""
    client = live.client(tenant)
    training = client.create_lora_training_client(
        "tiny", rank=4, seed=7, user_metadata={"policy": name}
    ).result(60)
    for _ in range(steps):
        step(training)
    return training


def step(training: tinker.TrainingClient) -> None:
    """A step towards counting."""
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([20, 21, 22, 23]),
        loss_fn_inputs={
            "target_tokens": np.array([21, 22, 23, 24], np.int64),
            "weights": np.ones(4, np.float32),
        },
    )
    training.forward_backward([datum], "cross_entropy").result(60)
    training.optim_step(types.AdamParams(learning_rate=0.05)).result(60)


def direct(live: Live, request: SampleRequest, version: str | None = None) -> list[SampledSequence]:
    """What the sampler gives, asked without the service's API; `version` is a reference, None: the base."""
    sampler = live.service.engine("tiny", "direct").sampler
    if version is None:
        return sampler.sample([request])[0]
    found = live.service.catalog("default").version(version)
    sampler.refresh(found.ref, found.sampler.uri, found.sampler.digest)
    return sampler.sample([replace(request, version=found.ref)])[0]


def log_softmax(live: Live, tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """Logprobs (T, V) behind each of `tokens`, by transformers alone."""
    model = load_model(resolve("tiny", live.service.settings.home), "cpu", torch.float32)
    with torch.no_grad():
        logits_TV = model(torch.tensor([list(tokens)])).logits[0]
    return torch.log_softmax(logits_TV / temperature, dim=-1).numpy()
