"""Runs of several policies that play together: `JointSession` leads their `MemberSession`s.

Each policy has a run, a state and versions of its own, as if it were trained alone; what they have in
common are the episodes. One rollout plays them with all policies' newest versions, and each member
stores and trains on the turns of its own agents. What happens is logged, phase by phase, and a checker
recomputes order, barriers, versions and rewards from the log alone (docs/coordination.md).
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from envs.multi import Recomputes
from envs.protocol import Closes
from opentinker_core.agents.coordination.checker import check
from opentinker_core.agents.coordination.log import EventLog, Kind
from opentinker_core.agents.coordination.protocol import CoordinationProtocol, Phase
from opentinker_core.agents.coordination.violations import Violation
from opentinker_core.agents.episodes import refuse_failure_of_all
from opentinker_core.agents.league import Seat, opponent_version
from opentinker_core.agents.playing import EpisodeSpec, Play, Played, Table, demonstrate_all, play_all
from opentinker_core.config.schema import SamplingConfig
from opentinker_core.errors import OpenTinkerError
from opentinker_core.policies.types import Evaluation, PolicyVersion, TrajectorySet
from opentinker_core.runtime import demonstrations
from opentinker_core.runtime.held_out import evaluation_of, held_out_specs
from opentinker_core.runtime.session import RunSession, rollout_specs
from opentinker_core.sampling.protocol import BASE
from opentinker_core.trajectories.types import Trajectory

_LOG = logging.getLogger(__name__)

_SHOWN = 3
"""Violations that a message names."""


class Journal:
    """The log of one step of a joint run; every step has one of its own, and a file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.log = EventLog()

    def begin(self, step: int, versions: Mapping[str, str], *, played: bool = False) -> None:
        """Begin the log of a step that is sampled with `versions`.

        `played`: its episodes are stored, so that their log was saved, and is gone on with.

        Raises:
            OpenTinkerError: the log was changed, or cannot be read.
        """
        path = self._path(step)
        if played and path.exists():
            self.log = _read(path)
            return
        if played:
            _LOG.warning("%s is not there: the episodes of step %d are not checked", path, step)
        self.log = EventLog()
        for policy, version in versions.items():
            detail = {"phase": str(Phase.REFRESH), "policy": policy}
            self.log.append(Kind.PHASE_ENDED, step - 1, version=version, detail=detail)

    def began(self, phase: Phase, step: int, policy: str = "") -> None:
        """Write down that a phase begins in a policy (or, of a rollout, in all)."""
        detail = {"phase": str(phase), "policy": policy}
        if not self._has(Kind.PHASE_BEGAN, detail):  # a resumed run begins again what it did not end
            self.log.append(Kind.PHASE_BEGAN, step, detail=detail)

    def ended(self, phase: Phase, step: int, policy: str = "", version: str = "") -> None:
        """Write down that it has ended; `version`: what a refresh serves."""
        detail = {"phase": str(phase), "policy": policy}
        if not self._has(Kind.PHASE_ENDED, detail, step):
            self.log.append(Kind.PHASE_ENDED, step, version=version, detail=detail)

    def save(self, step: int) -> None:
        """Write the log to its file, as a whole."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._path(step)
        draft = path.with_suffix(".part")
        self.log.write(draft)
        draft.replace(path)

    def _has(self, kind: Kind, detail: dict[str, str], step: int | None = None) -> bool:
        return any(
            event.kind is kind and event.detail == detail and step in (None, event.generation)
            for event in self.log
        )

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:06d}.jsonl"


def _read(path: Path) -> EventLog:
    try:
        return EventLog.read(path.read_text(encoding="utf-8").splitlines())
    except (OpenTinkerError, OSError, ValueError, RecursionError) as error:
        raise OpenTinkerError(
            f"{path}: {error}; accepted: the log as it was written, or none, and the step is not checked"
        ) from error


class MemberSession(RunSession):
    """The run of one policy among several: its episodes are played by the joint session."""

    journal: Journal | None = None

    @property
    def protocol(self) -> CoordinationProtocol:
        """Of the joint run."""
        assert self.config.joint is not None
        return self.config.joint.protocol

    @property
    def agents(self) -> tuple[str, ...]:
        """Those that this policy plays."""
        name = self.config.policy.name
        return tuple(agent for agent, policy in self.protocol.policies.items() if policy == name)

    def own(self, played: Sequence[Played]) -> list[Trajectory]:
        """The trajectories of this policy's agents, in the order of the episodes."""
        return [row for one in played for agent in self.agents for row in one.trajectories[agent]]

    def rollout(self, step: int) -> TrajectorySet:
        """The stored episodes of an RL step.

        Raises:
            OpenTinkerError: they were not played yet.
        """
        stored = self.sets.stored(step)
        if stored is None:
            raise OpenTinkerError(f"run {self.run.name}: the episodes of step {step} were not played yet")
        return stored

    def update(self, step: int) -> dict[str, float]:
        """As `RunSession.update`; of a step that was published before a kill, its metrics."""
        assert self.journal is not None
        name = self.config.policy.name
        self.journal.began(Phase.UPDATE, step, name)
        metrics = self.version.metrics if self.version.step >= step else super().update(step)
        self.journal.ended(Phase.UPDATE, step, name)
        return metrics

    def refresh(self, version: PolicyVersion) -> None:
        """As `RunSession.refresh`, written down."""
        name, step = self.config.policy.name, version.step
        noted = self.journal is not None and version == self.version and step > self.sft_steps
        if noted and self.journal is not None:
            self.journal.began(Phase.REFRESH, step, name)
        super().refresh(version)
        if noted and self.journal is not None:
            self.journal.ended(Phase.REFRESH, step, name, version.ref)

    def demonstrations(self) -> TrajectorySet:
        """What the joint environment demonstrates to this policy's agents; stored once."""
        if (stored := self.sets.stored(1)) is not None:
            return stored
        phase = self._sft
        if phase.data != "environment":
            return super().demonstrations()
        sampling = self.config.rl.sampling if self.config.rl else SamplingConfig()
        table = self.sets.table(sampling, "train", 1, self.config.max_turns)
        specs = demonstrations.specs(self.config.seed, phase.examples)
        shown = dict.fromkeys(table.protocol.policies.values(), "demonstration")
        played = demonstrate_all([Play(spec, shown) for spec in specs], table)
        refuse_failure_of_all(played, table.environment, 1)
        return self.sets.record(self.sets.save(self.own(played), 1, "train", "demonstration"))


class JointSession:
    """See the module. The sessions of all members are open; steps are the same for all of them."""

    def __init__(self, members: Sequence[MemberSession]) -> None:
        """Bind the members, which must be those of one joint run."""
        self.members = {member.config.policy.name: member for member in members}
        lead = members[0]
        assert lead.config.joint is not None
        self.part = lead.config.joint
        self._lead = lead
        self._journal = Journal(lead.workspace.home / "runs" / self.part.joint_id / "events")
        for member in members:
            member.journal = self._journal

    @property
    def next_step(self) -> int:
        """The first step that is not published by all."""
        return min(member.next_step for member in self.members.values())

    def rollout(self, step: int) -> dict[str, TrajectorySet]:
        """Play the episodes of an RL step with all policies' versions; a set a policy, stored once."""
        versions = {name: self._sampled(member, step) for name, member in self.members.items()}
        stored = {name: member.sets.stored(step) for name, member in self.members.items()}
        found = {name: one for name, one in stored.items() if one is not None}
        played = len(found) == len(stored)  # all were recorded at once
        self._journal.begin(step, versions, played=played)
        self._journal.began(Phase.ROLLOUT, step)
        if not played:
            found = self._play(step, versions)
        self._journal.ended(Phase.ROLLOUT, step)
        self._journal.save(step)
        return found

    def check(self, step: int) -> int:
        """Save the log of a step and recompute it, if it is to be checked; gives the number of events.

        Raises:
            OpenTinkerError: the step was not coordinated as the protocol says.
        """
        self._journal.save(step)
        log = self._journal.log
        if step % self.part.check_every:
            return len(log)
        violations = self._violations(log)
        if violations:
            named = "; ".join(str(one) for one in violations[:_SHOWN])
            raise OpenTinkerError(
                f"{self.part.name}: step {step} breaks its protocol in {len(violations)} places: {named}"
            )
        return len(log)

    def evaluate(self, subject: str) -> dict[str, Evaluation]:
        """Evaluate the policies against, or with, each other; an evaluation a policy, recorded once.

        Those that are evaluated in an environment of their own take part, and get none here.

        Args:
            subject: `base`, or anything else for the versions that were published last.
        """
        members = self.members.items()
        refs = {name: BASE if subject == BASE else member.version.ref for name, member in members}
        judged = {name: member for name, member in members if member.config.evaluation.environment is None}
        catalog = self._lead.workspace.catalog
        done = {
            name: catalog.evaluations(run_id=member.run.run_id, subject=refs[name])
            for name, member in judged.items()
        }
        if all(done.values()):
            return {name: found[0] for name, found in done.items()}
        config, step = self._lead.config, 0 if subject == BASE else self._lead.version.step
        table = self._lead.sets.table(config.evaluation_sampling, "held_out", step, config.max_turns)
        played = self._played(held_out_specs(config), table, refs, step + 1, EventLog())
        found = {}
        for name, member in judged.items():
            trajectories = member.own(played)
            saved = member.sets.save(trajectories, step, "evaluation", refs[name])
            evaluation = evaluation_of(
                member.config, refs[name], step, member.run.run_id, trajectories, saved
            )
            found[name] = member.record_evaluation(evaluation)
        return found

    def _play(self, step: int, versions: Mapping[str, str]) -> dict[str, TrajectorySet]:
        lead = self._lead
        phase = lead.rl_phase
        table = lead.sets.table(phase.sampling, "train", step, phase.max_turns)
        specs = rollout_specs(lead.config.seed, phase, step)
        played = self._played(specs, table, versions, step, self._journal.log)
        usable = sum(one.result.end.counts for one in played)
        if usable < self.part.protocol.usable_episodes * len(played):
            first = next(one.result for one in played if not one.result.end.counts)
            raise OpenTinkerError(
                f"{self.part.name}: only {usable} of {len(played)} episodes of step {step} have rewards; "
                f"one ended by {first.end}: {first.error or 'no more is known'}"
            )
        saved = {
            name: member.sets.save(member.own(played), step, "train", versions[name])
            for name, member in self.members.items()
        }
        self._journal.save(step)  # before the episodes are recorded: those that are have a log
        with lead.workspace.catalog.transaction():
            for name, member in self.members.items():
                saved[name] = member.sets.record(saved[name])
                member.states.reserve(step)
        return saved

    def _played(
        self,
        specs: Sequence[EpisodeSpec],
        table: Table,
        versions: Mapping[str, str],
        step: int,
        log: EventLog,
    ) -> list[Played]:
        plays = [Play(spec, {**versions, **self._opponents(spec, step)}) for spec in specs]
        held = self._hold(plays)
        try:
            played = play_all(plays, table, self._lead.engine.sampler, log)
        finally:
            for ref in held:
                self._lead.engine.versions.let_go(self._lead.engine.sampler, ref, self.part.joint_id)
        refuse_failure_of_all(played, table.environment, step)
        return played

    def _opponents(self, spec: EpisodeSpec, step: int) -> dict[str, str]:
        """The versions of the policies that are not trained, for one episode."""
        found = {}
        for name, opponent in self.part.opponents.items():
            policy = opponent.policy or next(iter(self.members))
            published = []
            if opponent.version is None:
                versions = self._lead.workspace.catalog.run_versions(self.members[policy].run.run_id)
                published = [(version.step, version.ref) for version in versions]
            seat = Seat(name, step, spec.group, spec.member)
            found[name] = opponent_version(opponent, self._lead.config.seed, seat, published)
        return found

    def _hold(self, plays: Sequence[Play]) -> list[str]:
        """Let the sampler serve the opponents' versions."""
        refs = {play.versions[name] for play in plays for name in self.part.opponents} - {BASE}
        for ref in refs:
            version = self._lead.workspace.catalog.version(ref)
            self._lead.engine.versions.hold(self._lead.engine.sampler, version, self.part.joint_id)
        return sorted(refs)

    def _sampled(self, member: MemberSession, step: int) -> str:
        """The version that the episodes of a step are sampled with: the one published before it."""
        if member.version.step < step:
            return member.version.ref
        versions = member.workspace.catalog.run_versions(member.run.run_id)
        return next(version.ref for version in reversed(versions) if version.step < step)

    def _violations(self, log: EventLog) -> list[Violation]:
        environment = self._lead.sets.table(self._lead.rl_phase.sampling, "train", 0, 1).make_environment()
        try:
            recomputes = environment if isinstance(environment, Recomputes) else None
            return check(log, self.part.protocol, recomputes)
        finally:
            if isinstance(environment, Closes):
                environment.close()
