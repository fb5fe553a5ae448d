"""One training run in this process: a method a phase, each of which can be repeated.

The catalog is the durable truth. A phase first looks whether the catalog has its outcome already;
whatever is only in memory (the policy's state, the batch of a step) is rebuilt from the last
published version. So a run that is killed anywhere goes on with `open_session(run_id=...)` and
ends with the same tokens, losses and snapshot as one that was left alone.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np

from opentinker_core.advantages.running import from_metrics
from opentinker_core.agents.episodes import EpisodeSpec, play
from opentinker_core.agents.making import check_environments
from opentinker_core.config.schema import (
    CorrectionKind,
    CorrectionLevel,
    OptimizerConfig,
    RLPhase,
    SamplingConfig,
    SFTPhase,
    TrainConfig,
)
from opentinker_core.errors import UsageError
from opentinker_core.objectives.compose import rl_objective
from opentinker_core.objectives.cross_entropy import cross_entropy
from opentinker_core.objectives.normalizers import token_scales, trajectory_names
from opentinker_core.policies.types import (
    Evaluation,
    Policy,
    PolicyVersion,
    Run,
    RunStatus,
    TrajectorySet,
)
from opentinker_core.runtime import demonstrations, opening
from opentinker_core.runtime.agreement import Agreement
from opentinker_core.runtime.batches import Batch, rl_batch
from opentinker_core.runtime.choosing import open_run_engine
from opentinker_core.runtime.held_out import evaluation_of, play_held_out
from opentinker_core.runtime.operations import ClosedError
from opentinker_core.runtime.policy_states import PolicyStates
from opentinker_core.runtime.protocol import RunEngine
from opentinker_core.runtime.trajectory_sets import TrajectorySets
from opentinker_core.runtime.workspace import Workspace
from opentinker_core.sampling.protocol import BASE
from opentinker_core.seeds import derive_seed
from opentinker_core.trajectories.datums import to_datum
from opentinker_core.trajectories.digest import token_ids_digest
from opentinker_core.trajectories.types import Datum


def rollout_specs(seed: int, phase: RLPhase, step: int) -> list[EpisodeSpec]:
    """The episodes of an RL step: each draws from (run seed, step, group, member)."""
    return [
        EpisodeSpec(
            environment_seed=derive_seed(seed, "problem", step, group),
            group=group,
            member=member,
            draw_seed=derive_seed(seed, "draw", step, group, member),
        )
        for group in range(phase.groups)
        for member in range(phase.group_size)
    ]


class RunSession:
    """See the module. Steps count from 1; those of the SFT phase come first."""

    def __init__(
        self, workspace: Workspace, run: Run, config: TrainConfig, policy: Policy, engine: RunEngine
    ) -> None:
        self.workspace = workspace
        self.run = run
        self.config = config
        self.policy = policy
        self.engine = engine
        self.states = PolicyStates(workspace, run, config, policy, engine)
        self.sets = TrajectorySets(workspace, run.run_id, config, engine)
        self._batch: tuple[TrajectorySet, Batch] | None = None
        self._agreement = Agreement(config, engine, self.states, run.run_id)
        self.version = self.states.first_version()
        """The last version this run published."""
        self._served: str | None = None
        """The version of the last rollouts, or of the next."""
        self.refresh(self.version)

    @property
    def next_step(self) -> int:
        """The first step whose outcome is not published."""
        return self.version.step + 1

    @property
    def sft_steps(self) -> int:
        """Number of steps of the SFT phase, which come before those of the RL phase."""
        return self.config.sft_steps

    def rollout(self, step: int) -> TrajectorySet:
        """Sample the episodes of an RL step with the current version; stored once, reused when repeated."""
        if (stored := self.sets.stored(step)) is not None:
            return stored
        phase = self.rl_phase
        specs = rollout_specs(self.config.seed, phase, step)
        settings = self.sets.settings(phase.sampling, "train", step, phase.max_turns)
        trajectories = play(specs, settings, self.engine.sampler, self.version.ref)
        saved = self.sets.save(trajectories, step, "train", self.version.ref)
        with self.workspace.catalog.transaction():
            recorded = self.sets.record(saved)
            self.states.reserve(step)  # here it costs no commit of its own
        return recorded

    def build_batch(self, step: int, trajectory_set: TrajectorySet) -> dict[str, float]:
        """Turn the episodes of a step into datums with advantages, ready for `update`."""
        running = from_metrics(self.version.metrics)
        shuffle_seed = derive_seed(self.config.seed, "shuffle", step)
        batch = rl_batch(self.sets.load(trajectory_set), self.rl_phase, running, shuffle_seed)
        self._batch = (trajectory_set, batch)
        return batch.summary

    def update(self, step: int) -> dict[str, float]:
        """One optimizer step on the batch of `step`, from the published state however often it is called."""
        (_, batch), phase = self._batch_of(step), self.rl_phase
        self.states.restore(self.version)
        self._agreement.compare(self.version)
        metrics = batch.summary | self._agreement.metrics
        if not batch.datums:  # no episode told another from its group: nothing to learn
            return metrics
        self.states.touched()
        result = self.engine.trainer.forward_backward(
            self.run.run_id,
            batch.datums,
            rl_objective(phase.objective),
            batch.scales,
            reference_logprobs=self._reference_logprobs(batch.datums),
            old_logprobs=self._old_logprobs(batch.datums),
        )
        metrics |= result.metrics
        metrics |= self._agreement.of_update(result.logprobs, batch.datums, self.version.ref)
        return metrics | self._optim_step(phase.optimizer.at(step - self.sft_steps, phase.steps))

    def sft(
        self, start: int, stop: int, report: Callable[[int, float], None] = lambda *_: None
    ) -> dict[str, float]:
        """SFT steps `start` to `stop`, both included; calls `report(step, loss)` after each.

        Returns:
            The metrics of the last of them.
        """
        phase, seed = self._sft, self.config.seed
        # Drawn with replacement across epochs: each row of a batch counts as a trajectory of its own.
        datums = [
            replace(to_datum(t, weights=1.0), trajectory_id="")
            for t in self.sets.load(self.demonstrations())
            if t.turns
        ]
        if not datums:
            raise UsageError(
                f"sft: none of the demonstrations of {self.config.environment.id!r} has a turn of "
                f"policy {self.config.policy.name!r}; accepted: one at least, or no phase 'sft'"
            )
        self.states.restore(self.version)
        self._agreement.compare(self.version)
        self.states.touched()
        metrics: dict[str, float] = {}
        for step in range(start, stop + 1):
            rows = demonstrations.batch_rows(seed, step, phase.batch_size, len(datums))
            batch = [datums[row] for row in rows]
            scales = token_scales(phase.normalizer, batch, max(len(datum) for datum in batch))
            result = self.engine.trainer.forward_backward(self.run.run_id, batch, cross_entropy, scales)
            metrics = result.metrics | self._optim_step(phase.optimizer.at(step, phase.steps))
            report(step, result.loss)
        return metrics | self._agreement.metrics

    def _optim_step(self, optimizer: OptimizerConfig) -> dict[str, float]:
        metrics = self.engine.trainer.optim_step(self.run.run_id, optimizer)
        return metrics | {"learning_rate": optimizer.learning_rate}

    def demonstrations(self) -> TrajectorySet:
        """The demonstrations of the SFT phase, one set for all of its steps; stored once."""
        if (stored := self.sets.stored(1)) is not None:
            return stored
        phase = self._sft
        sampling = self.config.rl.sampling if self.config.rl else SamplingConfig()
        settings = self.sets.settings(sampling, "train", 1, self.config.max_turns)
        if phase.data == "environment":
            trajectories = demonstrations.from_environment(settings, self.config.seed, phase.examples)
        else:
            trajectories = demonstrations.from_file(Path(phase.data), settings)
        return self.sets.record(self.sets.save(trajectories, 1, "train", "demonstration"))

    def publish(self, step: int, metrics: dict[str, float]) -> PolicyVersion:
        """Publish the state after `step`: snapshots first, then version and lineage in one transaction."""
        if self.version.step >= step:
            return self.version
        supervised = step <= self.sft_steps
        trained_on = self.demonstrations() if supervised else self._batch_of(step)[0]
        self.version = self.states.publish(
            step, "sft" if supervised else "rl", metrics, [trained_on.set_id], self.version.ref
        )
        self._batch = None
        self.sets.release(keep=trained_on if supervised else None)
        return self.version

    def refresh(self, version: PolicyVersion) -> None:
        """Let the sampler serve `version` from its published snapshot, and compare it with the trainer.

        Raises:
            CanaryError: what it serves is not what the trainer holds (see `config.canary`).
        """
        self.engine.versions.hold(self.engine.sampler, version, self.run.run_id)
        if version == self.version:
            before, self._served = self._served, version.ref
            if before != version.ref:
                self._let_go(before)
            self._agreement.served(version)

    def _let_go(self, ref: str | None) -> None:
        if ref is not None:
            self.engine.versions.let_go(self.engine.sampler, ref, self.run.run_id)

    def evaluates_at(self, step: int) -> bool:
        """Whether the version of `step` is evaluated: every `evaluation.every` steps, and the last."""
        every = self.config.evaluation.every
        return step == self.config.steps or (every > 0 and step % every == 0)

    def evaluate(self, ref: str) -> Evaluation:
        """Evaluate a version, or `base`, on held-out problems: the same ones and draws for each."""
        catalog, config = self.workspace.catalog, self.config
        if done := catalog.evaluations(run_id=self.run.run_id, subject=ref):
            self._mark_best(done[0])  # a kill may have come before it
            return done[0]
        step = 0
        if ref != BASE:
            version = catalog.version(ref)
            step = version.step
            self.refresh(version)
        elsewhere = config.evaluation.environment
        settings = self.sets.settings(
            config.evaluation_sampling, "held_out", step, config.max_turns, elsewhere
        )
        try:
            trajectories = play_held_out(config, settings, self.engine.sampler, ref)
        finally:
            if ref not in (BASE, self._served):
                self._let_go(ref)
        saved = self.sets.save(trajectories, step, "evaluation", ref, elsewhere)
        return self.record_evaluation(evaluation_of(config, ref, step, self.run.run_id, trajectories, saved))

    def record_evaluation(self, evaluation: Evaluation) -> Evaluation:
        """Record an evaluation of one of the run's versions, or of the base model."""
        recorded = self.workspace.catalog.add_evaluation(evaluation)
        self._mark_best(recorded)
        return recorded

    def finish(self, status: RunStatus, error: str | None = None) -> None:
        """Record how the run ended, which samples no more."""
        self.run = self.workspace.catalog.update_run(self.run.run_id, status=status, error=error)
        with suppress(ClosedError):
            self._let_go(self._served)

    def token_ids_digest(self) -> str:
        """One digest over the token ids of all training sets, in the order of the steps."""
        return token_ids_digest(t for item in self.sets.training() for t in self.sets.load(item))

    def _batch_of(self, step: int) -> tuple[TrajectorySet, Batch]:
        """The batch at hand if it is that of `step`; else it is built again from what is stored."""
        if self._batch is None or self._batch[0].step != step:
            self.build_batch(step, self.rollout(step))
        assert self._batch is not None
        return self._batch

    @property
    def rl_phase(self) -> RLPhase:
        """Raises UsageError if the config has none."""
        if self.config.rl is None:
            raise UsageError("rl: the config has no such phase")
        return self.config.rl

    @property
    def _sft(self) -> SFTPhase:
        if self.config.sft is None:
            raise UsageError("sft: the config has no such phase")
        return self.config.sft

    def _old_logprobs(self, datums: Sequence[Datum]) -> list[np.ndarray] | None:
        """Of all datums, where the weight of a trajectory may need rows of several micro-batches."""
        correction = self.rl_phase.objective.correction
        by_token = correction.kind is CorrectionKind.NONE or correction.level is CorrectionLevel.TOKEN
        if by_token or len(set(trajectory_names(datums))) == len(datums):
            return None
        return self.engine.trainer.forward(self.run.run_id, datums)

    def _reference_logprobs(self, datums: Sequence[Datum]) -> list[np.ndarray] | None:
        """Of all datums, by whom the KL penalty draws towards; None: there is no penalty."""
        objective = self.rl_phase.objective
        if objective.kl_coefficient == 0:
            return None
        reference = self.states.reference() if objective.needs_start else None  # None: the base model
        return self.engine.trainer.forward(reference, datums)

    def _mark_best(self, evaluation: Evaluation) -> None:
        """Move `best`, unless the version it names did better in the same environment, in whichever run."""
        if evaluation.subject == BASE:
            return
        catalog = self.workspace.catalog
        version = catalog.version(evaluation.subject)
        best = catalog.aliases(version.policy_name).get("best")
        rivals = catalog.evaluations(subject=f"{version.policy_name}@{best}") if best is not None else []
        if all(evaluation.mean >= r.mean for r in rivals if r.environment == evaluation.environment):
            catalog.set_alias(version.policy_name, "best", version.number)


def open_session(
    config: TrainConfig | None,
    workspace: Workspace,
    *,
    run_id: str | None = None,
    flow_run_id: str | None = None,
    kind: type[RunSession] = RunSession,
) -> RunSession:
    """Start the run that `config` describes, or go on with one: `run_id`, or that of a retried flow run.

    `kind`: of the session.

    Raises:
        UsageError: no config for a new run, or one that is not the run's; a wrong model, LoRA
            target, environment or start.
    """
    catalog = workspace.catalog
    run = opening.find_run(catalog, run_id, flow_run_id, config.name if config else None)
    if run is not None:
        config = opening.recorded_config(run, config)
    if config is None:
        raise UsageError("config: missing; accepted: a training config, or the id of a run to go on with")
    check_environments(config)  # what is wrong is refused before the model is loaded
    if run is None:
        opening.check_startable(catalog, config)
    engine = open_run_engine(
        config.policy.base_model,
        config.runtime,
        workspace.home,
        workspace.snapshots.fetch,
        tenant=run.run_id
        if run is not None
        else uuid4().hex,  # runs that share an engine get equal parts of it
    )
    engine.check_targets(config.policy.lora)
    if config.rl is not None and config.rl.sampling.max_tokens >= engine.max_context:
        raise UsageError(
            f"rl.sampling.max_tokens: {config.rl.sampling.max_tokens}; "
            f"accepted: fewer than the model's context of {engine.max_context}"
        )
    if run is None:
        run, config, policy = opening.start_run(catalog, config, flow_run_id)
    else:
        run = opening.resume_run(catalog, run, flow_run_id)
        policy = catalog.policy(config.policy.name)
    return kind(workspace, run, config, policy, engine)
