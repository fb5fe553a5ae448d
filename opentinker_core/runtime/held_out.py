"""Evaluation on held-out problems: which ones, how they are played, and what the result says."""

from collections.abc import Sequence

from opentinker_core.agents.episodes import EpisodeSettings, EpisodeSpec, play
from opentinker_core.agents.making import check_environments
from opentinker_core.config.schema import TrainConfig
from opentinker_core.errors import UsageError
from opentinker_core.evaluation.intervals import mean_interval
from opentinker_core.policies.types import Evaluation, TrajectorySet
from opentinker_core.runtime.choosing import open_run_engine
from opentinker_core.runtime.trajectory_sets import TrajectorySets
from opentinker_core.runtime.workspace import Workspace
from opentinker_core.sampling.protocol import BASE, Sampler
from opentinker_core.seeds import derive_seed
from opentinker_core.trajectories.parts import parts_of
from opentinker_core.trajectories.types import Trajectory


def play_held_out(
    config: TrainConfig, settings: EpisodeSettings, sampler: Sampler, ref: str
) -> list[Trajectory]:
    """Play the held-out problems of `config` with `ref`: the same problems and draws for every version."""
    return play(held_out_specs(config), settings, sampler, ref)


def held_out_specs(config: TrainConfig) -> list[EpisodeSpec]:
    """Which held-out problems are played, and with which draws: the same for every version."""
    seed, plan = config.seed, config.evaluation
    return [
        EpisodeSpec(
            environment_seed=derive_seed(seed, "held-out", problem),
            group=problem,
            member=sample,
            draw_seed=derive_seed(seed, "evaluate", problem, sample),
        )
        for problem in range(plan.episodes)
        for sample in range(plan.samples)
    ]


def evaluation_of(
    config: TrainConfig,
    ref: str,
    step: int,
    run_id: str | None,
    trajectories: Sequence[Trajectory],
    stored: TrajectorySet,
) -> Evaluation:
    """What the played episodes say of `ref`; episodes without a reward are counted, not averaged."""
    parts = parts_of(trajectories)
    usable = [
        # Of an agent that was never asked, nothing tells problems apart but their numbers.
        (part.reward, part.rows[0].info["prompt"] or f"problem {part.group}")
        for part in parts
        if part.reward is not None
    ]
    # Two seeds may draw the same problem: samples of one prompt are one cluster, whatever their group.
    prompts = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompt for _, prompt in usable))}
    interval = mean_interval([reward for reward, _ in usable], [prompts[prompt] for _, prompt in usable])
    return Evaluation(
        subject=ref,
        run_id=run_id,
        step=step,
        environment=stored.environment,
        mean=interval.mean,
        low=interval.low,
        high=interval.high,
        episodes=interval.n,
        trajectory_set=stored,
        details={
            "problems": len(prompts),
            "samples": config.evaluation.samples,
            "missing": len(parts) - len(usable),
        },
    )


def evaluate_version(config: TrainConfig, workspace: Workspace, ref: str) -> Evaluation:
    """Evaluate a version, or `base`, outside of any run; model and LoRA config are those of the version.

    Raises:
        UsageError: there is no such version, or the environment is not known.
    """
    catalog = workspace.catalog
    if config.joint is not None and config.evaluation.environment is None:
        raise UsageError(
            f"evaluation.environment: none, and {config.policy.name} plays {config.environment.id!r} with "
            "others; accepted here: one for a single agent, such as evaluation.environment='{id: gomoku}'"
        )
    check_environments(config)  # a wrong one is refused before the model is loaded
    version = None if ref == BASE else catalog.version(ref)
    base_model = (
        config.policy.base_model if version is None else catalog.policy(version.policy_name).base_model
    )
    engine = open_run_engine(base_model, config.runtime, workspace.home, workspace.snapshots.fetch)
    if version is not None:
        ref = version.ref
        engine.sampler.refresh(ref, version.sampler.uri, version.sampler.digest)
    step = version.step if version else 0
    sets = TrajectorySets(workspace, "", config, engine)
    elsewhere = config.evaluation.environment
    settings = sets.settings(config.evaluation_sampling, "held_out", step, config.max_turns, elsewhere)
    trajectories = play_held_out(config, settings, engine.sampler, ref)
    saved = sets.save(trajectories, step, "evaluation", ref, elsewhere)
    return catalog.add_evaluation(evaluation_of(config, ref, step, None, trajectories, saved))
