"""An adapter: the LoRA factors of one policy state, as views of one flat row."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.lora.layout import AdapterLayout, ModelLayout, initial_bound
from opentinker_core.seeds import derive_seed


@dataclass(frozen=True, eq=False)
class LoRAFactors:
    """The two factors of one linear layer: `delta = scaling * (x A^T) Bt`."""

    A_RK: Tensor
    Bt_RN: Tensor
    scaling: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """The factors of all targeted layers, in one float32 row (P,)."""

    layout: AdapterLayout
    row_P: Tensor

    @classmethod
    def zeros(cls, layout: AdapterLayout, device: torch.device | str = "cpu") -> "Adapter":
        """An adapter whose factors are all zero."""
        return cls(layout, torch.zeros(layout.numel, device=device))

    @property
    def config(self) -> LoRAConfig:
        return self.layout.config

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return self.row_P.numel() * self.row_P.element_size()

    @cached_property
    def factors(self) -> dict[str, LoRAFactors]:
        """The factors of each targeted layer by module name, as views: writing to them writes to the row."""
        return {
            name: LoRAFactors(
                self.row_P[f.A_at : f.A_at + f.rank * f.inputs].view(f.rank, f.inputs),
                self.row_P[f.Bt_at : f.Bt_at + f.rank * f.outputs].view(f.rank, f.outputs),
                f.scaling,
            )
            for name, f in self.layout.factors.items()
        }

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every factor under a stable name, in a stable order."""
        for name in sorted(self.factors):
            yield f"{name}.A", self.factors[name].A_RK
            yield f"{name}.Bt", self.factors[name].Bt_RN


def fresh_adapter(
    config: LoRAConfig, model: ModelLayout, seed: int, device: torch.device | str = "cpu"
) -> Adapter:
    """A new adapter that changes nothing yet: `A` Kaiming uniform as in PEFT, `Bt` zero.

    Args:
        seed: each factor's draw derives from it and the layer's name, so that the set of targets
            does not change a layer's start.

    Raises:
        UsageError: a target matches no layer.
    """
    adapter = Adapter.zeros(AdapterLayout.of(config, model), device)
    for name, factors in adapter.factors.items():
        generator = torch.Generator().manual_seed(derive_seed(seed, "lora", name))
        bound = initial_bound(factors.A_RK.shape[1])
        factors.A_RK.copy_(torch.empty(factors.A_RK.shape).uniform_(-bound, bound, generator=generator))
    return adapter
