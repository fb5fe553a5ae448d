"""AdamW steps of eight policies, with clipping: flat rows against torch's foreach AdamW over the factors.

The shapes are those of r = 8 on all linears of SmolLM2-135M, 420 factors and 2.44 M weights a policy. Both
clip by the policy's own norm and take the same step (checked to the bit but for the norm's rounding).

    python benchmarks/optimizer.py [--json] [--turns N]
"""

import argparse
import time
from statistics import median

import torch

from benchmarks.report import show
from opentinker_core.config.schema import LoRAConfig, OptimizerConfig
from opentinker_core.lora.adapter import Adapter
from opentinker_core.lora.layout import ModelLayout
from opentinker_core.models.placement import available_cores
from opentinker_core.training.state import PolicyState

POLICIES, LAYERS = 8, 30
CONFIG = OptimizerConfig(learning_rate=1e-3, weight_decay=0.01)


def layout() -> ModelLayout:
    """The linears of SmolLM2-135M."""
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj": (576, 576),
            f"{at}.self_attn.k_proj": (576, 192),
            f"{at}.self_attn.v_proj": (576, 192),
            f"{at}.self_attn.o_proj": (576, 576),
            f"{at}.mlp.gate_proj": (576, 1536),
            f"{at}.mlp.up_proj": (576, 1536),
            f"{at}.mlp.down_proj": (1536, 576),
        }
    return ModelLayout.of(shapes)


class Foreach:
    """One torch.optim.AdamW(foreach=True) a policy, over separate factors."""

    def __init__(self, states: list[PolicyState]) -> None:
        self._parameters = [
            [tensor.detach().clone().requires_grad_() for _, tensor in state.adapter.parameters()]
            for state in states
        ]
        self._optimizers = [
            torch.optim.AdamW(
                own, lr=CONFIG.learning_rate, weight_decay=CONFIG.weight_decay, eps=CONFIG.eps, foreach=True
            )
            for own in self._parameters
        ]

    def prepare(self, gradients: list[Adapter]) -> None:
        """Hand over gradients."""
        for own, gradient in zip(self._parameters, gradients, strict=True):
            for parameter, (_, value) in zip(own, gradient.parameters(), strict=True):
                parameter.grad = value.clone()

    def step(self) -> None:
        """Clip and step every policy."""
        for own, optimizer in zip(self._parameters, self._optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(own, CONFIG.grad_clip_norm, foreach=True)
            optimizer.step()

    def weights(self, policy: int) -> torch.Tensor:
        """All weights of a policy, flat, in the order of the factors' names."""
        return torch.cat([parameter.detach().flatten() for parameter in self._parameters[policy]])


def main() -> None:
    """Measure, and print the table or the object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--turns", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(available_cores())
    model = layout()
    device = torch.device("cpu")
    states = [
        PolicyState.fresh(LoRAConfig(rank=8, alpha=16.0), model, seed, device) for seed in range(POLICIES)
    ]
    foreach = Foreach(states)
    flat_s, foreach_s = [], []
    for turn in range(arguments.turns + 1):
        gradients = [_gradient(state, 100 * turn + index) for index, state in enumerate(states)]
        foreach.prepare(gradients)
        started = time.perf_counter()
        for state, gradient in zip(states, gradients, strict=True):
            state.accumulate(gradient)
            state.apply_gradients(CONFIG)
        middle = time.perf_counter()
        foreach.step()
        ended = time.perf_counter()
        if turn > 0:  # the first makes the moments
            flat_s.append(middle - started)
            foreach_s.append(ended - middle)
    for index, state in enumerate(states):
        ours = torch.cat([tensor.flatten() for _, tensor in state.adapter.parameters()])
        torch.testing.assert_close(ours, foreach.weights(index), atol=1e-6, rtol=1e-5)
    rows = [("flat rows", 1000 * median(flat_s), "ms"), ("foreach AdamW", 1000 * median(foreach_s), "ms")]
    ratio = median(b / a for a, b in zip(flat_s, foreach_s, strict=True))
    show("optimizer, 8 policies", rows, {"vs_foreach": ratio}, as_json=arguments.json)


def _gradient(state: PolicyState, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    return Adapter(state.adapter.layout, torch.randn(state.adapter.row_P.shape, generator=generator))


if __name__ == "__main__":
    main()
