"""The mutable state of a policy: flat rows of weights, gradient and AdamW moments; and its checkpoint format.

A checkpoint is a directory of safetensors and JSON: the adapter as a PEFT directory beside
`optimizer.safetensors` (moments by factor name) and `state.json` (step, seed, format). Every
random draw of a run derives from the seed and the step, so these two are its RNG state.

Axes: P all weights of the adapter.
"""

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim.adamw import adamw

from opentinker_core.config.schema import LoRAConfig, OptimizerConfig
from opentinker_core.errors import OpenTinkerError
from opentinker_core.lora.adapter import Adapter, fresh_adapter
from opentinker_core.lora.layout import ModelLayout
from opentinker_core.lora.peft_format import read_peft, write_peft

_FORMAT = 2
_OPTIMIZER, _GRADIENT = "optimizer.safetensors", "gradient.safetensors"
_revisions = itertools.count()


@dataclass(eq=False)
class Moments:
    """AdamW's running means of the gradient and of its square, float32 (P,), and their number of updates."""

    exp_avg_P: Tensor
    exp_avg_sq_P: Tensor
    updates: Tensor
    """float32 scalar on the CPU, as AdamW wants it."""

    @classmethod
    def zeros(cls, like_P: Tensor) -> "Moments":
        return cls(torch.zeros_like(like_P), torch.zeros_like(like_P), torch.tensor(0.0))


@dataclass(eq=False)
class PolicyState:
    """Everything of a policy that training changes; nothing is shared with another policy's."""

    adapter: Adapter
    step: int
    """Optimizer steps taken."""
    seed: int
    moments: Moments | None = None
    """None: no step was taken yet."""
    gradient: Adapter | None = None
    """Accumulated since the last step, laid out like the adapter."""
    revision: int = field(default_factory=lambda: next(_revisions))
    """Changes whenever the weights do; unique in this process."""

    @classmethod
    def fresh(cls, lora: LoRAConfig, model: ModelLayout, seed: int, device: torch.device) -> "PolicyState":
        """The state of a policy that equals the base model.

        Raises:
            UsageError: a LoRA target matches no layer.
        """
        return cls(fresh_adapter(lora, model, seed, device), 0, seed)

    @property
    def nbytes(self) -> int:
        """Bytes of all its rows."""
        rows = 1 + (self.gradient is not None) + 2 * (self.moments is not None)
        return rows * self.adapter.nbytes

    def accumulate(self, gradient: Adapter) -> None:
        """Add a gradient, which becomes the state's own."""
        if self.gradient is None:
            self.gradient = gradient
        else:
            self.gradient.row_P.add_(gradient.row_P)

    @torch.no_grad()
    def apply_gradients(self, config: OptimizerConfig) -> float:
        """Clip the accumulated gradient, take one AdamW step with `config`, clear it.

        Returns:
            The gradient norm before clipping.

        Raises:
            OpenTinkerError: the gradient, or the weights after the step, are not finite. The state is
                spoilt then and must be loaded again; nothing of it may be published.
        """
        gradient_P = self._gradient()
        norm = torch.linalg.vector_norm(gradient_P)
        if not bool(norm.isfinite()):
            raise OpenTinkerError(f"training diverged: the gradient norm is {float(norm)}")
        if config.grad_clip_norm and norm > config.grad_clip_norm:
            gradient_P.mul_(config.grad_clip_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        self._adamw(gradient_P, config)
        self.gradient = None
        self.revision = next(_revisions)
        self.step += 1
        if not bool(torch.linalg.vector_norm(self.adapter.row_P).isfinite()):
            raise OpenTinkerError(
                f"training diverged: weights are not finite after a step with learning rate "
                f"{config.learning_rate}"
            )
        return float(norm)

    def _gradient(self) -> Tensor:
        if self.gradient is None:
            return torch.zeros_like(self.adapter.row_P)
        return self.gradient.row_P

    def _adamw(self, gradient_P: Tensor, config: OptimizerConfig) -> None:
        weights_P = self.adapter.row_P
        moments = self.moments = self.moments or Moments.zeros(weights_P)
        adamw(
            [weights_P],
            [gradient_P],
            [moments.exp_avg_P],
            [moments.exp_avg_sq_P],
            [],
            [moments.updates],
            fused=True,
            amsgrad=False,
            beta1=config.beta1,
            beta2=config.beta2,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            eps=config.eps,
            maximize=False,
        )

    def save(self, directory: Path, base_model: str, *, with_gradient: bool = False) -> None:
        """Write the checkpoint below `directory`.

        Args:
            with_gradient: what waits for the next step too, which is no part of a published checkpoint.
        """
        write_peft(self.adapter, directory, base_model)
        tensors = {}
        if self.moments is not None:
            for key, row_P in self._rows(self.moments).items():
                for name, at, shape in self.adapter.layout.views():
                    tensors[f"{name}.{key}"] = row_P[at : at + shape[0] * shape[1]].view(shape).cpu()
            tensors["updates"] = self.moments.updates
        save_file(tensors, directory / _OPTIMIZER)
        if with_gradient and self.gradient is not None:
            save_file({"gradient": self.gradient.row_P.cpu()}, directory / _GRADIENT)
        state = {"format": _FORMAT, "step": self.step, "seed": self.seed, "optimizer": "adamw"}
        (directory / "state.json").write_text(json.dumps(state, sort_keys=True) + "\n")

    @classmethod
    def load(cls, directory: Path, model: ModelLayout, device: torch.device) -> "PolicyState":
        """Read a checkpoint for a model with the given layers.

        Raises:
            OpenTinkerError: the checkpoint is of another format or another model.
        """
        state = json.loads((directory / "state.json").read_text())
        if state.get("format") != _FORMAT:
            raise OpenTinkerError(
                f"{directory}: checkpoint format {state.get('format')!r}; accepted: {_FORMAT}"
            )
        policy = cls(read_peft(directory, model, device), state["step"], state["seed"])
        policy.load_moments(directory)
        if (directory / _GRADIENT).exists():
            row_P = load_file(directory / _GRADIENT)["gradient"].to(device)
            policy.gradient = Adapter(policy.adapter.layout, row_P)
        return policy

    def release_moments(self) -> bool:
        """Free the optimizer's state, which is saved; False: there is none."""
        had, self.moments = self.moments is not None, None
        return had

    def load_moments(self, directory: Path) -> None:
        """Read the optimizer's state of a checkpoint, if it has one."""
        tensors = load_file(directory / _OPTIMIZER)
        if "updates" not in tensors:
            return
        moments = Moments.zeros(self.adapter.row_P)
        moments.updates = tensors["updates"]
        for key, row_P in self._rows(moments).items():
            for name, at, shape in self.adapter.layout.views():
                row_P[at : at + shape[0] * shape[1]].view(shape).copy_(tensors[f"{name}.{key}"])
        self.moments = moments

    @staticmethod
    def _rows(moments: Moments) -> dict[str, Tensor]:
        return {"exp_avg": moments.exp_avg_P, "exp_avg_sq": moments.exp_avg_sq_P}
