"""Where an adapter's factors lie: the model's groups of linears, and the flat row of one adapter.

A group is the linears that read the same input (q, k, v; gate, up; or one alone); their `A` factors
are stacked, so that one projection serves all of them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from torch import Tensor

from opentinker_core.config.schema import LoRAConfig, layer_pattern
from opentinker_core.errors import UsageError

Value = TypeVar("Value")
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
    tables: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """The frozen weights (V, D) of embedding and head by module name: PEFT's files may hold copies."""

    @classmethod
    def of(
        cls, shapes: Mapping[str, tuple[int, int]], tables: Mapping[str, Tensor] | None = None
    ) -> "ModelLayout":
        """Group the linears of (K, N) `shapes`, by module name, in the order of the names' first members."""
        left, groups = dict(shapes), []
        while left:
            names = [name for name in _siblings(next(iter(left))) if name in left]
            inputs = left[names[0]][0]
            names = [name for name in names if left[name][0] == inputs]
            groups.append(Group(inputs, tuple((name, left.pop(name)[1]) for name in names)))
        return cls(tuple(groups), dict(tables or {}))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(K, N) by module name."""
        return {name: (group.inputs, outputs) for group in self.groups for name, outputs in group.members}


def _siblings(name: str) -> tuple[str, ...]:
    parent, _, own = name.rpartition(".")
    for fused in _FUSED:
        if own in fused:
            return tuple(f"{parent}.{member}" if parent else member for member in fused)
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
        targets = target_names(config, model)
        ranks = _per_layer(config.rank_pattern, targets, config.rank)
        alphas = _per_layer(config.alpha_pattern, targets, config.alpha)
        factors: dict[str, Factors] = {}
        at = 0
        for group in model.groups:
            names = [(name, outputs) for name, outputs in group.members if name in ranks]
            A_at = {}
            for name, _ in names:
                A_at[name] = at
                at += ranks[name] * group.inputs
            for name, outputs in names:
                rank = ranks[name]
                scaling = alphas[name] / (math.sqrt(rank) if config.use_rslora else rank)
                factors[name] = Factors(rank, group.inputs, outputs, scaling, A_at[name], at)
                at += rank * outputs
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


HEAD = "lm_head"
"""The name of the layer that gives the logits."""
_EMBEDDING = "embed_tokens"


def target_names(config: LoRAConfig, model: ModelLayout) -> list[str]:
    """The layers that `config.target_modules` names.

    Raises:
        UsageError: a target or a pattern matches no layer; ignoring it must not pass silently.
    """
    shapes = model.shapes
    if config.target_modules == "all-linear":
        names = [name for name in shapes if _own_name(name) != HEAD]
    else:
        _check_targets(config.target_modules, shapes)
        names = [name for name in shapes if any(_matches(name, target) for target in config.target_modules)]
    _check_patterns("rank_pattern", config.rank_pattern, names)
    _check_patterns("alpha_pattern", config.alpha_pattern, names)
    return names


def _check_targets(targets: Iterable[str], names: Iterable[str]) -> None:
    for target in targets:
        if any(_matches(name, target) for name in names):
            continue
        known = ", ".join(sorted({_own_name(name) for name in names}))
        reason = "matches no linear layer of the base model"
        if _own_name(target) == _EMBEDDING:
            reason = "is an embedding, and adapters of embeddings are not supported yet"
        raise UsageError(
            f"policy.lora.target_modules: {target!r} {reason}; "
            f"accepted: 'all-linear' or suffixes of module names ({known})"
        )


def _check_patterns(field: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    used = set(deciding(patterns, names).values())
    for pattern in patterns:
        if pattern in used:
            continue
        matched = [name for name in names if layer_pattern(pattern).match(name)]
        if matched:
            before = sorted(set(deciding(patterns, matched).values()))
            raise UsageError(
                f"policy.lora.{field}: {pattern!r} is never used: {', '.join(before)} comes first in "
                "alphabetical order and matches the same layers; accepted: patterns that differ"
            )
        known = ", ".join(sorted({_own_name(name) for name in names}))
        raise UsageError(
            f"policy.lora.{field}: {pattern!r} matches no targeted layer; "
            f"accepted: ends of the targeted layers' names ({known}), or regular expressions for them"
        )


def deciding(patterns: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Of each layer that some pattern matches, the pattern that counts: the first."""
    compiled = [(pattern, layer_pattern(pattern)) for pattern in patterns]
    first = {name: next((key for key, regex in compiled if regex.match(name)), None) for name in names}
    return {name: key for name, key in first.items() if key is not None}


def _per_layer(patterns: Mapping[str, Value], names: Iterable[str], default: Value) -> dict[str, Value]:
    keys = deciding(patterns, names)
    return {name: patterns[keys[name]] if name in keys else default for name in names}


def _own_name(name: str) -> str:
    return name.rpartition(".")[2]


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def initial_bound(inputs: int) -> float:
    """Bound of the uniform draw of `A`: kaiming_uniform_(a=sqrt(5)) has sqrt(6 / ((1 + 5) * fan_in))."""
    return 1.0 / math.sqrt(inputs)
