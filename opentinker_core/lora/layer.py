"""LoRA layers over frozen linears; which adapter they apply travels in a context, per call."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.lora.adapter import Adapter
from opentinker_kernels import expand_add, shrink

_HEAD = "lm_head"


class _Unset:
    """Marks a forward pass for which nobody said which adapter applies."""


_active: ContextVar[Adapter | type[_Unset] | None] = ContextVar("adapter", default=_Unset)


@contextmanager
def applied(adapter: Adapter | None) -> Iterator[None]:
    """Run forward passes with `adapter`, or with the base model alone where it is None."""
    token = _active.set(adapter)
    try:
        yield
    finally:
        _active.reset(token)


class LoRALinear(nn.Module):
    """A frozen linear layer plus the update of the applied adapter, if that targets this layer."""

    def __init__(self, base: nn.Linear, name: str) -> None:
        super().__init__()
        self.base = base
        self.name = name

    @property
    def weight(self) -> Tensor:
        """The frozen weight; transformers reads it to tie the head to the embedding."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to `x` (..., K).

        Raises:
            OpenTinkerError: outside of `applied(...)`: silently serving the base model instead of
                a policy is the worst of faults.
        """
        adapter = _active.get()
        if adapter is _Unset:
            raise OpenTinkerError(f"{self.name}: forward pass without `applied(adapter)`")
        y = self.base(x)
        factors = adapter.factors.get(self.name) if isinstance(adapter, Adapter) else None
        if factors is None or not isinstance(adapter, Adapter):
            return y
        u_TR = shrink(x.reshape(-1, x.shape[-1]), factors.A_RK)
        return expand_add(y.reshape(-1, y.shape[-1]), u_TR, factors.Bt_RN, adapter.scaling).view_as(y)


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(K, N) of every linear layer of a plain model, by module name."""
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }


def install(model: nn.Module) -> dict[str, LoRALinear]:
    """Freeze `model` and wrap each of its linear layers; returns the layers by module name.

    Wrapping all of them, once, lets adapters with different targets share the model.
    """
    model.requires_grad_(False)
    layers = {}
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, linear in linears:
        parent_name, _, child = name.rpartition(".")
        layers[name] = LoRALinear(linear, name)
        setattr(model.get_submodule(parent_name), child, layers[name])
    return layers


def target_shapes(layers: dict[str, LoRALinear], config: LoRAConfig) -> dict[str, tuple[int, int]]:
    """(K, N) of each layer that `config.target_modules` names.

    Raises:
        UsageError: a target matches no layer; training nothing must not pass silently.
    """
    if config.target_modules == "all-linear":
        names = [name for name in layers if name.rpartition(".")[2] != _HEAD]
    else:
        names = [n for n in layers if any(_matches(n, target) for target in config.target_modules)]
        for target in config.target_modules:
            if not any(_matches(name, target) for name in layers):
                known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
                raise UsageError(
                    f"policy.lora.target_modules: {target!r} matches no linear layer of the base model; "
                    f"accepted: 'all-linear' or suffixes of module names ({known})"
                )
    return {n: (layers[n].base.in_features, layers[n].base.out_features) for n in sorted(names)}


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
