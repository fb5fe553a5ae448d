"""Whether policies that train together are isolated: measured on the live trainer, to the bit.

A policy's losses, logprobs, gradients, weights, moments and step count must not depend, in a single
bit, on who trains beside it. Each check trains the same policies once more with something changed
that is none of their business, and compares digests of everything, step by step.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from opentinker_core.evaluation.participants import Data, Participant
from opentinker_core.lora.layer import install
from opentinker_core.lora.pool import AdapterPool
from opentinker_core.models.decoder import Decoder
from opentinker_core.training.trainer import ForwardBackward, LayoutSettings, PolicyBatch, Trainer

_SLOTS = 64


@dataclass
class Record:
    """Digests of what training did to one policy, one a step in which it took part."""

    loss: list[str] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    gradient: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    moments: list[str] = field(default_factory=list)
    step: list[str] = field(default_factory=list)

    def differing(self, other: "Record") -> set[str]:
        """Names of the fields that differ in some step."""
        return {name for name in FIELDS if getattr(self, name) != getattr(other, name)}


FIELDS = tuple(item.name for item in fields(Record))
"""What is compared."""

Schedule = Callable[["Training", Sequence[PolicyBatch]], None]
"""Trains all policies for one step."""


def together(training: "Training", batches: Sequence[PolicyBatch]) -> None:
    """All gradients in one fused call, then all steps."""
    training.forward_backward(batches)
    for batch in batches:
        training.step(batch.policy)


def interleaved(training: "Training", batches: Sequence[PolicyBatch]) -> None:
    """A's gradient, B's gradient, A's step, C's gradient, B's step, ..."""
    for index, batch in enumerate(batches):
        training.forward_backward([batch])
        if index:
            training.step(batches[index - 1].policy)
    training.step(batches[-1].policy)


def in_reverse(training: "Training", batches: Sequence[PolicyBatch]) -> None:
    """Like `together`, with the policies in the opposite order."""
    together(training, batches[::-1])


@dataclass(frozen=True)
class Setting:
    """How participants train."""

    participants: tuple[Participant, ...]
    steps: int
    schedule: Schedule = together
    layout: LayoutSettings = field(default_factory=LayoutSettings)
    slots: int = _SLOTS
    """Adapters of one rank bucket in a pass."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(participant.name for participant in self.participants)

    def with_others(self, subjects: Sequence[Participant], change: Callable[[Data], Data]) -> "Setting":
        """The setting in which the data of all but the subjects are changed."""
        return replace(
            self,
            participants=tuple(
                p if p in subjects else replace(p, data=change(p.data)) for p in self.participants
            ),
        )


class Bench:
    """One base model on which trainings are repeated."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        """`model` gets LoRA layers."""
        self.name = name
        self.layout = install(model)
        self.decoder = Decoder.of(model)
        self._batches: dict[tuple[str, int], PolicyBatch] = {}

    def trainer(self, slots: int = _SLOTS) -> Trainer:
        """A trainer without policies."""
        pool = AdapterPool(self.layout, self.decoder.device, self.decoder.model.dtype, slots)
        return Trainer(self.decoder, pool, self.name)

    def train(self, setting: Setting) -> dict[str, Record]:
        """Train the participants from fresh adapters; what happened to each, by name."""
        trainer = self.trainer(setting.slots)
        trainer.layout = setting.layout
        training = Training(trainer, setting.participants)
        for step in range(setting.steps):
            active = [p for p in setting.participants if p.active_steps is None or step < p.active_steps]
            setting.schedule(training, [self.batch(p, step) for p in active])
        return training.finish()

    def batch(self, participant: Participant, step: int) -> PolicyBatch:
        """The participant's data of a step, drawn once."""
        key = (repr(replace(participant, active_steps=None)), step)
        if key not in self._batches:
            base = self.trainer()
            vocabulary = int(self.decoder.config.get_text_config().vocab_size)
            self._batches[key] = participant.batch(
                step, vocabulary, lambda datums: base.forward(None, datums)
            )
        return self._batches[key]


class Training:
    """A trainer and its participants, and the record of what it does to each."""

    def __init__(self, trainer: Trainer, participants: Sequence[Participant]) -> None:
        self.trainer = trainer
        self.losses: dict[str, list[float]] = {participant.name: [] for participant in participants}
        self._optimizers = {participant.name: participant.optimizer for participant in participants}
        self._records = {participant.name: Record() for participant in participants}
        for participant in participants:
            trainer.create(participant.name, participant.lora, participant.data.seed)

    def forward_backward(self, batches: Sequence[PolicyBatch]) -> None:
        """One fused call."""
        for batch, result in zip(batches, self.trainer.forward_backward_all(batches), strict=True):
            if isinstance(result, Exception):
                raise result
            self._record_gradient(batch.policy, result)

    def step(self, policy: str) -> None:
        """The policy's own optimizer step."""
        self.trainer.optim_step(policy, self._optimizers[policy])
        self._record_state(policy)

    def finish(self) -> dict[str, Record]:
        """The records, with all states at the end, those of idle policies too."""
        for policy in self._records:
            self._record_state(policy)
        return self._records

    def _record_gradient(self, policy: str, result: ForwardBackward) -> None:
        gradient = self.trainer.state_of(policy).gradient
        assert gradient is not None
        self.losses[policy].append(result.loss)
        record = self._records[policy]
        record.loss.append(result.loss.hex())
        record.logprobs.append(_digest(result.logprobs))
        record.gradient.append(_digest([gradient.row_P]))

    def _record_state(self, policy: str) -> None:
        state, record = self.trainer.state_of(policy), self._records[policy]
        record.weights.append(_digest([state.adapter.row_P]))
        record.step.append(str(state.step))
        if state.moments is not None:
            moments = state.moments
            record.moments.append(_digest([moments.exp_avg_P, moments.exp_avg_sq_P, moments.updates]))


def _digest(arrays: Iterable[Tensor | np.ndarray]) -> str:
    """Of the bits: 0.0 and -0.0 differ."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        values = array.detach().cpu().numpy() if isinstance(array, Tensor) else array
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Comparison:
    """Two settings that must be the same to the subjects."""

    change: str
    reference: Setting
    changed: Setting
    subjects: tuple[str, ...]


@dataclass
class Verdict:
    """What one change did to the policies whose business it was not."""

    change: str
    compared: int = 0
    differing: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in FIELDS})
    """Names of the policies of which a field differs, by field."""

    @property
    def isolated(self) -> bool:
        return not any(self.differing.values())


def comparisons(setting: Setting) -> Iterator[Comparison]:
    """Everything that is changed; each policy is a subject of every kind of change."""
    everyone = setting.names

    def of_all(change: str, changed: Setting) -> Comparison:
        return Comparison(change, setting, changed, everyone)

    yield of_all("trained again", setting)
    yield of_all("call in reverse order", replace(setting, schedule=in_reverse))
    yield of_all("steps interleaved", replace(setting, schedule=interleaved))
    yield of_all("one slot for all", replace(setting, slots=1))
    for participant in setting.participants:
        alone = replace(setting, participants=(participant,))
        yield Comparison("each trained alone", setting, alone, (participant.name,))
    for half in (setting.participants[::2], setting.participants[1::2]):
        names = tuple(participant.name for participant in half)
        for change, data in _CHANGED_DATA.items():
            yield Comparison(change, setting, setting.with_others(half, data), names)


def idling(setting: Setting, steps: int) -> Comparison:
    """Half of the policies stop after their first step while the others go on, on little data."""
    little = setting.with_others((), lambda data: replace(data, groups=1, group_size=1))
    active = little.participants[::2]
    stopping = tuple(p if p in active else replace(p, active_steps=1) for p in little.participants)
    return Comparison(
        f"others take {steps} steps",
        replace(little, steps=1),
        replace(little, participants=stopping, steps=steps),
        tuple(p.name for p in little.participants if p not in active),
    )


_CHANGED_DATA: Mapping[str, Callable[[Data], Data]] = {
    "others' data changed": lambda data: replace(data, seed=data.seed + 1000),
    "others' lengths changed": lambda data: replace(
        data, seed=data.seed + 2000, groups=3, group_size=3, prompt=30, completion=40
    ),
    "others' rows removed": lambda data: replace(data, groups=1, group_size=1),
}


def verdicts(
    bench: Bench, compared: Iterable[Comparison], started: Callable[[str], None] = lambda _: None
) -> list[Verdict]:
    """Train both settings of each comparison and compare; one verdict a change.

    Adjacent comparisons with one reference train it once. `started` is told each change.
    """
    setting, reference = None, dict[str, Record]()
    found: dict[str, Verdict] = {}
    for comparison in compared:
        started(comparison.change)
        if comparison.reference != setting:
            setting, reference = comparison.reference, bench.train(comparison.reference)
        changed = bench.train(comparison.changed)
        verdict = found.setdefault(comparison.change, Verdict(comparison.change))
        verdict.compared += len(comparison.subjects)
        for name in comparison.subjects:
            for item in reference[name].differing(changed[name]):
                verdict.differing[item].append(name)
    return list(found.values())
