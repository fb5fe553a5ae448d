"""LoRA layers over frozen linears, of any number of adapters at once.

Axes: T rows, K input features, N output features, R rank, P routed rows, G segments.
"""

from typing import Any

import torch
from torch import Tensor, nn

from opentinker_core.errors import OpenTinkerError
from opentinker_core.lora.layout import HEAD, Group, ModelLayout
from opentinker_core.lora.packed import PackedLinear
from opentinker_core.lora.routing import Part, Routing, active_routing
from opentinker_core.lora.rowwise import Elementwise, Rowwise
from opentinker_kernels import ops


class MultiLoRALinear(nn.Module):
    """A frozen linear layer plus the updates of the adapters that are routed through it."""

    def __init__(self, base: nn.Module, name: str) -> None:
        super().__init__()
        self.base = base
        self.name = name
        self.shared: SharedInput
        self.packed: PackedLinear | None = None
        """How a sampler applies the frozen layer, if it has a way of its own."""

    @property
    def weight(self) -> Tensor:
        """The frozen weight; transformers reads it to tie the head to the embedding."""
        return self.base.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to `x` (..., K).

        Raises:
            OpenTinkerError: outside of `routed(...)`, or `x` has not as many rows as the routing.
        """
        routing = active_routing(self.name)
        parts = routing.parts(self.shared.group) if routing is not None else ()
        if routing is None or not (parts or (torch.is_grad_enabled() and x.requires_grad)):
            return self.frozen(x)
        # A gradient takes one way whoever is routed here: where it is summed up, order shows in its bits.
        return self.shared.output(self.name, x, routing, parts)

    def frozen(self, x: Tensor) -> Tensor:
        """The frozen layer alone, (..., N)."""
        if self.packed is not None and torch.is_inference_mode_enabled():
            return self.packed(x)
        return self.shared.rowwise(self.base, x)


class SharedInput:
    """The layers of a group: they read the same input, so it is projected once for all of them."""

    def __init__(self, group: Group, layers: list[MultiLoRALinear], rowwise: Rowwise) -> None:
        self.group = group
        self.layers = layers
        self.rowwise = rowwise
        for layer in layers:
            layer.shared = self

    def output(self, name: str, x: Tensor, routing: Routing, parts: tuple[Part, ...]) -> Tensor:
        """The output of one of the layers; the others' wait in the routing until their layers are called."""
        rows = x.numel() // x.shape[-1]
        if rows != routing.n_rows:
            raise OpenTinkerError(f"{name}: {rows} rows, but the routing is for {routing.n_rows}")
        waiting = routing.pending.get(self.group)
        if waiting is None or waiting[0] is not x or name not in waiting[1]:
            outputs = self._compute(x.reshape(rows, x.shape[-1]), parts)
            shaped = [y_TN.view(*x.shape[:-1], y_TN.shape[-1]) for y_TN in outputs]
            waiting = routing.pending[self.group] = (x, dict(zip(self.group.names, shaped, strict=True)))
        y = waiting[1].pop(name)
        if not waiting[1]:
            del routing.pending[self.group]
        return y

    def _compute(self, x_TK: Tensor, parts: tuple[Part, ...]) -> list[Tensor]:
        if torch.is_grad_enabled():
            # Without it autograd would not come back to the first layers, whose input is constant.
            anchor = torch.zeros((), device=x_TK.device, requires_grad=True)
            plain = all(type(layer.base) is nn.Linear for layer in self.layers)
            given = [] if plain else self._differentiable(x_TK)
            return list(_MultiLoRA.apply(x_TK, anchor, self, parts, *given))
        ys = [layer.frozen(x_TK) for layer in self.layers]
        for part in parts:
            self.add_updates(ys, self.project(x_TK, part), part)
        return ys

    def _differentiable(self, x_TK: Tensor) -> list[Tensor]:
        """The frozen layers' outputs, of which autograd knows the gradient itself, to be changed in place."""
        ys = [self.rowwise(layer.base, x_TK) for layer in self.layers]
        if x_TK.requires_grad and not all(y_TN.requires_grad for y_TN in ys):
            kinds = ", ".join(sorted({type(layer.base).__name__ for layer in self.layers}))
            raise OpenTinkerError(
                f"{self.layers[0].name}: {kinds} has no backward pass; accepted for training: "
                "linear layers that pass gradients on to their input"
            )
        # Autograd refuses that a function with several outputs changes views in place.
        return [y_TN if y_TN._base is None else y_TN.clone() for y_TN in ys]

    def project(self, x_TK: Tensor, part: Part) -> Tensor:
        """The routed rows in the rank space of all layers, (P, layers * R)."""
        return ops.shrink(x_TK[part.rows], part.bucket.stacked_A(self.group), part.plan)

    def add_updates(self, ys: list[Tensor], u_PR: Tensor, part: Part) -> None:
        """Add each layer's update to its output (T, N), in place."""
        rank = part.bucket.rank
        for m, ((name, outputs), y_TN) in enumerate(zip(self.group.members, ys, strict=True)):
            if not part.bucket.targets(name):
                continue
            u = u_PR[:, m * rank : (m + 1) * rank]
            ops.expand_add(y_TN[part.rows], u, part.bucket.scaled_Bt(name, outputs), part.plan)


class _MultiLoRA(torch.autograd.Function):
    """Forward and backward of a group: the frozen layers and the adapters' updates.

    With y = x W^T + (x A^T) Bt:  dU = dY Bt^T,  dX = dY W + dU A,  dA = dU^T x,  dBt = U^T dY (Bt is scaled).
    Gradients of factors go straight to the adapters' own rows, so no policy's gradient meets another's.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, anchor: Tensor, shared: SharedInput, parts: tuple[Part, ...], *given: Tensor
    ) -> tuple[Tensor, ...]:
        """`given`: outputs of the frozen layers, changed in place, where these are no plain linears."""
        ys = list(given) or [shared.rowwise(layer.base, x_TK) for layer in shared.layers]
        ctx.mark_dirty(*given)
        us = [shared.project(x_TK, part) for part in parts]
        for part, u_PR in zip(parts, us, strict=True):
            shared.add_updates(ys, u_PR, part)
        ctx.shared, ctx.parts, ctx.own_base = shared, parts, not given
        ctx.save_for_backward(x_TK, *us)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shared: SharedInput = ctx.shared
        x_TK, *us = ctx.saved_tensors
        dys = [grad.contiguous() for grad in grads]
        dx_TK = None
        if ctx.needs_input_grad[0]:
            dx_TK = _through_base(shared, dys) if ctx.own_base else torch.zeros_like(x_TK)
        for part, u_PR in zip(ctx.parts, us, strict=True):
            _backward_part(shared, part, x_TK, u_PR, dys, dx_TK)
        return (dx_TK, None, None, None, *(() if ctx.own_base else grads))


def _through_base(shared: SharedInput, dys: list[Tensor]) -> Tensor:
    """dX of the frozen layers."""
    dx_TK = None
    for layer, dy_TN in zip(shared.layers, dys, strict=True):
        dx_TK = shared.rowwise.back(layer.base, dy_TN, dx_TK)
    assert dx_TK is not None
    return dx_TK


def _backward_part(
    shared: SharedInput, part: Part, x_TK: Tensor, u_PR: Tensor, dys: list[Tensor], dx_TK: Tensor | None
) -> None:
    rank, plan, group = part.bucket.rank, part.plan, shared.group
    # Of each layer, of each segment: the factors' gradients; None: nobody wants them.
    wanted = [[g.factors.get(name) if g else None for g in part.gradients] for name in group.names]
    du_PR = torch.empty_like(u_PR)
    for m, ((name, outputs), dy_TN) in enumerate(zip(group.members, dys, strict=True)):
        ranks = slice(m * rank, (m + 1) * rank)
        if not part.bucket.targets(name):
            du_PR[:, ranks] = 0
            continue
        du_PR[:, ranks] = ops.shrink(dy_TN[part.rows], part.bucket.scaled_Bt(name, outputs), plan)
        dBt_GRN = ops.wgrad(u_PR[:, ranks], dy_TN[part.rows], plan)
        for factors, dBt_RN in zip(wanted[m], dBt_GRN, strict=True):
            if factors is not None:
                factors.Bt_RN.add_(dBt_RN[: len(factors.Bt_RN)], alpha=factors.scaling)
    if dx_TK is not None:
        ops.expand_add(dx_TK[part.rows], du_PR, part.bucket.stacked_A(group), plan)
    dA_GRK = ops.wgrad(du_PR, x_TK[part.rows], plan)
    for m, of_layer in enumerate(wanted):
        for factors, dA_RK in zip(of_layer, dA_GRK, strict=True):
            if factors is not None:
                factors.A_RK.add_(dA_RK[m * rank : m * rank + len(factors.A_RK)])


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(K, N) of every linear layer of a plain model, by module name.

    Linear is what says its `in_features` and `out_features`: `nn.Linear`, and the classes that
    quantization puts in its place. What such a layer is made of is not looked at.
    """
    shapes: dict[str, tuple[int, int]] = {}
    outer = ""
    for name, module in model.named_modules():
        if outer and name.startswith(outer):
            continue
        sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
        if all(isinstance(size, int) for size in sizes):
            shapes[name] = sizes  # type: ignore[assignment]
            outer = f"{name}."
    return shapes


def _tables(model: nn.Module) -> dict[str, Tensor]:
    """The weights of embedding and head, by module name."""
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or name.rpartition(".")[2] == HEAD
    }
    weights = {name: getattr(module, "weight", None) for name, module in modules.items()}
    return {name: weight for name, weight in weights.items() if isinstance(weight, Tensor)}


def install(model: nn.Module, *, packs: bool = True) -> ModelLayout:
    """Freeze `model` and wrap each of its linear layers.

    Wrapping all of them, once, lets adapters with different targets share the model. `packs`: samplers on a
    CPU use packed copies of the weights (see `packed`), made when they are first wanted.
    """
    model.requires_grad_(False)
    layout = ModelLayout.of(linear_shapes(model), _tables(model))
    rowwise = Rowwise.measured(model, layout)
    for group in layout.groups:
        layers = []
        for name in group.names:
            parent, _, child = name.rpartition(".")
            layers.append(MultiLoRALinear(model.get_submodule(name), name))
            layers[-1].packed = PackedLinear.of(layers[-1].base) if packs else None
            setattr(model.get_submodule(parent), child, layers[-1])
        SharedInput(group, layers, rowwise)
    for module in list(model.modules()):
        if isinstance(getattr(module, "act_fn", None), nn.Module):
            module.act_fn = Elementwise(module.act_fn)  # type: ignore[arg-type]
    return layout
