"""How much of a quickstart step is orchestration: Prefect, MLflow and the catalog.

Two arms do the same steps of the same config, in turn, in one process: the training flow, and a
bare loop over the engine that samples, trains and writes the same files, but has no Prefect, no
MLflow and no catalog. Draws derive from the seed, so step s is the same work in both arms, and the
share is the median over the steps of (flow - bare) / flow.

    python benchmarks/orchestration.py [--json] [--config FILE] [--steps 8] [--rounds 2]
"""

import argparse
import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line does, before torch is imported

from benchmarks.report import show
from flows.orchestrator import orchestrator, without_heartbeat
from opentinker_core.advantages import advantages
from opentinker_core.agents.episodes import EpisodeSettings, EpisodeSpec, play
from opentinker_core.agents.making import environment_maker
from opentinker_core.config.loading import load_config
from opentinker_core.config.schema import RLPhase, TrainConfig
from opentinker_core.config.settings import Settings
from opentinker_core.models.renderer import Renderer
from opentinker_core.models.source import resolve
from opentinker_core.objectives.compose import rl_objective
from opentinker_core.objectives.normalizers import token_scales
from opentinker_core.runtime.engine import Engine, open_engine
from opentinker_core.runtime.workspace import Workspace
from opentinker_core.sampling.protocol import SamplingParams
from opentinker_core.seeds import derive_seed
from opentinker_core.snapshots.protocol import SnapshotKind
from opentinker_core.trajectories.datums import to_datum

QUICKSTART = Path(__file__).parents[1] / "deployments" / "configs" / "quickstart.yaml"


def bare_steps(config: TrainConfig, models: Path, home: Path) -> list[float]:
    """Seconds of each step of a loop that does the work of the flow and keeps no records."""
    workspace = Workspace(Settings(home=home))
    engine = open_engine(config.policy.base_model, config.runtime, models, workspace.snapshots.fetch)
    assert config.rl is not None
    phase, seed, policy = config.rl, config.seed, config.policy.name
    engine.trainer.create(policy, config.policy.lora, derive_seed(seed, "adapter"))
    settings = _episodes(config, phase, engine)
    _publish(workspace, engine, policy, 0)
    seconds = []
    for step in range(1, phase.steps + 1):
        started = time.perf_counter()
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
        trajectories = play(specs, settings, engine.sampler, f"{policy}@{step - 1}")
        workspace.trajectories.save(("bare", f"step-{step}"), trajectories)
        values = advantages(
            phase.advantage, [t.reward for t in trajectories], [t.group for t in trajectories]
        )
        datums = [to_datum(t, advantages=v) for t, v in zip(trajectories, values, strict=True)]
        scales = token_scales(phase.objective.normalizer, datums, phase.sampling.max_tokens)
        pulling = [i for i, datum in enumerate(datums) if datum.signal.any()]
        if pulling:
            engine.trainer.forward_backward(
                policy,
                [datums[i] for i in pulling],
                rl_objective(phase.objective),
                [scales[i] for i in pulling],
            )
            engine.trainer.optim_step(policy, phase.optimizer)
        _publish(workspace, engine, policy, step)
        seconds.append(time.perf_counter() - started)
    return seconds


def _episodes(config: TrainConfig, phase: RLPhase, engine: Engine) -> EpisodeSettings:
    renderer = Renderer(engine.tokenizer, phase.sampling.render)
    params = SamplingParams(
        phase.sampling.max_tokens, phase.sampling.temperature, stop_token_ids=renderer.stop_token_ids
    )
    make = environment_maker(config.environment, "train")
    return EpisodeSettings(
        config.environment.id, make, renderer, params, (), phase.max_turns, engine.max_context, 0
    )


def _publish(workspace: Workspace, engine: Engine, policy: str, step: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for kind, write in (
            (SnapshotKind.CHECKPOINT, engine.trainer.save_checkpoint),
            (SnapshotKind.SAMPLER, engine.trainer.publish_snapshot),
        ):
            write(policy, Path(scratch) / kind)
            snapshot = workspace.snapshots.publish(
                ("bare", f"v{step}", str(kind)), kind, Path(scratch) / kind
            )
    engine.sampler.refresh(f"{policy}@{step}", snapshot.uri, snapshot.digest)


def flow_steps(config: TrainConfig, home: Path) -> list[float]:
    """Seconds between the versions that the training flow publishes."""
    from flows.train_rl import train_rl

    os.environ["OPENTINKER_HOME"] = str(home)
    run_id = train_rl(config)
    versions = Workspace(Settings(home=home)).catalog.run_versions(run_id)
    times = [version.created_at.timestamp() for version in versions]
    # The first step follows the evaluation of the base model, which is no part of a step.
    return [after - before for before, after in pairwise(times)][1:]


def main() -> None:
    """Measure, and print the table or the object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    overrides = [f"rl.steps={arguments.steps}", "evaluation.episodes=1", "evaluation.samples=1"]
    config = load_config(arguments.config, overrides)
    models = Settings().home
    resolve(config.policy.base_model, models)
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "home"
        home.mkdir()
        (home / "models").symlink_to(models / "models")
        with orchestrator(home) as prefect:
            prefect.wait()
            with without_heartbeat():
                for number in range(arguments.rounds):
                    bare = bare_steps(config, models, Path(scratch) / f"bare-{number}")[1:]
                    pairs.extend(zip(bare, flow_steps(config, home), strict=True))
    share = median((flow - bare) / flow for bare, flow in pairs)
    rows = [
        ("bare step", median(bare for bare, _ in pairs), "s"),
        ("flow step", median(flow for _, flow in pairs), "s"),
        ("flow - bare", median(1000 * (flow - bare) for bare, flow in pairs), "ms"),
    ]
    show("orchestration", rows, {"overhead_share": share}, as_json=arguments.json)


if __name__ == "__main__":
    main()
