"""Where an adapter's factors lie: the model's groups of linears, and the flat row of one adapter.

A group is the linears that read the same input (q, k, v; gate, up; or one alone); their `A` factors
are stacked, so that one projection serves all of them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import UsageError

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Group:
    """Linears with one input of K features."""

    inputs: int
    members: tuple[tuple[str, int], ...]
    """(module name, N) of each."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.members)


@dataclass(frozen=True)
class ModelLayout:
    """All linears of a base model that can carry an adapter, in groups."""

    groups: tuple[Group, ...]

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, int]]) -> "ModelLayout":
        """Group the linears of (K, N) `shapes`, by module name, in the order of the names' first members."""
        left, groups = dict(shapes), []
        while left:
            names = [name for name in _siblings(next(iter(left))) if name in left]
            inputs = left[names[0]][0]
            names = [name for name in names if left[name][0] == inputs]
            groups.append(Group(inputs, tuple((name, left.pop(name)[1]) for name in names)))
        return cls(tuple(groups))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(K, N) by module name."""
        return {name: (group.inputs, outputs) for group in self.groups for name, outputs in group.members}


def _siblings(name: str) -> tuple[str, ...]:
    parent, _, own = name.rpartition(".")
    for fused in _FUSED:
        if own in fused:
            return tuple(f"{parent}.{member}" for member in fused)
    return (name,)


@dataclass(frozen=True)
class Factors:
    """Where the factors of one layer lie in the flat row, and how its update is scaled."""

    rank: int
    inputs: int
    outputs: int
    scaling: float
    A_at: int
    Bt_at: int


@dataclass(frozen=True, eq=False)
class AdapterLayout:
    """The flat row of an adapter: of each targeted layer `A` (R, K), then of each `Bt` (R, N), by group."""

    config: LoRAConfig
    factors: dict[str, Factors]
    numel: int

    @classmethod
    def of(cls, config: LoRAConfig, model: ModelLayout) -> "AdapterLayout":
        """The layout of `config`'s adapters on a model.

        Raises:
            UsageError: a target or a pattern matches no layer of the model.
        """
        targets = set(target_names(config, model))
        factors: dict[str, Factors] = {}
        at = 0
        for group in model.groups:
            names = [(name, outputs) for name, outputs in group.members if name in targets]
            ranks = {name: config.rank for name, _ in names}
            A_at = {}
            for name, _ in names:
                A_at[name] = at
                at += ranks[name] * group.inputs
            for name, outputs in names:
                scaling = config.alpha / ranks[name]
                factors[name] = Factors(ranks[name], group.inputs, outputs, scaling, A_at[name], at)
                at += ranks[name] * outputs
        return cls(config, factors, at)

    @property
    def rank(self) -> int:
        """The largest rank of any layer."""
        return max(factor.rank for factor in self.factors.values())

    def views(self) -> Iterator[tuple[str, int, tuple[int, int]]]:
        """(name, offset, shape) of every factor, in a stable order."""
        for name in sorted(self.factors):
            f = self.factors[name]
            yield f"{name}.A", f.A_at, (f.rank, f.inputs)
            yield f"{name}.Bt", f.Bt_at, (f.rank, f.outputs)


_HEAD = "lm_head"


def target_names(config: LoRAConfig, model: ModelLayout) -> list[str]:
    """The layers that `config.target_modules` names.

    Raises:
        UsageError: a target matches no layer; training nothing must not pass silently.
    """
    shapes = model.shapes
    if config.target_modules == "all-linear":
        return [name for name in shapes if name.rpartition(".")[2] != _HEAD]
    for target in config.target_modules:
        if not any(_matches(name, target) for name in shapes):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in shapes}))
            raise UsageError(
                f"policy.lora.target_modules: {target!r} matches no linear layer of the base model; "
                f"accepted: 'all-linear' or suffixes of module names ({known})"
            )
    return [name for name in shapes if any(_matches(name, target) for target in config.target_modules)]


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def initial_bound(inputs: int) -> float:
    """Bound of the uniform draw of `A`: kaiming_uniform_(a=sqrt(5)) has sqrt(6 / ((1 + 5) * fan_in))."""
    return 1.0 / math.sqrt(inputs)
