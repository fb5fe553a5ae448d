"""Policies as unlike each other as they can be, with data of their own: what isolation is measured on.

Axes: N positions of a datum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from opentinker_core.config.schema import LoRAConfig, Normalizer, ObjectiveConfig, OptimizerConfig
from opentinker_core.lora.layout import ModelLayout
from opentinker_core.objectives.compose import rl_objective
from opentinker_core.objectives.cross_entropy import cross_entropy
from opentinker_core.objectives.normalizers import token_scales
from opentinker_core.seeds import derive_seed
from opentinker_core.training.trainer import PolicyBatch
from opentinker_core.trajectories.types import Datum

BaseLogprobs = Callable[[Sequence[Datum]], list[np.ndarray]]
"""Of each datum, float32 (N,): the base model's logprob of each target."""

_SPREAD = 0.1
"""Standard deviation of the sampler's logprobs around the base model's, so that no ratio is 1."""


@dataclass(frozen=True)
class Data:
    """How a participant's datums are drawn: groups with a common prompt, of random tokens."""

    seed: int
    groups: int = 2
    group_size: int = 2
    prompt: int = 12
    """Longest prompt."""
    completion: int = 20
    """Longest completion."""


@dataclass(frozen=True)
class Participant:
    """A policy that trains beside others."""

    name: str
    lora: LoRAConfig
    optimizer: OptimizerConfig
    objective: ObjectiveConfig | None
    """None: cross entropy."""
    data: Data
    normalizer: Normalizer = Normalizer.TOKENS
    temperature: float = 1.0
    top_k: int = 0
    active_steps: int | None = None
    """It idles after this many steps; None: never."""

    @property
    def objective_name(self) -> str:
        return self.objective.name if self.objective else "cross_entropy"

    def batch(self, step: int, vocabulary: int, base_logprobs: BaseLogprobs) -> PolicyBatch:
        """What it trains on at a step; depends on nothing but its own fields and the arguments."""
        generator = np.random.default_rng(derive_seed(self.data.seed, "isolation", self.name, step))
        datums = self._datums(generator, vocabulary)
        if self.objective is not None:
            datums = _with_advantages(datums, base_logprobs(datums), generator)
        return PolicyBatch(
            self.name,
            datums,
            rl_objective(self.objective) if self.objective else cross_entropy,
            token_scales(self.normalizer, datums, self.data.completion),
            base_logprobs(datums) if self.objective and self.objective.kl_coefficient else None,
        )

    def _datums(self, generator: np.random.Generator, vocabulary: int) -> list[Datum]:
        datums = []
        for group in range(self.data.groups):
            prompt = generator.integers(vocabulary, size=generator.integers(1, self.data.prompt + 1))
            for member in range(self.data.group_size):
                length = generator.integers(1, self.data.completion + 1)
                tokens = np.concatenate([prompt, generator.integers(vocabulary, size=length)])
                mask_N = np.arange(1, len(tokens)) >= len(prompt)
                weights_N = np.where(mask_N, generator.uniform(0.5, 1.5, len(mask_N)), 0)
                datums.append(
                    Datum(
                        tokens[:-1],
                        tokens[1:],
                        mask_N,
                        weights_N=weights_N.astype(np.float32),
                        trajectory_id=f"{group}-{member}",
                        temperature=self.temperature,
                        top_k=self.top_k,
                    )
                )
        return datums


def _with_advantages(
    datums: Sequence[Datum], logprobs: Sequence[np.ndarray], generator: np.random.Generator
) -> list[Datum]:
    """The datums as rollouts of a sampler that is near the base model, with random advantages."""
    rollouts = []
    for datum, logprobs_N in zip(datums, logprobs, strict=True):
        noise_N = _SPREAD * generator.standard_normal(len(datum))
        sampler_N = np.where(datum.mask_N, np.minimum(logprobs_N + noise_N, 0), 0).astype(np.float32)
        advantages_N = np.where(datum.mask_N, generator.normal(1.0, 0.7), 0).astype(np.float32)
        rollouts.append(
            replace(datum, weights_N=None, advantages_N=advantages_N, sampler_logprobs_N=sampler_N)
        )
    return rollouts


def participants(count: int, model: ModelLayout, seed: int = 0) -> list[Participant]:
    """`count` policies: ranks 1 to 64, other targets, alphas, optimizers, objectives and temperatures."""
    leaves = {name.rpartition(".")[2] for name in model.shapes}
    found = []
    for index in range(count):
        kind = _KINDS[index % len(_KINDS)]
        present = [target for target in kind.lora.target_modules if target in leaves]
        lora = kind.lora.model_copy(update={"target_modules": tuple(present) or "all-linear"})
        found.append(replace(kind, name=f"{kind.name}-{index + 1}", lora=lora, data=Data(seed + index)))
    return found


def _kind(
    rank: int,
    alpha: float,
    targets: str,
    optimizer: OptimizerConfig,
    objective: ObjectiveConfig | None = None,
    normalizer: Normalizer = Normalizer.TOKENS,
    temperature: float = 1.0,
    top_k: int = 0,
    use_rslora: bool = False,
) -> Participant:
    """`targets`: the last parts of module names; none: all linears of the blocks."""
    lora = LoRAConfig(
        rank=rank,
        alpha=alpha,
        target_modules=tuple(targets.split()) or "all-linear",
        use_rslora=use_rslora,
    )
    return Participant(f"rank{rank}", lora, optimizer, objective, Data(0), normalizer, temperature, top_k)


_KINDS = (
    _kind(1, 2, "", OptimizerConfig(learning_rate=1e-2)),
    _kind(
        2,
        1,
        "q_proj v_proj",
        OptimizerConfig(learning_rate=5e-3, beta2=0.99, weight_decay=0.1),
        ObjectiveConfig(name="ppo"),
    ),
    _kind(
        4,
        8,
        "lm_head",
        OptimizerConfig(learning_rate=2e-3, grad_clip_norm=0),
        ObjectiveConfig(name="importance_sampling"),
        Normalizer.SEQUENCES,
    ),
    _kind(
        8,
        16,
        "gate_proj up_proj down_proj",
        OptimizerConfig(learning_rate=1e-3, weight_decay=0.01, eps=1e-6),
        normalizer=Normalizer.SEQUENCES,
    ),
    _kind(
        16,
        8,
        "k_proj o_proj lm_head",
        OptimizerConfig(learning_rate=1e-3, beta1=0.8, grad_clip_norm=0.1),
        ObjectiveConfig(name="ppo", kl_coefficient=0.1),
        temperature=0.7,
    ),
    _kind(32, 32, "", OptimizerConfig(learning_rate=2e-4, beta2=0.95), normalizer=Normalizer.CONSTANT),
    _kind(
        64,
        16,
        "down_proj",
        OptimizerConfig(learning_rate=5e-4, weight_decay=0.5),
        ObjectiveConfig(name="importance_sampling", kl_coefficient=0.01),
        Normalizer.CONSTANT,
        top_k=20,
        use_rslora=True,
    ),
    _kind(
        3,
        6,
        "q_proj k_proj v_proj o_proj",
        OptimizerConfig(learning_rate=3e-3, eps=1e-5, grad_clip_norm=0.5),
        ObjectiveConfig(name="ppo", clip_low=0.1, clip_high=0.1),
        Normalizer.NONE,
    ),
)
