"""The phases that all policies of a joint run have in common: open, play, check, evaluate."""

from dataclasses import dataclass
from uuid import uuid4

from prefect.runtime import flow_run

from opentinker_core.config.agents import AgentsConfig
from opentinker_core.config.schema import TrainConfig
from opentinker_core.errors import UsageError
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.types import Evaluation, RunStatus, TrajectorySet
from opentinker_core.runtime.joint import JointSession, MemberSession
from opentinker_core.runtime.opening import check_startable
from opentinker_core.runtime.session import RunSession
from opentinker_core.runtime.workspace import Workspace
from tasks.open_run import OpenRun
from tasks.phase import phase
from tasks.progress import Progress, tell
from tasks.sessions import end_session, start_session

_joint: dict[str, JointSession] = {}


@dataclass(frozen=True)
class OpenJointRun:
    """What a flow needs to know of a joint run to put the phases in order."""

    joint_id: str
    runs: tuple[OpenRun, ...]
    """One a policy."""
    next_step: int
    """The first that is not published by all."""

    @property
    def rl_steps(self) -> range:
        """The remaining RL steps; a policy that is ahead, after a kill, waits in its phases."""
        config = self.runs[0].config
        return range(max(config.sft_steps + 1, self.next_step), config.steps + 1)

    @property
    def alone(self) -> tuple[OpenRun, ...]:
        """The runs that are evaluated in an environment of their own."""
        return tuple(run for run in self.runs if run.config.evaluation.environment is not None)


@phase("open-joint-run")
def open_joint_run(config: AgentsConfig | None, joint_id: str | None = None) -> OpenJointRun:
    """Start the runs of all policies, or go on with those of `joint_id`, or of this flow run on a retry.

    Raises:
        UsageError: neither a config nor a joint run that was begun.
    """
    flow_id = flow_run.get_id()
    members: list[MemberSession] = []
    workspace = Workspace()  # one, so that what is recorded of all is one transaction
    try:
        wanted = _wanted(workspace.catalog, config, joint_id, flow_id)
        for run_id, member in wanted:
            if run_id is None:  # all of them, before the first is recorded
                check_startable(workspace.catalog, member)
        for run_id, member in wanted:
            members.append(_member(start_session(member, run_id, flow_id, workspace)))
        joint = JointSession(members)
    except BaseException as error:
        try:
            for one in members:  # those that were begun do not run without the others
                one.finish(RunStatus.FAILED, f"{type(error).__name__}: {error}")
        finally:
            _end(members)
        raise
    _joint[joint.part.joint_id] = joint
    runs = tuple(
        OpenRun(one.run.run_id, one.run.name, one.config, one.version.ref, one.next_step) for one in members
    )
    for run in runs:
        tell(Progress(run.run_id, run.name, run.next_step - 1, run.config.steps, "starting"))
    return OpenJointRun(joint.part.joint_id, runs, joint.next_step)


@phase("play", "play[{step}]")
def play(joint_id: str, step: int) -> dict[str, TrajectorySet]:
    """Sample the episodes of `step` with all policies; by run id, the set of each with its own turns."""
    joint = _joint[joint_id]
    return {joint.members[name].run.run_id: found for name, found in joint.rollout(step).items()}


@phase("check-coordination", "check-coordination[{step}]")
def check_coordination(joint_id: str, step: int) -> int:
    """Recompute order, barriers, versions and rewards of `step` from its log; the number of events."""
    return _joint[joint_id].check(step)


@phase("evaluate-jointly", "evaluate-jointly[{subject}]")
def evaluate_jointly(joint_id: str, subject: str) -> list[Evaluation]:
    """Evaluate all policies against, or with, each other: `base`, or `latest`, as they are."""
    joint = _joint[joint_id]
    for member in joint.members.values():
        run, done = member.run, member.version.step
        tell(Progress(run.run_id, run.name, done, member.config.steps, f"evaluating {subject}"))
    return list(joint.evaluate(subject).values())


def end_joint_run(joint_id: str) -> None:
    """Forget the sessions, and let others have the runs."""
    _end(list(_joint.pop(joint_id).members.values()))


def sessions_of(joint_id: str) -> list[MemberSession]:
    """The open sessions of a joint run."""
    return list(_joint[joint_id].members.values())


def _wanted(
    catalog: Catalog, config: AgentsConfig | None, joint_id: str | None, flow_id: str | None
) -> list[tuple[str | None, TrainConfig]]:
    """The members' configs, each with the id of its run if it was begun."""
    if joint_id is None and flow_id is not None and (begun := catalog.run_of_flow(flow_id)) is not None:
        joint_id = (begun.config.get("joint") or {}).get("joint_id")
    runs = catalog.joint_runs(joint_id) if joint_id is not None else []
    found = {run.config["policy"]["name"]: run for run in runs}
    if config is None:
        configs = {name: TrainConfig.model_validate(run.config) for name, run in found.items()}
        names = next((one.joint.members for one in configs.values() if one.joint), ())
        if not names or set(names) - set(configs):
            raise UsageError(
                f"joint run {joint_id}: {len(found)} of its {len(names)} runs were begun; "
                "accepted: a joint run all of whose runs were, or its config"
            )
        configs = {name: configs[name] for name in names}
    else:
        configs = config.members(joint_id or uuid4().hex[:16])
    return [(found[name].run_id if name in found else None, member) for name, member in configs.items()]


def _member(session: RunSession) -> MemberSession:
    assert isinstance(session, MemberSession)
    return session


def _end(members: list[MemberSession]) -> None:
    for member in members:
        end_session(member.run.run_id)
