"""Whether agents learn: the tiny examples, with several seeds, against controls, and with policies exchanged.

Each case trains an example config of `deployments/configs` on the tiny model: first by imitation, then by RL.
Between the two and at the end the policies play held-out problems, the same ones and with the same draws. A
row is one policy of one run: its mean reward before and after RL, and the difference, paired by problem, with
95 % intervals. Rewards of the games are win rates against the random player.

- `gomoku`, `selfplay`, `two`: a policy against the random player; one that plays both sides; one a side.
- `collect-3`, `-4`, `-5`: agents with a policy each, evaluated jointly. Every log of a step is recomputed.
- `guess`: guess_number.
- `... shuffled`: the control. RL of the same imitators, with the rewards of each step dealt out anew.
- `swap`: two policies that learn at different speeds, and the same run with their seats exchanged: the curves
  of the agents must be those of the others' policies; and with two that are alike, exchanged exactly.

    python benchmarks/agents_learning.py [--json] [--cases gomoku two ...] [--seeds 0 1 2] [--keep FILE]

With `--keep`, finished runs are written to FILE, and those that are there are not run again.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, TypeVar
from uuid import uuid4

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line does, before torch is imported

from rich.console import Console
from rich.table import Table

from benchmarks.report import machine
from opentinker_core.config.agents import AgentsConfig
from opentinker_core.config.any import load_any
from opentinker_core.config.schema import TrainConfig
from opentinker_core.config.settings import Settings
from opentinker_core.evaluation.intervals import Interval, difference_interval, mean_interval
from opentinker_core.policies.types import Evaluation, PolicyVersion, RunStatus, TrajectorySet
from opentinker_core.runtime.joint import JointSession, MemberSession
from opentinker_core.runtime.session import RunSession, open_session
from opentinker_core.runtime.workspace import Workspace
from opentinker_core.trajectories.parts import parts_of

C = TypeVar("C", TrainConfig, AgentsConfig)
CONFIGS = Path(__file__).parents[1] / "deployments" / "configs"
FILES = {
    "gomoku": "gomoku_tiny.yaml",
    "selfplay": "gomoku_selfplay_tiny.yaml",
    "two": "gomoku_two_policies_tiny.yaml",
    "collect-3": "collect_four_tiny.yaml",
    "collect-4": "collect_four_tiny.yaml",
    "collect-5": "collect_four_tiny.yaml",
    "guess": "guess_number_tiny.yaml",
}
CONTROLLED = ("gomoku", "two")
"""The cases that are run again with shuffled rewards."""
QUIET = ("record.mlflow=false", "canary.enabled=false", "evaluation.every=0")


@dataclass(frozen=True)
class Scores:
    """Rewards of held-out episodes, and the problem of each."""

    rewards: list[float]
    problems: list[str]

    def interval(self) -> Interval:
        """Of the mean."""
        return mean_interval(self.rewards, _numbers(self.problems, self.problems))

    def gain(self, before: "Scores") -> Interval:
        """Of the mean over problems of the difference to `before`."""
        every = [*before.problems, *self.problems]
        return difference_interval(
            self.rewards, _numbers(self.problems, every), before.rewards, _numbers(before.problems, every)
        )


@dataclass(frozen=True)
class Learned:
    """What became of one policy in a run."""

    before: Scores
    """After imitation."""
    after: Scores
    """After RL."""
    curve: list[float]
    """Mean reward of the episodes of each RL step."""
    began: str
    """The version that RL began with."""


def learn(config: TrainConfig | AgentsConfig, home: Path, models: Path | None = None) -> dict[str, Learned]:
    """Train as `config` says, in the order of the flows; by policy, what became of it.

    Args:
        home: where runs and versions are kept; what is there can be gone on from.
        models: where base models are built; None: in `home`.
    """
    if models is not None and not (home / "models").exists():
        models.mkdir(parents=True, exist_ok=True)
        home.mkdir(parents=True, exist_ok=True)
        (home / "models").symlink_to(models)
    workspace = Workspace(Settings(home=home))
    if isinstance(config, TrainConfig):
        return _alone(open_session(config, workspace))
    members = [
        open_session(one, workspace, kind=MemberSession) for one in config.members(uuid4().hex).values()
    ]
    return _together(JointSession([one for one in members if isinstance(one, MemberSession)]))


def _alone(session: RunSession) -> dict[str, Learned]:
    _imitate([session])
    start = session.evaluate(session.version.ref)
    for step in range(session.next_step, session.config.steps + 1):
        _update(
            {session.config.policy.name: session}, step, {session.config.policy.name: session.rollout(step)}
        )
    return {session.config.policy.name: _learned(session, start, session.evaluate(session.version.ref))}


def _together(joint: JointSession) -> dict[str, Learned]:
    _imitate(list(joint.members.values()))
    starts = _evaluated(joint)
    steps = next(iter(joint.members.values())).config.steps
    for step in range(joint.next_step, steps + 1):
        _update(joint.members, step, joint.rollout(step))
        joint.check(step)  # raises if order, versions or a reward of an agent are not as recomputed
    ends = _evaluated(joint)
    return {name: _learned(one, starts[name], ends[name]) for name, one in joint.members.items()}


def _imitate(sessions: Sequence[RunSession]) -> None:
    for session in sessions:
        phase = session.config.sft
        while phase is not None and session.next_step <= session.sft_steps:
            start = session.next_step
            stop = min(start + phase.publish_every - 1, session.sft_steps)
            session.refresh(session.publish(stop, session.sft(start, stop)))


def _update(sessions: Mapping[str, RunSession], step: int, sets: Mapping[str, TrajectorySet]) -> None:
    for name, session in sessions.items():
        session.build_batch(step, sets[name])
    metrics = {name: session.update(step) for name, session in sessions.items()}
    for name, session in sessions.items():
        session.publish(step, metrics[name])
    for session in sessions.values():
        session.refresh(session.version)


def _evaluated(joint: JointSession) -> dict[str, Evaluation]:
    """Each policy in its own environment, if it has one; the others jointly."""
    found = {
        name: member.evaluate(member.version.ref)
        for name, member in joint.members.items()
        if member.config.evaluation.environment is not None
    }
    return found if len(found) == len(joint.members) else joint.evaluate("latest") | found


def _learned(session: RunSession, start: Evaluation, end: Evaluation) -> Learned:
    versions = session.workspace.catalog.run_versions(session.run.run_id)
    session.finish(RunStatus.COMPLETED)
    scores = _scores(session, start), _scores(session, end)
    return Learned(*scores, _curve(versions), start.subject)


def _curve(versions: Sequence[PolicyVersion]) -> list[float]:
    return [version.metrics["reward_mean"] for version in versions if version.phase == "rl"]


def _scores(session: RunSession, evaluation: Evaluation) -> Scores:
    parts = [one for one in parts_of(session.sets.load(evaluation.trajectory_set)) if one.reward is not None]
    rewards = [float(part.reward) for part in parts if part.reward is not None]
    return Scores(rewards, [str(part.rows[0].info["prompt"]) for part in parts])


def _numbers(problems: Sequence[str], known: Sequence[str]) -> list[int]:
    numbers = {problem: number for number, problem in enumerate(dict.fromkeys(known))}
    return [numbers[problem] for problem in problems]


# ----- the cases --------------------------------------------------------------------------------


def collecting(agents: int, seed: int, *overrides: str) -> AgentsConfig:
    """The example of `collect`, for another number of agents with a policy each."""
    names = {f"a{number}": f"p{number}" for number in range(1, agents + 1)}
    config = load_any(CONFIGS / FILES["collect-4"], [f"seed={seed}", *QUIET, *overrides])
    assert isinstance(config, AgentsConfig)
    plain = config.model_dump(mode="json")
    plain["policies"] = {name: {} for name in names.values()}
    plain["protocol"]["policies"] = names
    plain["environment"]["args"]["agents"] = agents
    return AgentsConfig.model_validate(plain)


def exchanged(config: AgentsConfig, first: str, second: str) -> AgentsConfig:
    """`config`, in which two policies have changed seats."""
    swap = {first: second, second: first}
    plain = config.model_dump(mode="json")
    seats = plain["protocol"]["policies"]
    plain["protocol"]["policies"] = {agent: swap.get(name, name) for agent, name in seats.items()}
    return AgentsConfig.model_validate(plain)


def at_speeds(config: AgentsConfig, rates: Mapping[str, float]) -> AgentsConfig:
    """`config`, in which policies have learning rates of their own in RL."""
    plain = config.model_dump(mode="json")
    for name, rate in rates.items():
        own = json.loads(json.dumps(plain["rl"]))
        own["optimizer"]["learning_rate"] = rate
        plain["policies"][name]["rl"] = own
    return AgentsConfig.model_validate(plain)


def config_of(case: str, seed: int, *overrides: str) -> TrainConfig | AgentsConfig:
    """The config of a case."""
    if case.startswith("collect-"):
        return collecting(int(case.removeprefix("collect-")), seed, *overrides)
    return load_any(CONFIGS / FILES[case], [f"seed={seed}", *QUIET, *overrides])


def control_of(config: C, learned: Mapping[str, Learned]) -> C:
    """RL alone, from where that of a run with `config` began, with shuffled rewards."""
    plain = config.model_dump(mode="json") | {"sft": None}
    plain["rl"]["shuffle_rewards"] = True
    if isinstance(config, TrainConfig):
        plain["policy"]["start"] = learned[config.policy.name].began
    else:
        for name, own in plain["policies"].items():
            own["start"] = learned[name].began
    return type(config).model_validate(plain)


def swap_runs(seed: int, *overrides: str) -> dict[str, AgentsConfig]:
    """The four runs of `swap`, by name."""
    alike = collecting(3, seed, *overrides)
    assert alike.rl is not None
    fast = alike.rl.optimizer.learning_rate
    unlike = at_speeds(alike, {"p1": fast, "p2": fast / SLOWER})
    return {
        "swap: p1 fast": unlike,
        "swap: p1 fast, exchanged": exchanged(unlike, "p1", "p2"),
        "swap: alike": alike,
        "swap: alike, exchanged": exchanged(alike, "p1", "p2"),
    }


SLOWER = 10.0
"""By what the slow policy's learning rate is divided."""


# ----- what is printed --------------------------------------------------------------------------


def row(run: str, seed: int, policy: str, learned: Learned, seconds: float) -> dict[str, Any]:
    """One line of the table, as plain data."""
    return {
        "run": run,
        "seed": seed,
        "policy": policy,
        "before": asdict(learned.before.interval()),
        "after": asdict(learned.after.interval()),
        "gain": asdict(learned.after.gain(learned.before)),
        "curve": learned.curve,
        "cpu_seconds": seconds,
    }


def runs_of(cases: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, int, Any]]:
    """All runs that were asked for, but for controls: name, seed, config."""
    for case in cases:
        if case == "swap":
            yield from ((name, seeds[0], config) for name, config in swap_runs(seeds[0]).items())
        else:
            yield from ((case, seed, config_of(case, seed)) for seed in seeds)


def measured(run: str, seed: int, config: Any, scratch: Path) -> list[dict[str, Any]]:
    """The rows of a run, and of its control if it has one."""
    home, models = Path(mkdtemp(dir=scratch)), scratch / "models"
    began = time.process_time()
    learned = learn(config, home, models)
    seconds = time.process_time() - began
    rows = [row(run, seed, name, one, seconds) for name, one in learned.items()]
    if run in CONTROLLED:
        began = time.process_time()
        control = learn(control_of(config, learned), home, models)
        seconds = time.process_time() - began
        rows += [row(f"{run} shuffled", seed, name, one, seconds) for name, one in control.items()]
    return rows


def swap_holds(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the runs of `swap` say: by curves of policies, as lists of rewards."""
    curves = {(one["run"], one["policy"]): one["curve"] for one in rows if one["run"].startswith("swap")}
    if not curves:
        return {}
    unlike, alike = "swap: p1 fast", "swap: alike"
    gains = {(one["run"], one["policy"]): one["gain"]["mean"] for one in rows}
    return {
        "alike: the curves are exchanged to the bit": all(
            curves[alike, own] == curves[f"{alike}, exchanged", own]
            if own == "p3"
            else curves[alike, own] == curves[f"{alike}, exchanged", {"p1": "p2", "p2": "p1"}[own]]
            for own in ("p1", "p2", "p3")
        ),
        "fast and slow: gain of a1 and a2": [gains[unlike, "p1"], gains[unlike, "p2"]],
        "fast and slow, exchanged: gain of a1 and a2": [
            gains[f"{unlike}, exchanged", "p2"],
            gains[f"{unlike}, exchanged", "p1"],
        ],
    }


def show(rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Print the table, or one JSON object."""
    verdict = swap_holds(rows)
    if as_json:
        print(
            json.dumps({"benchmark": "agents_learning", "rows": rows, "swap": verdict, "machine": machine()})
        )
        return
    table = Table(title="agents_learning: held-out reward [95 % interval]")
    for heading in ("run", "seed", "policy", "before RL", "after RL", "gain", "CPU s"):
        table.add_column(heading)
    for one in rows:
        values = [_written(one[name]) for name in ("before", "after", "gain")]
        table.add_row(one["run"], str(one["seed"]), one["policy"], *values, f"{one['cpu_seconds']:.0f}")
    Console(width=110).print(table)
    for name, value in verdict.items():
        print(f"{name}: {value}")


def _written(interval: Mapping[str, float]) -> str:
    return f"{interval['mean']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def main() -> None:
    """Run what was asked for, and print the table or the object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cases", nargs="+", choices=[*FILES, "swap"], default=[*FILES, "swap"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--keep", type=Path, help="file of finished runs, which are not run again")
    arguments = parser.parse_args()
    keep: Path | None = arguments.keep
    rows: list[dict[str, Any]] = json.loads(keep.read_text()) if keep is not None and keep.exists() else []
    with TemporaryDirectory() as scratch:
        for run, seed, config in runs_of(arguments.cases, arguments.seeds):
            if any((one["run"], one["seed"]) == (run, seed) for one in rows):
                continue
            rows += measured(run, seed, config, Path(scratch))
            if keep is not None:
                keep.write_text(json.dumps(rows))
    show(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
