"""The trajectory sets of a run: how its episodes are played, stored once, and found again."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np

import envs.registry
from envs.protocol import Split
from opentinker_core.agents.episodes import EpisodeSettings
from opentinker_core.agents.playing import Table
from opentinker_core.agents.tools.making import chosen_format, open_tools
from opentinker_core.config.schema import EnvironmentConfig, SamplingConfig, TrainConfig
from opentinker_core.digests import digest_json
from opentinker_core.models.renderer import Renderer
from opentinker_core.policies.types import TrajectorySet
from opentinker_core.runtime.protocol import RunEngine
from opentinker_core.runtime.workspace import Workspace
from opentinker_core.sampling.protocol import SamplingParams
from opentinker_core.trajectories.parts import parts_of
from opentinker_core.trajectories.types import Trajectory

Purpose = Literal["train", "evaluation"]


class TrajectorySets:
    """Stores, records and caches the trajectory sets of one run; with an empty id, of none."""

    def __init__(self, workspace: Workspace, run_id: str, config: TrainConfig, engine: RunEngine) -> None:
        self._workspace = workspace
        self._run_id = run_id
        self._config = config
        self._engine = engine
        self._loaded: dict[str, list[Trajectory]] = {}
        self._training: dict[int, TrajectorySet] | None = None
        """The recorded training sets by step, once they were read: no other process adds to a run."""

    def settings(
        self,
        sampling: SamplingConfig,
        split: Split,
        step: int,
        max_turns: int,
        environment: EnvironmentConfig | None = None,
    ) -> EpisodeSettings:
        """How the episodes of a set are played by one agent; `environment`: None: the run's own."""
        environment = environment or self._config.environment
        tokenizer, tools = self._engine.tokenizer, self._config.tools
        wire = None if tools is None else chosen_format(tools, tokenizer)
        if tools is not None:  # mistakes are told, and servers started, before episodes wait for them
            open_tools(tools, tokenizer).close()
        renderer = Renderer(tokenizer, sampling.render, wire)
        return EpisodeSettings(
            environment=environment.id,
            make_environment=partial(envs.registry.make, environment.id, split, **environment.args),
            renderer=renderer,
            params=SamplingParams(
                sampling.max_tokens,
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
                renderer.stop_token_ids,
                sampling.stop,
                sampling.min_p,
            ),
            stop=sampling.stop,
            max_turns=max_turns,
            max_context=self._engine.max_context,
            step=step,
            limits=self._config.episodes,
            open_tools=None if tools is None else partial(open_tools, tools, tokenizer),
        )

    def table(self, sampling: SamplingConfig, split: Split, step: int, max_turns: int) -> Table:
        """How the episodes of a set are played by all the agents of the run's environment."""
        settings, joint = self.settings(sampling, split, step, max_turns), self._config.joint
        if joint is None:
            return settings.table()
        environment = self._config.environment
        return Table(
            environment.id,
            partial(envs.registry.make_multi, environment.id, split, **environment.args),
            joint.protocol,
            dict.fromkeys(joint.protocol.agents, settings.seat),
            step,
            self._config.episodes.step_s,
        )

    def stored(self, step: int) -> TrajectorySet | None:
        """The training set of `step`, if it was stored already."""
        if self._training is None:
            self._training = {item.step: item for item in self.training()}
        return self._training.get(step)

    def training(self) -> list[TrajectorySet]:
        """The sets the run trained on, in the order of the steps."""
        sets = self._workspace.catalog.trajectory_sets(self._run_id, purpose="train")
        return sorted(sets, key=lambda item: item.step)

    def save(
        self,
        trajectories: Sequence[Trajectory],
        step: int,
        purpose: Purpose,
        sampled_by: str,
        environment: EnvironmentConfig | None = None,
    ) -> TrajectorySet:
        """Write a set, which is not in the catalog yet; a training set is kept at hand for its step."""
        policy, _, number = sampled_by.partition("@")
        source = (policy, f"v{number}") if number else (policy,)
        place = self._run_id or "outside-runs"
        key = (self._workspace.settings.tenant, place, f"step-{step:06d}", purpose, *source)
        saved = self._workspace.trajectories.save(key, trajectories)
        parts = parts_of(trajectories)
        rewards = [part.reward for part in parts if part.reward is not None]
        saved_set = TrajectorySet(
            set_id=digest_json([self._run_id, step, purpose, sampled_by, saved.digest])[:16],
            uri=saved.uri,
            digest=saved.digest,
            episodes=len(parts),
            tokens=saved.tokens,
            environment=(environment or self._config.environment).id,
            sampled_by=sampled_by,
            run_id=self._run_id,
            step=step,
            purpose=purpose,
            reward_mean=float(np.mean(rewards)) if rewards else None,
        )
        if purpose == "train":
            self._loaded[saved_set.set_id] = list(trajectories)
        return saved_set

    def record(self, training_set: TrajectorySet) -> TrajectorySet:
        """Record a saved training set in the catalog; evaluations record theirs themselves."""
        recorded = self._workspace.catalog.add_trajectory_set(training_set)
        if self._training is not None:
            self._training[recorded.step] = recorded
        return recorded

    def load(self, trajectory_set: TrajectorySet) -> list[Trajectory]:
        """The trajectories of a set, verified against its digest."""
        if trajectory_set.set_id not in self._loaded:
            loaded = self._workspace.trajectories.load(trajectory_set.uri, trajectory_set.digest)
            self._loaded[trajectory_set.set_id] = loaded
        return self._loaded[trajectory_set.set_id]

    def release(self, *, keep: TrajectorySet | None = None) -> None:
        """Drop the sets at hand, except `keep`."""
        kept = keep.set_id if keep is not None else None
        self._loaded = {set_id: loaded for set_id, loaded in self._loaded.items() if set_id == kept}
