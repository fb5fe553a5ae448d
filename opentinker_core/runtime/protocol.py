"""What a run needs of an engine, wherever it computes: RunTrainer, RunEngine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from opentinker_core.config.schema import LoRAConfig, OptimizerConfig
from opentinker_core.objectives.types import Objective
from opentinker_core.runtime.served_versions import ServedVersions
from opentinker_core.sampling.protocol import Sampler
from opentinker_core.training.trainer import ForwardBackward
from opentinker_core.trajectories.types import Datum


class RunTrainer(Protocol):
    """The trainer's primitives (see `training.Trainer`); each call waits for its result."""

    def create(self, policy: str, lora: LoRAConfig, seed: int) -> None:
        """Give `policy` a fresh state, replacing any it had."""
        ...

    def load_checkpoint(self, policy: str, directory: Path, *, with_optimizer: bool = True) -> None:
        """Give `policy` the state of a checkpoint directory, or only the weights, replacing any it had."""
        ...

    def save_checkpoint(self, policy: str, directory: Path) -> None:
        """Write weights, optimizer state, seed and step of `policy` below `directory`."""
        ...

    def publish_snapshot(self, policy: str, directory: Path) -> None:
        """Write the weights of `policy` below `directory` as a PEFT directory."""
        ...

    def forward(self, policy: str | None, datums: Sequence[Datum]) -> list[np.ndarray]:
        """Logprobs of each datum's targets, 0 where the mask is false; `policy` None: of the base model."""
        ...

    def forward_backward(
        self,
        policy: str,
        datums: Sequence[Datum],
        objective: Objective,
        scales: Sequence[np.ndarray],
        *,
        reference_logprobs: Sequence[np.ndarray] | None = None,
        old_logprobs: Sequence[np.ndarray] | None = None,
    ) -> ForwardBackward:
        """Add the gradient of the objective over all of `datums` to those `policy` has accumulated."""
        ...

    def optim_step(self, policy: str, config: OptimizerConfig) -> dict[str, float]:
        """One AdamW step of `policy` with its accumulated gradients, which are cleared."""
        ...


class RunEngine(Protocol):
    """A base model that trains and samples for a run."""

    @property
    def trainer(self) -> RunTrainer: ...

    @property
    def sampler(self) -> Sampler: ...

    @property
    def versions(self) -> ServedVersions:
        """What runs have in the sampler."""
        ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def max_context(self) -> int: ...

    @property
    def dtype(self) -> str:
        """`float32` or `bfloat16`."""
        ...

    @property
    def attempt(self) -> str:
        """What tells the snapshots of two attempts at one step apart; empty where they have the same bits."""
        ...

    def forget(self, snapshot_uri: str, digest: str) -> None:
        """Say that a checkpoint is about to be deleted, for engines that have one of their own."""
        ...

    def check_targets(self, lora: LoRAConfig) -> None:
        """Raise UsageError if a LoRA config does not fit the base model."""
        ...
