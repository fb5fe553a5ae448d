"""How much of a quickstart step is orchestration: Prefect, MLflow and the catalog.

Two arms do the same steps of the same config in one process: the training flow, and a bare loop
over the engine that samples, trains and writes the same files, but has no Prefect, no MLflow and no
catalog. They take turns every few steps, so that both see the same machine. Draws derive from the
seed, so step s is the same work in both. The first step of a turn is dropped: it lacks what the step
before it leaves to do in the background. What delivers to MLflow is stopped while the bare loop has
its turn and in the dropped step, so that all of its work falls into steps of the flow that count.

`overhead_share` is the median over the pairs of steps of (flow - bare) / flow, and
`overhead_share_mean` the same of their sums: deliveries to MLflow come every 20 seconds, which a
median does not see.

    python benchmarks/orchestration.py [--json] [--config FILE] [--turns 6] [--steps 12] [key=value ...]
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

import psutil

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line does, before torch is imported

from benchmarks.report import show
from flows.orchestrator import orchestrator, without_heartbeat
from opentinker_core.advantages import advantages
from opentinker_core.agents.episodes import EpisodeSettings, EpisodeSpec, play
from opentinker_core.agents.making import environment_maker
from opentinker_core.config.loading import load_config
from opentinker_core.config.schema import RLPhase, TrainConfig
from opentinker_core.config.settings import Settings
from opentinker_core.lineage.courier import Courier
from opentinker_core.models.renderer import Renderer
from opentinker_core.models.source import resolve
from opentinker_core.objectives.compose import rl_objective
from opentinker_core.objectives.normalizers import token_scales
from opentinker_core.policies.catalog import Catalog
from opentinker_core.runtime.engine import Engine, open_engine
from opentinker_core.runtime.workspace import Workspace
from opentinker_core.sampling.protocol import SamplingParams
from opentinker_core.seeds import derive_seed
from opentinker_core.snapshots.protocol import SnapshotKind
from opentinker_core.trajectories.datums import to_datum
from tasks.progress import Progress, listening
from tasks.sessions import courier_of

QUICKSTART = Path(__file__).parents[1] / "deployments" / "configs" / "quickstart.yaml"


class BareLoop:
    """Does the work of the flow's RL steps and keeps no records."""

    def __init__(self, config: TrainConfig, models: Path, home: Path) -> None:
        assert config.rl is not None
        self._config, self._phase = config, config.rl
        self._workspace = Workspace(Settings(home=home))
        self._engine = open_engine(
            config.policy.base_model, config.runtime, models, self._workspace.snapshots.fetch
        )
        self._policy = config.policy.name
        self._engine.trainer.create(self._policy, config.policy.lora, derive_seed(config.seed, "adapter"))
        self._settings = _episodes(config, self._phase, self._engine)
        self._publish(0)

    def step(self, step: int) -> None:
        """One RL step: rollout, batch, update, files of the new version, refresh."""
        phase, seed = self._phase, self._config.seed
        specs = [
            EpisodeSpec(
                derive_seed(seed, "problem", step, group),
                group,
                member,
                derive_seed(seed, "draw", step, group, member),
            )
            for group in range(phase.groups)
            for member in range(phase.group_size)
        ]
        trajectories = play(specs, self._settings, self._engine.sampler, f"{self._policy}@{step - 1}")
        self._workspace.trajectories.save(("bare", f"step-{step}"), trajectories)
        rewards, groups = [t.reward for t in trajectories], [t.group for t in trajectories]
        values = advantages(phase.advantage, rewards, groups)
        datums = [to_datum(t, advantages=v) for t, v in zip(trajectories, values, strict=True)]
        scales = token_scales(phase.objective.normalizer, datums, phase.sampling.max_tokens)
        pulling = [i for i, datum in enumerate(datums) if datum.signal.any()]
        if pulling:
            self._engine.trainer.forward_backward(
                self._policy,
                [datums[i] for i in pulling],
                rl_objective(phase.objective),
                [scales[i] for i in pulling],
            )
            self._engine.trainer.optim_step(self._policy, phase.optimizer)
        self._publish(step)

    def _publish(self, step: int) -> None:
        trainer = self._engine.trainer
        with tempfile.TemporaryDirectory() as scratch:
            for kind, write in (
                (SnapshotKind.CHECKPOINT, trainer.save_checkpoint),
                (SnapshotKind.SAMPLER, trainer.publish_snapshot),
            ):
                write(self._policy, Path(scratch) / kind)
                key = ("bare", f"v{step}", str(kind))
                snapshot = self._workspace.snapshots.publish(key, kind, Path(scratch) / kind)
        self._engine.sampler.refresh(f"{self._policy}@{step}", snapshot.uri, snapshot.digest)


class Turns:
    """Listens to the flow; after every few of its steps lets the bare loop do the same ones."""

    def __init__(self, bare: BareLoop, catalog: Catalog, length: int, prefect: psutil.Process | None) -> None:
        self._bare, self._catalog, self._length, self._prefect = bare, catalog, length, prefect
        self._flow_s: list[float] = []
        self._last = 0
        self._since = time.perf_counter()
        self._before: dict[str, float] = {}
        self.pairs: list[tuple[float, float]] = []
        """Seconds of (bare, flow), a pair for each step that counts."""
        self.cpu_s = {"courier": 0.0, "prefect": 0.0}
        """CPU time of the processes beside the flow, in its steps that count."""

    def heard(self, told: Progress) -> None:
        """Something happened in the flow: what counts is that a step is published."""
        if told.step != self._last:
            self._last = told.step
            self._flow_s.append(time.perf_counter() - self._since)
            self._after_step(told)
        self._since = time.perf_counter()

    def _after_step(self, told: Progress) -> None:
        courier = _process(courier_of(told.run_id))
        if len(self._flow_s) == 1:
            self._before = {"courier": _cpu_s(courier), "prefect": _cpu_s(self._prefect)}
            if courier:
                courier.resume()
        if len(self._flow_s) == self._length:
            if courier:
                with self._catalog.transaction():  # else it may be stopped while others wait for it
                    courier.suspend()
            for name, process in (("courier", courier), ("prefect", self._prefect)):
                self.cpu_s[name] += _cpu_s(process) - self._before[name]
            bare_s = [self._timed(step) for step in range(told.step - self._length + 1, told.step + 1)]
            self.pairs.extend(list(zip(bare_s, self._flow_s, strict=True))[1:])
            self._flow_s = []
            if courier and told.step == told.steps:
                courier.resume()

    def _timed(self, step: int) -> float:
        started = time.perf_counter()
        self._bare.step(step)
        return time.perf_counter() - started


def _process(courier: Courier | None) -> psutil.Process | None:
    return psutil.Process(courier.pid) if courier else None


def _cpu_s(process: psutil.Process | None) -> float:
    """CPU seconds of a process and those below it."""
    family = [process, *process.children(recursive=True)] if process else []
    return sum(sum(one.cpu_times()[:2]) for one in family)


def _episodes(config: TrainConfig, phase: RLPhase, engine: Engine) -> EpisodeSettings:
    renderer = Renderer(engine.tokenizer, phase.sampling.render)
    params = SamplingParams(
        phase.sampling.max_tokens, phase.sampling.temperature, stop_token_ids=renderer.stop_token_ids
    )
    make = environment_maker(config.environment, "train")
    return EpisodeSettings(
        config.environment.id, make, renderer, params, (), phase.max_turns, engine.max_context, 0
    )


def main() -> None:
    """Measure, and print the table or the object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12, help="steps a turn")
    parser.add_argument("overrides", nargs="*", help="key=value, as for `opentinker train`")
    arguments = parser.parse_args()
    steps = arguments.turns * arguments.steps
    overrides = [f"rl.steps={steps}", "evaluation.episodes=1", "evaluation.samples=1", "canary.enabled=false"]
    config = load_config(arguments.config, [*overrides, *arguments.overrides])
    models = Settings().home
    resolve(config.policy.base_model, models)
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "home"
        home.mkdir()
        (home / "models").symlink_to(models / "models")
        os.environ["OPENTINKER_HOME"] = str(home)
        with orchestrator(home) as prefect:
            prefect.wait()
            from flows.train_rl import train_rl

            server = psutil.Process(prefect.server.process.pid) if prefect.server else None
            bare = BareLoop(config, models, Path(scratch) / "bare")
            turns = Turns(bare, Workspace().catalog, arguments.steps, server)
            with without_heartbeat(), listening(turns.heard):
                train_rl(config)
    _show(turns, as_json=arguments.json)


def _show(turns: Turns, *, as_json: bool) -> None:
    pairs = turns.pairs
    shares = [(flow - bare) / flow for bare, flow in pairs]
    low, middle, high = quantiles(shares, n=4, method="inclusive")
    bare_s, flow_s = (sum(one) for one in zip(*pairs, strict=True))
    rows = [
        ("bare step", median(bare for bare, _ in pairs), "s"),
        ("flow step", median(flow for _, flow in pairs), "s"),
        ("flow - bare", median(1000 * (flow - bare) for bare, flow in pairs), "ms"),
        ("flow - bare, mean", 1000 * (flow_s - bare_s) / len(pairs), "ms"),
        ("overhead share, lower quartile", low, "ratio"),
        ("overhead share, upper quartile", high, "ratio"),
        ("CPU time of the MLflow courier", 1000 * turns.cpu_s["courier"] / len(pairs), "ms a step"),
        ("CPU time of the Prefect server", 1000 * turns.cpu_s["prefect"] / len(pairs), "ms a step"),
        ("steps compared", len(pairs), ""),
    ]
    ratios = {"overhead_share": middle, "overhead_share_mean": (flow_s - bare_s) / flow_s}
    show("orchestration", rows, ratios, as_json=as_json)


if __name__ == "__main__":
    main()
