"""The mutable state of a policy: adapter, AdamW moments, step and seed; and its checkpoint format.

A checkpoint is a directory of safetensors and JSON: the adapter as a PEFT directory beside
`optimizer.safetensors` (moments by factor name) and `state.json` (step, seed, format). Every
random draw of a run derives from the seed and the step, so these two are its RNG state.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from opentinker_core.config.schema import LoRAConfig, OptimizerConfig
from opentinker_core.errors import OpenTinkerError
from opentinker_core.lora.adapter import Adapter, fresh_adapter
from opentinker_core.lora.peft_format import read_peft, write_peft

_FORMAT = 1


@dataclass(eq=False)
class PolicyState:
    """Adapter weights (float32 leaves), optimizer moments, number of optimizer steps, seed."""

    adapter: Adapter
    optimizer: torch.optim.AdamW
    step: int
    seed: int

    @classmethod
    def fresh(
        cls, lora: LoRAConfig, shapes: dict[str, tuple[int, int]], seed: int, device: torch.device
    ) -> "PolicyState":
        """The state of a policy that equals the base model."""
        return cls.of(fresh_adapter(lora, shapes, seed, device), 0, seed)

    @classmethod
    def of(cls, adapter: Adapter, step: int, seed: int) -> "PolicyState":
        """A state around `adapter`, with an optimizer that has no history."""
        parameters = [parameter.requires_grad_() for _, parameter in adapter.parameters()]
        return cls(adapter, torch.optim.AdamW(parameters, fused=True), step, seed)

    def apply_gradients(self, config: OptimizerConfig) -> float:
        """Clip the accumulated gradients, take one AdamW step with `config`, clear them.

        Returns:
            The gradient norm before clipping.

        Raises:
            OpenTinkerError: gradients, or the weights after the step, are not finite. The state is
                spoilt then and must be loaded again; nothing of it may be published.
        """
        parameters = [parameter for _, parameter in self.adapter.parameters()]
        limit = config.grad_clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        if not bool(norm.isfinite()):
            raise OpenTinkerError(f"training diverged: the gradient norm is {float(norm)}")
        self.optimizer.param_groups[0].update(
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not bool(torch.nn.utils.get_total_norm(parameters).isfinite()):
            raise OpenTinkerError(
                f"training diverged: weights are not finite after a step with learning rate "
                f"{config.learning_rate}"
            )
        self.step += 1
        return float(norm)

    def save(self, directory: Path, base_model: str) -> None:
        """Write the checkpoint below `directory`."""
        write_peft(self.adapter, directory, base_model)
        moments = {}
        for name, parameter in self.adapter.parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                moments[f"{name}.{key}"] = value.detach().cpu().contiguous()
        save_file(moments, directory / "optimizer.safetensors")
        state = {"format": _FORMAT, "step": self.step, "seed": self.seed, "optimizer": "adamw"}
        (directory / "state.json").write_text(json.dumps(state, sort_keys=True) + "\n")

    @classmethod
    def load(cls, directory: Path, shapes: dict[str, tuple[int, int]], device: torch.device) -> "PolicyState":
        """Read a checkpoint for a model whose layers have the (K, N) `shapes`.

        Raises:
            OpenTinkerError: the checkpoint is of another format or another model.
        """
        state = json.loads((directory / "state.json").read_text())
        if state.get("format") != _FORMAT:
            raise OpenTinkerError(
                f"{directory}: checkpoint format {state.get('format')!r}; accepted: {_FORMAT}"
            )
        policy = cls.of(read_peft(directory, shapes, device), state["step"], state["seed"])
        moments = load_file(directory / "optimizer.safetensors")
        for name, parameter in policy.adapter.parameters():
            # The step count stays on the CPU, as AdamW itself keeps it unless it is captured in a graph.
            found = {key: moments.get(f"{name}.{key}") for key in ("step", "exp_avg", "exp_avg_sq")}
            loaded = {key: value for key, value in found.items() if value is not None}
            if loaded:
                policy.optimizer.state[parameter] = {key: value.to(device) for key, value in loaded.items()}
        return policy
