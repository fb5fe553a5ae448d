"""What many policies do, as a pure function of their names, and in which order they come.

A policy lives several lives: it is created anew now and then, with another seed, rank and targets. In
each it accumulates gradients of one or two calls a step, takes steps, and is read in between.
"""

import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum, auto
from functools import cache
from itertools import count, islice

import numpy as np
from transformers import PreTrainedTokenizerBase

from opentinker_core.config.schema import LoRAConfig, OptimizerConfig
from opentinker_core.trajectories.types import Datum

POLICIES = [f"p{number}" for number in range(200)]
OPERATIONS = 1800
WIDEST = 8
"""Policies of one round."""
_TARGETS = [("q_proj", "v_proj"), ("k_proj", "v_proj"), ("q_proj", "o_proj")]


class Kind(StrEnum):
    """Of an operation."""

    CREATE = auto()
    FORWARD_BACKWARD = auto()
    OPTIM_STEP = auto()
    FORWARD = auto()
    SAMPLE = auto()


@dataclass(frozen=True)
class Standing:
    """Where a policy stands, as its state tells."""

    seed: int
    """Of its life."""
    step: int
    pending: int
    """Calls of forward_backward whose gradients wait for the step."""


@dataclass(frozen=True)
class Operation:
    """One operation of a policy, and where it leaves it."""

    kind: Kind
    leaves: Standing

    def draws(self) -> random.Random:
        """What its data is drawn from."""
        return random.Random(repr(self))


@cache
def operations(policy: str) -> list[Operation]:
    """All that `policy` does in the end, from its first creation on."""
    return list(islice(_operations(policy), due(len(rounds()))[policy]))


def _operations(policy: str) -> Iterator[Operation]:
    draws = random.Random(policy)
    for life in count():
        seed = 1000 * POLICIES.index(policy) + life
        yield Operation(Kind.CREATE, Standing(seed, 0, 0))
        for step in range(draws.randint(4, 12)):
            calls = parts(seed, step)
            for part in range(calls):
                yield Operation(Kind.FORWARD_BACKWARD, Standing(seed, step, part + 1))
            if draws.random() < 0.3:  # with a gradient that waits
                yield Operation(Kind.FORWARD, Standing(seed, step, calls))
            yield Operation(Kind.OPTIM_STEP, Standing(seed, step + 1, 0))
            if draws.random() < 0.5:
                yield Operation(draws.choice([Kind.SAMPLE, Kind.FORWARD]), Standing(seed, step + 1, 0))


def parts(seed: int, step: int) -> int:
    """Calls of forward_backward for one step."""
    return random.Random(f"{seed} {step}").choice([1, 1, 2])


def lora_of(seed: int) -> LoRAConfig:
    """Lives differ in rank, alpha and targets."""
    draws = random.Random(seed)
    rank = draws.choice([2, 3, 4])
    return LoRAConfig(rank=rank, alpha=draws.choice([4.0, 8.0]), target_modules=draws.choice(_TARGETS))


def optimizer_of(operation: Operation) -> OptimizerConfig:
    """Every step has settings of its own."""
    draws = operation.draws()
    return OptimizerConfig(
        learning_rate=draws.choice([1e-2, 3e-2]), weight_decay=0.1, grad_clip_norm=draws.choice([0.0, 0.5])
    )


def datums_of(operation: Operation, tokenizer: PreTrainedTokenizerBase) -> list[Datum]:
    """One or two sums with their results to learn, of different lengths."""
    draws = operation.draws()
    return [_sum(draws, tokenizer) for _ in range(draws.choice([1, 2]))]


def _sum(draws: random.Random, tokenizer: PreTrainedTokenizerBase) -> Datum:
    a, b = draws.randrange(100), draws.randrange(100)
    prompt, text = f"{a}+{b}=", f"{a}+{b}={a + b}"
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False), np.int64)
    known = len(tokenizer.encode(prompt, add_special_tokens=False))
    mask_N = np.arange(1, len(tokens)) >= known
    return Datum(tokens[:-1], tokens[1:], mask_N, weights_N=mask_N.astype(np.float32))


@cache
def rounds() -> list[list[str]]:
    """Who does the next of its operations in each round: Zipf's law, everybody once at least.

    A round is what a queue of operations would hand out together: of those that come next, one a policy.
    """
    draws = random.Random(0)
    weights = [1 / rank for rank in range(1, len(POLICIES) + 1)]
    visits = POLICIES + draws.choices(POLICIES, weights, k=OPERATIONS - len(POLICIES))
    draws.shuffle(visits)
    waiting, result = deque(visits), []
    while waiting:
        near = [waiting.popleft() for _ in range(min(3 * WIDEST, len(waiting)))]
        taken = list(dict.fromkeys(near))[:WIDEST]
        for policy in taken:
            near.remove(policy)
        waiting.extendleft(reversed(near))
        result.append(taken)
    return result


def due(n_rounds: int) -> Counter[str]:
    """How many operations each policy has done after the first `n_rounds`."""
    return Counter(policy for together in rounds()[:n_rounds] for policy in together)
