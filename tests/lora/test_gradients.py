"""The autograd function of the LoRA layers: gradcheck in float64, of inputs and of all factors."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import OpenTinkerError
from opentinker_core.lora.adapter import Adapter
from opentinker_core.lora.layer import install
from opentinker_core.lora.layout import AdapterLayout
from opentinker_core.lora.pool import AdapterPool, Wanted
from opentinker_core.lora.routing import Routing, Rows, routed

CONFIGS = {
    "a": LoRAConfig(rank=2, alpha=3.0, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")),
    "b": LoRAConfig(rank=5, alpha=2.0, target_modules=("k_proj", "o_proj")),
    "wide": LoRAConfig(rank=9, alpha=9.0, target_modules=("v_proj",)),
}
ROWS = [("a", 3), (None, 2), ("b", 2), ("wide", 1), ("a", 1)]
"""Adapters of the input's rows; `a` comes twice, and base rows in between."""


class Block(nn.Module):
    """Three linears with one input, of different widths, and one after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(4, 6), nn.Linear(4, 3), nn.Linear(4, 3)
        self.o_proj = nn.Linear(6, 4, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        both = self.k_proj(x) * torch.tanh(self.v_proj(x))
        return self.o_proj(torch.tanh(self.q_proj(x)) * torch.cat([both, both], -1))


@pytest.fixture
def block() -> Block:
    return Block()


@pytest.fixture
def pool(block: Block) -> AdapterPool:
    return AdapterPool(install(block), "cpu", torch.float64)


def _layouts(pool: AdapterPool) -> dict[str, AdapterLayout]:
    return {name: AdapterLayout.of(config, pool.model) for name, config in CONFIGS.items()}


def _random(layout: AdapterLayout, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layout.numel, generator=generator, dtype=torch.float64)


def _run(
    block: Block, pool: AdapterPool, x: Tensor, adapters: dict[str, Adapter], gradients: Any, again: bool
) -> Tensor:
    """The block's output; a new revision each time, so that the pool takes the given weights."""
    _run.revision += 1  # type: ignore[attr-defined]
    wanted = {name: Wanted(adapter, _run.revision) for name, adapter in adapters.items()}  # type: ignore[attr-defined]
    with pool.lease(wanted) as slots:
        rows = [
            Rows(count, slots[name] if name else None, gradients.get(name) if name else None)
            for name, count in ROWS
        ]
        routing = Routing(pool, rows)
        with routed(routing):
            if not again:
                return block(x)
            inside = lambda: (nullcontext(), routed(routing))  # noqa: E731
            return checkpoint(block, x, use_reentrant=False, context_fn=inside)


_run.revision = 0  # type: ignore[attr-defined]


class _WithFactors(torch.autograd.Function):
    """The block as a function of its input and of the adapters' rows, with our layers' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Block, pool: AdapterPool, again: bool, *rows: Tensor) -> Tensor:
        ctx.block, ctx.pool, ctx.again = block, pool, again
        ctx.save_for_backward(x, *rows)
        adapters = dict(zip(CONFIGS, map(Adapter, _layouts(pool).values(), rows), strict=True))
        return _run(block, pool, x, adapters, {}, again=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *rows = ctx.saved_tensors
        layouts = _layouts(ctx.pool)
        adapters = dict(zip(CONFIGS, map(Adapter, layouts.values(), rows), strict=True))
        gradients = {
            name: Adapter(layout, torch.zeros(layout.numel, dtype=torch.float64))
            for name, layout in layouts.items()
        }
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            _run(ctx.block, ctx.pool, x, adapters, gradients, ctx.again).backward(grad)
        return (x.grad, None, None, None, *(gradient.row_P for gradient in gradients.values()))


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_gradients_of_inputs_and_factors_are_the_derivatives(
    block: Block, pool: AdapterPool, again: bool
) -> None:
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    rows = [_random(layout, seed).requires_grad_() for seed, layout in enumerate(_layouts(pool).values())]
    assert torch.autograd.gradcheck(
        lambda x, *rows: _WithFactors.apply(x, block, pool, again, *rows), (x, *rows), atol=1e-6
    )


def test_rows_of_the_base_keep_every_bit(block: Block, pool: AdapterPool) -> None:
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    adapters = {name: Adapter(layout, _random(layout, 7)) for name, layout in _layouts(pool).items()}
    y = _run(block, pool, x, adapters, {}, again=False)
    with routed(None):
        base = block(x)
    assert torch.equal(y[3:5], base[3:5])
    assert not torch.equal(y[:3], base[:3])


def test_a_forgotten_or_wrong_sized_routing_raises(block: Block, pool: AdapterPool) -> None:
    x = torch.zeros(9, 4, dtype=torch.float64)
    with pytest.raises(OpenTinkerError, match="without `routed"):
        block(x)
    adapter = Adapter(_layouts(pool)["a"], _random(_layouts(pool)["a"], 0))
    wrong = pytest.raises(OpenTinkerError, match="9 rows, but the routing is for 8")
    with pool.lease({"a": Wanted(adapter)}) as slots, routed(Routing(pool, [Rows(8, slots["a"])])), wrong:
        block(x)


def test_weights_that_are_not_finite_come_into_no_slot(pool: AdapterPool) -> None:
    layout = _layouts(pool)["a"]
    spoilt = Adapter(layout, torch.full((layout.numel,), float("nan"), dtype=torch.float64))
    with pytest.raises(OpenTinkerError, match="not finite"), pool.lease({"a": Wanted(spoilt)}):
        pass
    sound = Adapter(layout, _random(layout, 0))
    with pool.lease({"a": Wanted(sound)}) as slots:
        assert slots["a"].index == 0
