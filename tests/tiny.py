"""A trainer and a sampler around the tiny model, for tests that need no catalog."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.lora.layer import install
from opentinker_core.lora.pool import AdapterPool, Wanted
from opentinker_core.lora.routing import Routing, Rows, routed
from opentinker_core.models.decoder import Decoder
from opentinker_core.models.loading import load_model, load_tokenizer
from opentinker_core.models.source import resolve
from opentinker_core.sampling.native import NativeSampler
from opentinker_core.sampling.protocol import SampledSequence, SampleRequest, SamplingParams
from opentinker_core.training.state import PolicyState
from opentinker_core.training.trainer import Trainer
from opentinker_core.trajectories.datums import to_datum
from opentinker_core.trajectories.fsm import TrajectoryBuilder
from opentinker_core.trajectories.types import Datum, EndReason

LORA = LoRAConfig(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj", "down_proj", "lm_head"))


@dataclass
class TinyEngine:
    """The tiny model with what computes on it; snapshots are plain directories here."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    pool: AdapterPool
    trainer: Trainer
    sampler: NativeSampler
    scratch: Path
    published: int = field(default=0)

    @classmethod
    def open(cls, home: Path, scratch: Path) -> "TinyEngine":
        torch.set_num_threads(1)
        source = resolve("tiny", home)
        model = load_model(source, "cpu", torch.float32)
        pool = AdapterPool(install(model), "cpu", torch.float32)
        decoder = Decoder.of(model)
        trainer = Trainer(decoder, pool, source.name)
        tokenizer = load_tokenizer(source)
        sampler = NativeSampler(decoder, pool, tokenizer, lambda uri, _: Path(uri), trainer.read_adapter)
        return cls(model, tokenizer, pool, trainer, sampler, scratch)

    def random_policy(self, policy: str, seed: int = 0, lora: LoRAConfig = LORA) -> None:
        """A policy whose adapter changes the model (a fresh one would not)."""
        self.trainer.create(policy, lora, seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, parameter in self.state(policy).adapter.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))

    def state(self, policy: str) -> PolicyState:
        """The trainer's state of `policy`."""
        return self.trainer.state_of(policy)

    @contextmanager
    def applied(self, policy: str, rows: int) -> Iterator[None]:
        """Run forward passes of `rows` tokens with the adapter of `policy`."""
        state = self.state(policy)
        wanted = {policy: Wanted(state.adapter, state.revision)}
        with self.pool.lease(wanted) as slots, routed(Routing(self.pool, [Rows(rows, slots[policy])])):
            yield

    def publish(self, policy: str) -> str:
        """Write a snapshot of `policy`, refresh the sampler with it, and return the version."""
        self.published += 1
        directory = self.scratch / f"v{self.published}"
        self.trainer.publish_snapshot(policy, directory)
        version = f"{policy}@{self.published}"
        self.sampler.refresh(version, str(directory), f"digest-{self.published}")
        return version

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def gradient(self, policy: str) -> torch.Tensor:
        """All accumulated gradients of `policy`, flat; they are cleared."""
        state = self.state(policy)
        assert state.gradient is not None
        gradient_P, state.gradient = state.gradient.row_P, None
        return gradient_P

    def has_gradient(self, policy: str) -> bool:
        return self.state(policy).gradient is not None

    def weights(self, policy: str) -> torch.Tensor:
        return self.state(policy).adapter.row_P.clone()


def requests(
    engine: TinyEngine, version: str, params: SamplingParams, samples: int = 4
) -> list[SampleRequest]:
    """Requests with prompts of different lengths."""
    prompts = ["1+1=", "12+34=", "7*8+9-1="]
    return [
        SampleRequest(engine.ids(prompt), params, version, tuple(range(100 * i, 100 * i + samples)))
        for i, prompt in enumerate(prompts)
    ]


def rl_datums(
    asked: Sequence[SampleRequest], answers: Sequence[Sequence[SampledSequence]], seed: int = 0
) -> list[Datum]:
    """One datum a completion, with random advantages and the request's sampling processing."""
    generator = np.random.default_rng(seed)
    datums = []
    for group, (request, sequences) in enumerate(zip(asked, answers, strict=True)):
        for member, sequence in enumerate(sequences):
            builder = TrajectoryBuilder(
                trajectory_id=f"g{group}-m{member}", agent="agent", environment="test", seed=0, group=group
            )
            builder.observed(request.prompt_tokens)
            builder.generated(sequence.tokens, sequence.logprobs, sequence.version, sequence.stop_reason)
            datums.append(
                to_datum(
                    builder.terminate(EndReason.DONE),
                    advantages=float(generator.normal()),
                    temperature=request.params.temperature,
                    top_p=request.params.top_p,
                    top_k=request.params.top_k,
                    min_p=request.params.min_p,
                )
            )
    return datums
