"""LoRA layers of many adapters against plain torch autograd, over random rows, ranks and targets.

(gradcheck in float64 stands in `test_gradients`.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.lora.adapter import Adapter
from opentinker_core.lora.layer import install
from opentinker_core.lora.layout import AdapterLayout
from opentinker_core.lora.pool import AdapterPool, Slot, Wanted
from opentinker_core.lora.routing import Routing, Rows, routed

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Halved(nn.Linear):
    """A linear layer of another type, as quantization puts them in: its own product is its own business."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class Block(nn.Module):
    """The linears of a transformer block, with grouped-query widths and without attention."""

    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = linear(12, 16), linear(12, 4), linear(12, 4)
        self.o_proj = linear(16, 12, bias=False)
        self.gate_proj, self.up_proj = linear(12, 20, bias=False), linear(12, 20, bias=False)
        self.down_proj = linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.tanh(self.k_proj(x)) * self.v_proj(x)
        x = x + self.o_proj(self.q_proj(x) * keys.repeat(1, 4))
        return x + self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


@dataclass
class Case:
    """A block with our layers, a pool, and some adapters."""

    block: Block
    pool: AdapterPool
    adapters: dict[str, Adapter]

    @classmethod
    def of(cls, configs: dict[str, LoRAConfig], linear: type[nn.Linear] = nn.Linear) -> "Case":
        block = Block(linear)
        pool = AdapterPool(install(block), "cpu", torch.float32)
        adapters = {}
        for seed, (name, config) in enumerate(configs.items()):
            layout = AdapterLayout.of(config, pool.model)
            generator = torch.Generator().manual_seed(seed)
            adapters[name] = Adapter(layout, 0.2 * torch.randn(layout.numel, generator=generator))
        return cls(block, pool, adapters)

    @contextmanager
    def slots(self) -> Iterator[dict[str, Slot]]:
        with self.pool.lease({name: Wanted(adapter) for name, adapter in self.adapters.items()}) as slots:
            yield slots

    def ours(
        self, x: Tensor, rows: list[tuple[str | None, int]], dy: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Output, gradient of the input, and of each adapter's row."""
        gradients = {name: Adapter.zeros(adapter.layout) for name, adapter in self.adapters.items()}
        x = x.clone().requires_grad_()
        with self.slots() as slots:
            routing = Routing(
                self.pool, [Rows(n, slots[a], gradients[a]) if a else Rows(n, None) for a, n in rows]
            )
            with routed(routing):
                y = self.block(x)
            y.backward(dy)
        assert x.grad is not None
        return y.detach(), x.grad, {name: gradient.row_P for name, gradient in gradients.items()}


def _plain(
    case: Case, linear: type[nn.Linear], x: Tensor, rows: list[tuple[str | None, int]], dy: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The same by torch alone: every run of rows by itself, through weights that have the update in them."""
    x = x.clone().requires_grad_()
    weights = {name: adapter.row_P.clone().requires_grad_() for name, adapter in case.adapters.items()}
    outputs, start = [], 0
    for name, count in rows:
        block = Block(linear)
        factors = Adapter(case.adapters[name].layout, weights[name]).factors if name else {}
        replaced = {}
        for layer, factor in factors.items():
            update_NK = factor.scaling * factor.Bt_RN.T @ factor.A_RK
            if linear is Halved:
                update_NK = 2 * update_NK
            replaced[f"{layer}.weight"] = block.get_parameter(f"{layer}.weight").detach() + update_NK
        outputs.append(torch.func.functional_call(block, replaced, (x[start : start + count],)))
        start += count
    y = torch.cat(outputs)
    y.backward(dy)
    assert x.grad is not None
    grads = {name: torch.zeros_like(row) if row.grad is None else row.grad for name, row in weights.items()}
    return y.detach(), x.grad, grads


def _assert_near(ours: Tensor, plain: Tensor) -> None:
    """In float32 rounding is relative to the largest values."""
    assert (ours - plain).abs().max() <= 1e-5 * (1 + plain.abs().max())


configs = st.builds(
    lambda rank, alpha, targets: LoRAConfig(rank=rank, alpha=alpha, target_modules=tuple(sorted(targets))),
    st.sampled_from([1, 2, 3, 8, 9, 17]),
    st.sampled_from([1.0, 4.0]),
    st.sets(st.sampled_from(LINEARS), min_size=1),
)
names = st.sampled_from(["a", "b", "c", None])


@settings(max_examples=60, deadline=None)
@given(
    lora=st.fixed_dictionaries({"a": configs, "b": configs, "c": configs}),
    rows=st.lists(st.tuples(names, st.integers(1, 9)), min_size=1, max_size=6),
    linear=st.sampled_from([nn.Linear, Halved]),
)
def test_outputs_and_gradients_are_those_of_torch(
    lora: dict[str, LoRAConfig], rows: list[tuple[str | None, int]], linear: type[nn.Linear]
) -> None:
    case = Case.of(lora, linear)
    total = sum(count for _, count in rows)
    generator = torch.Generator().manual_seed(7)
    x, dy = torch.randn(total, 12, generator=generator), torch.randn(total, 12, generator=generator)
    y, dx, gradients = case.ours(x, rows, dy)
    expected_y, expected_dx, expected = _plain(case, linear, x, rows, dy)
    _assert_near(y, expected_y)
    _assert_near(dx, expected_dx)
    for name, gradient in gradients.items():
        _assert_near(gradient, expected[name])


@pytest.mark.parametrize("linear", [nn.Linear, Halved])
def test_what_lies_in_slots_of_others_never_shows(linear: type[nn.Linear]) -> None:
    """NaN in every slot of the buckets that no row of the pass names."""
    case = Case.of(
        {
            "a": LoRAConfig(rank=3, target_modules=("q_proj", "v_proj", "down_proj")),
            "b": LoRAConfig(rank=8, target_modules=LINEARS),
            "wide": LoRAConfig(rank=12, target_modules=("k_proj", "o_proj")),
        },
        linear,
    )
    generator = torch.Generator().manual_seed(7)
    x, dy = torch.randn(10, 12, generator=generator), torch.randn(10, 12, generator=generator)
    rows: list[tuple[str | None, int]] = [("a", 4), (None, 2), ("wide", 3), ("a", 1)]
    before = case.ours(x, rows, dy)
    with case.slots() as slots:
        for rank in (8, 16):
            bucket, used = case.pool.bucket(rank), {slots["a"], slots["wide"]}
            for group in case.pool.model.groups:
                tensors = [bucket.stacked_A(group)]
                tensors += [bucket.scaled_Bt(n, width) for n, width in group.members if bucket.targets(n)]
                for tensor in tensors:
                    for index in range(bucket.capacity):
                        if Slot(rank, index) not in used:
                            tensor[index] = float("nan")
    after = case.ours(x, rows, dy)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert before[2].keys() == after[2].keys()
    assert all(torch.equal(gradient, after[2][name]) for name, gradient in before[2].items())


def test_a_gradient_is_added_to_what_is_there() -> None:
    case = Case.of({"a": LoRAConfig(rank=2, target_modules=("o_proj",))})
    x, dy = torch.ones(3, 12), torch.ones(3, 12)
    _, _, once = case.ours(x, [("a", 3)], dy)
    gradient = Adapter(case.adapters["a"].layout, torch.ones_like(case.adapters["a"].row_P))
    with case.slots() as slots, routed(Routing(case.pool, [Rows(3, slots["a"], gradient)])):
        case.block(x).backward(dy)
    torch.testing.assert_close(gradient.row_P, 1 + once["a"])
