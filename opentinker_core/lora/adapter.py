"""An adapter: the LoRA factors of one policy state, by the name of the linear layer they modify."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.seeds import derive_seed


@dataclass(frozen=True, eq=False)
class LoRAFactors:
    """The two factors of one linear layer, float32: `delta = scaling * (x A^T) Bt`."""

    A_RK: Tensor
    Bt_RN: Tensor


@dataclass(frozen=True, eq=False)
class Adapter:
    """The factors of all targeted layers and the one scaling (`alpha / rank`) they share."""

    config: LoRAConfig
    factors: dict[str, LoRAFactors]

    @property
    def scaling(self) -> float:
        return self.config.alpha / self.config.rank

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every factor under a stable name, in a stable order."""
        for name in sorted(self.factors):
            yield f"{name}.A", self.factors[name].A_RK
            yield f"{name}.Bt", self.factors[name].Bt_RN


def fresh_adapter(
    config: LoRAConfig, shapes: dict[str, tuple[int, int]], seed: int, device: torch.device
) -> Adapter:
    """A new adapter that changes nothing yet: `A` Kaiming uniform as in PEFT, `Bt` zero.

    Args:
        shapes: (K, N) of every targeted layer, by name.
        seed: each factor's draw derives from it and the layer's name, so that the set of targets
            does not change a layer's start.
    """
    factors = {}
    for name, (inputs, outputs) in shapes.items():
        generator = torch.Generator().manual_seed(derive_seed(seed, "lora", name))
        # kaiming_uniform_(a=sqrt(5)) has the bound sqrt(6 / ((1 + 5) * fan_in)) = 1 / sqrt(fan_in).
        bound = 1.0 / math.sqrt(inputs)
        A_RK = torch.empty(config.rank, inputs).uniform_(-bound, bound, generator=generator)
        factors[name] = LoRAFactors(A_RK.to(device), torch.zeros(config.rank, outputs, device=device))
    return Adapter(config, factors)
