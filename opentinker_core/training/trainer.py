"""The trainer's primitives, each naming a policy: forward, forward_backward, optim_step, state in and out.

Batches of many policies, with different ranks, targets and objectives, go through the base model
together; what a policy gets from it is what it would get alone.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from opentinker_core.config.schema import LoRAConfig, OptimizerConfig
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.lora.adapter import Adapter
from opentinker_core.lora.peft_format import read_peft, write_peft
from opentinker_core.lora.pool import AdapterPool, Wanted
from opentinker_core.models.decoder import Decoder
from opentinker_core.objectives.types import (
    Metrics,
    Objective,
    SignalBatch,
    combine_metrics,
    finalize_metrics,
)
from opentinker_core.policies.residency.host import HostTier
from opentinker_core.policies.residency.types import NoRoomError
from opentinker_core.sampling.distribution import SHAPE_FIELDS
from opentinker_core.training.passes import FusedPass, Share, cut, widened
from opentinker_core.training.residency import states_in_memory
from opentinker_core.training.state import PolicyState
from opentinker_core.trajectories.errors import TrajectoryError
from opentinker_core.trajectories.packing import MicroBatch, micro_batches
from opentinker_core.trajectories.types import Datum

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PolicyBatch:
    """What one `forward_backward` of one policy asks for."""

    policy: str
    datums: Sequence[Datum]
    objective: Objective
    scales: Sequence[np.ndarray]
    """Of each datum, float in the shape of its targets: the factor of each one's loss, from a normalizer
    over the global batch (`objectives.normalizers.token_scales`)."""
    reference_logprobs: Sequence[np.ndarray] | None = None
    """Of each datum, float (N,): `forward` of it with the policy that a KL penalty draws towards."""
    old_logprobs: Sequence[np.ndarray] | None = None
    """Of each datum, float (N,): `forward` of it when the update on them began. None: it begins now."""


@dataclass(frozen=True)
class ForwardBackward:
    """What one `forward_backward` gave."""

    loss: float
    """The normalized sum over the whole batch."""
    metrics: dict[str, float]
    logprobs: list[np.ndarray]
    """Of each datum, float32 in the shape of its targets: the policy's logprob of each, 0 where the mask
    is false."""


@dataclass(frozen=True)
class LayoutSettings:
    """How batches are laid out; none of it changes losses or gradients."""

    micro_batch_tokens: int = 4096
    share_prefix: bool = True
    pack: bool = False


class _Running:
    """A batch that is being worked on."""

    def __init__(self, batch: PolicyBatch, state: PolicyState, micro: list[MicroBatch]) -> None:
        self.batch, self.state, self.micro = batch, state, micro
        self.gradient = Adapter.zeros(state.adapter.layout, state.adapter.row_P.device)
        self.logprobs = _blank(batch.datums)
        self._loss = 0.0
        self._metrics: list[Metrics] = []

    def loss_of(self, micro: MicroBatch, logprobs_M: Tensor) -> Tensor:
        """The loss of one micro-batch; what is reported of it is kept."""
        batch = self.batch
        _scatter(logprobs_M.detach(), micro, self.logprobs)
        signal = SignalBatch.of(
            micro,
            batch.datums,
            batch.scales,
            self.batch.reference_logprobs,
            batch.old_logprobs,
            device=logprobs_M.device,
        )
        loss, metrics = batch.objective(logprobs_M, signal)
        self._loss += loss.item()
        self._metrics.append({name: value.detach() for name, value in metrics.items()})
        return loss

    def result(self) -> ForwardBackward:
        """What it gave, once all of its micro-batches are done."""
        return ForwardBackward(self._loss, finalize_metrics(combine_metrics(self._metrics)), self.logprobs)


class Trainer:
    """Trains policies over one frozen base model whose linears are `MultiLoRALinear` layers."""

    def __init__(
        self,
        decoder: Decoder,
        pool: AdapterPool,
        base_model: str,
        layout: LayoutSettings = LayoutSettings(),
        states: HostTier[PolicyState] | None = None,
    ) -> None:
        """`states`: where policies' states are kept; None: in memory, all of them."""
        self._decoder = decoder
        self._pool = pool
        self._base_model = base_model
        self.layout = layout
        self._device = decoder.device
        self._states = states or states_in_memory()

    def create(self, policy: str, lora: LoRAConfig, seed: int) -> None:
        """Give `policy` a fresh state, replacing any it had.

        Raises:
            UsageError: a LoRA target matches no layer.
        """
        self._states.put(policy, PolicyState.fresh(lora, self._pool.model, seed, self._device))

    def load_checkpoint(self, policy: str, directory: Path, *, with_optimizer: bool = True) -> None:
        """Give `policy` the state of a checkpoint directory, replacing any it had.

        Args:
            with_optimizer: else only the weights; the optimizer starts afresh.
        """
        state = PolicyState.load(directory, self._pool.model, self._device)
        if not with_optimizer:
            state.moments = None
        self._states.put(policy, state)

    def forget(self, policy: str) -> None:
        """Free the state of `policy`, in memory and on disk; nothing happens if it has none."""
        self._states.forget(policy)

    def save_checkpoint(self, policy: str, directory: Path) -> None:
        """Write weights, optimizer state, seed and step of `policy` below `directory`."""
        with self._states.lease(policy) as state, _writing("checkpoint"):
            state.save(directory, self._base_model)

    def publish_snapshot(self, policy: str, directory: Path) -> None:
        """Write the weights of `policy` below `directory` as a PEFT directory."""
        with self._states.lease(policy, whole=False) as state, _writing("sampler weights"):
            write_peft(state.adapter, directory, self._base_model)

    def read_adapter(self, directory: Path) -> Adapter:
        """Load a sampler snapshot for this model, outside of any policy's state."""
        return read_peft(directory, self._pool.model, self._device)

    def state_of(self, policy: str) -> PolicyState:
        """The state of `policy`, to look at; it may be written to disk and loaded anew at any time.

        Raises:
            UsageError: it has none.
        """
        with self._states.lease(policy) as state:
            return state

    def forward(self, policy: str | None, datums: Sequence[Datum]) -> list[np.ndarray]:
        """Logprobs of each datum's targets, float32 in their shape, 0 where the mask is false.

        `policy` None: of the base model.

        Raises:
            UsageError: `policy` has no resident state, or the datums differ in temperature, top_p or top_k.
        """
        return self.forward_all([(policy, datums)])[0]

    @torch.no_grad()
    def forward_all(self, asked: Sequence[tuple[str | None, Sequence[Datum]]]) -> list[list[np.ndarray]]:
        """`forward` of many policies together, as many at a time as the memory for states holds."""
        logprobs = [_blank(datums) for _, datums in asked]
        micro = [self._micro_batches(datums) for _, datums in asked]
        policies = [policy for policy, _ in asked]
        for turn, states in enumerate(self._turns(sorted({p for p in policies if p is not None}))):
            # The base model has no state: its rows go with the first turn.
            present = {None, *states} if turn == 0 else {*states}
            own = [rows if policy in present else [] for rows, policy in zip(micro, policies, strict=True)]
            for taken in self._cut(own, policies):
                with self._shares(taken, asked, states) as shares:
                    results = FusedPass(self._decoder, self._pool, shares).logprobs()
                    for share, logprobs_M in zip(shares, results, strict=True):
                        _scatter(logprobs_M, share.batch, logprobs[share.owner])
        return logprobs

    def _turns(self, policies: Sequence[str]) -> Iterator[dict[str, PolicyState]]:
        """At least one turn, each with as many states as there is room for, leased while it lasts."""
        while True:
            states: dict[str, PolicyState] = {}
            with ExitStack() as leases:
                for policy in policies:
                    try:
                        states[policy] = leases.enter_context(self._states.lease(policy, whole=False))
                    except NoRoomError:
                        if not states:
                            raise
                        break
                yield states
            policies = policies[len(states) :]
            if not policies:
                return

    def forward_backward(
        self,
        policy: str,
        datums: Sequence[Datum],
        objective: Objective,
        scales: Sequence[np.ndarray],
        *,
        reference_logprobs: Sequence[np.ndarray] | None = None,
        old_logprobs: Sequence[np.ndarray] | None = None,
    ) -> ForwardBackward:
        """Add the gradient of the objective over all of `datums` to those `policy` has accumulated.

        Args:
            scales: of each datum, float (N,): see `PolicyBatch`.
            reference_logprobs: of each datum, float (N,): see `PolicyBatch`.
            old_logprobs: likewise.

        Raises:
            UsageError: `policy` has no resident state, there are no datums, or they differ in
                temperature, top_p or top_k.
            TrajectoryError: some datums have weights and some advantages, or `scales` does not fit them.
        """
        batch = PolicyBatch(policy, datums, objective, scales, reference_logprobs, old_logprobs)
        result = self.forward_backward_all([batch])[0]
        if isinstance(result, Exception):
            raise result
        return result

    def forward_backward_all(self, batches: Sequence[PolicyBatch]) -> list[ForwardBackward | Exception]:
        """`forward_backward` of many policies together, as many at a time as the memory for states holds.

        Returns:
            Of each batch its result, or what it failed with: then it has added nothing to its policy's
            gradients. Where batches that run together fail, each is tried alone.
        """
        outcomes: dict[int, ForwardBackward | Exception] = {}
        turns = [dict(enumerate(batches))]
        while turns:
            waiting = turns.pop()
            try:
                done = self._take_turn(waiting)
            except Exception as error:  # noqa: BLE001 - it is the outcome of those it is due to
                if len(waiting) > 1:
                    _LOG.warning("%d batches failed, each is run alone: %s", len(waiting), error)
                    turns += [{index: batch} for index, batch in reversed(waiting.items())]
                    continue
                done = dict.fromkeys(waiting, error)
            outcomes |= done
            if left := {index: batch for index, batch in waiting.items() if index not in done}:
                turns.append(left)
        return [outcomes[index] for index in range(len(batches))]

    def _take_turn(self, batches: Mapping[int, PolicyBatch]) -> dict[int, ForwardBackward | Exception]:
        """The outcomes of the first batches, as many as there is room for, at least one.

        Gradients are added when all of it is done; if it raises, no policy's have changed.
        """
        refused: dict[int, OpenTinkerError] = {}
        running: dict[int, _Running] = {}
        with ExitStack() as leases:
            for index, batch in batches.items():
                try:
                    running[index] = self._start(batch, leases)
                except OpenTinkerError as error:
                    if running and isinstance(error, NoRoomError):
                        break
                    refused[index] = error
            if running:
                self._run([*running.values()])
            results = {index: one.result() for index, one in running.items()}
            for one in running.values():
                self._states.mark_dirty(one.batch.policy)
                one.state.accumulate(one.gradient)
        return {**refused, **results}

    def optim_step(self, policy: str, config: OptimizerConfig) -> dict[str, float]:
        """One AdamW step of `policy` with its accumulated gradients, which are cleared."""
        with self._states.lease(policy) as state:
            self._states.mark_dirty(policy)
            norm = state.apply_gradients(config)
            self._states.resized(policy)
            return {"grad_norm": norm}

    def discard_gradient(self, policy: str) -> None:
        """Forget what `policy` has accumulated since its last step; nothing happens if it has no state."""
        with suppress(UsageError), self._states.lease(policy) as state:
            self._states.mark_dirty(policy)
            state.gradient = None
            self._states.resized(policy)

    def _start(self, batch: PolicyBatch, leases: ExitStack) -> "_Running":
        if not batch.datums:
            raise UsageError("datums: [] is not accepted; accepted: at least one datum")
        if [len(scale) for scale in batch.scales] != [len(datum) for datum in batch.datums]:
            lengths = [len(scale) for scale in batch.scales]
            raise TrajectoryError("scales", lengths, "one (N,) array a datum")
        if len({datum.weights_N is None for datum in batch.datums}) > 1:
            raise TrajectoryError("datums", "weights and advantages mixed", "one kind of signal a batch")
        micro = self._micro_batches(batch.datums)
        with ExitStack() as own:
            state = own.enter_context(self._states.lease(batch.policy))
            own.callback(self._states.resized, batch.policy)
            self._states.reserve(
                batch.policy, state.adapter.nbytes
            )  # the gradient, which is its own at first
            running = _Running(batch, state, micro)
            leases.enter_context(own.pop_all())
        return running

    def _run(self, running: Sequence[_Running]) -> None:
        asked = [(one.batch.policy, one.batch.datums) for one in running]
        states = {one.batch.policy: one.state for one in running}
        gradients = [one.gradient for one in running]
        for taken in self._cut([one.micro for one in running], [policy for policy, _ in asked]):
            with self._shares(taken, asked, states, gradients) as shares:
                logprobs = FusedPass(self._decoder, self._pool, shares).logprobs()
                losses = [
                    running[share.owner].loss_of(share.batch, logprobs_M)
                    for share, logprobs_M in zip(shares, logprobs, strict=True)
                ]
                torch.autograd.backward(losses)

    def _cut(
        self, micro: Sequence[Sequence[MicroBatch]], policies: Sequence[str | None]
    ) -> Iterator[list[tuple[int, MicroBatch]]]:
        return cut(micro, policies, self.layout.micro_batch_tokens, self._pool.max_slots)

    @contextmanager
    def _shares(
        self,
        taken: Sequence[tuple[int, MicroBatch]],
        asked: Sequence[tuple[str | None, Sequence[Datum]]],
        states: Mapping[str, PolicyState],
        gradients: Sequence[Adapter] | None = None,
    ) -> Iterator[list[Share]]:
        """The shares of a pass, with their adapters in slots for as long as it lasts."""
        policies = {policy for policy in (asked[owner][0] for owner, _ in taken) if policy is not None}
        wanted = {("state", p): Wanted(states[p].adapter, states[p].revision) for p in sorted(policies)}
        with self._pool.lease(wanted) as slots:
            slot_of = {policy: slots["state", policy] for policy in policies}
            shares = [
                Share(
                    owner,
                    batch,
                    asked[owner][1],
                    slot_of.get(asked[owner][0] or ""),
                    gradients[owner] if gradients else None,
                )
                for owner, batch in taken
            ]
            yield sorted(shares, key=_place)

    def _micro_batches(self, datums: Sequence[Datum]) -> list[MicroBatch]:
        _check_one_shape(datums)
        layout = self.layout
        batches = micro_batches(
            datums, layout.micro_batch_tokens, share_prefix=layout.share_prefix, pack=layout.pack
        )
        return [widened(batch) for batch in batches]


@contextmanager
def _writing(what: str) -> Iterator[None]:
    """Raise OpenTinkerError if files cannot be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise OpenTinkerError(f"the {what} cannot be written: {reason or error}") from error


def _place(share: Share) -> tuple[int, int]:
    """Orders shares so that rank buckets and slots are adjacent; a policy's own stay in their order."""
    return (share.slot.rank, share.slot.index) if share.slot else (0, 0)


def _blank(datums: Sequence[Datum]) -> list[np.ndarray]:
    return [np.zeros(datum.target_tokens_N.shape, np.float32) for datum in datums]


def _check_one_shape(datums: Sequence[Datum]) -> None:
    """All logprobs of a call are those of one sampled distribution."""
    for name in SHAPE_FIELDS:
        for index, datum in enumerate(datums):
            first, other = getattr(datums[0], name), getattr(datum, name)
            if other != first:
                raise UsageError(
                    f"datums[{index}].{name}: {other!r} is not accepted; "
                    f"accepted: {first!r} as in datums[0], the same for all datums of a call"
                )


def _scatter(logprobs_M: Tensor, batch: MicroBatch, out: list[np.ndarray]) -> None:
    """Put each weighted position's logprobs back to its datum's array."""
    logprobs = logprobs_M.float().cpu().numpy().reshape(len(logprobs_M), -1)
    for datum, at in batch.runs():
        own, places = out[datum], batch.position_M[at]
        own[places] = logprobs[at, : own[0].size].reshape(len(places), *own.shape[1:])
