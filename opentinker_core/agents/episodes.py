"""Play many episodes side by side: all that wait for tokens are sampled in one call.

Single-agent for now: one trajectory an episode. Tokens go in and out as ids; what was sampled is
recorded as it is and never rendered again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envs.protocol import Action, Environment
from opentinker_core.agents import guarded
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.models.renderer import Renderer
from opentinker_core.sampling.protocol import SampledSequence, Sampler, SampleRequest, SamplingParams
from opentinker_core.seeds import derive_seed
from opentinker_core.trajectories.fsm import TrajectoryBuilder
from opentinker_core.trajectories.types import EndReason, StopReason, Trajectory

AGENT = "agent"


@dataclass(frozen=True)
class EpisodeSpec:
    """Which episode to play: the environment's seed, its place in the set, and the seed of its draws."""

    environment_seed: int
    group: int
    member: int
    draw_seed: int


@dataclass(frozen=True)
class EpisodeSettings:
    """What all episodes of a set share."""

    environment: str
    make_environment: Callable[[], Environment]
    renderer: Renderer
    params: SamplingParams
    stop: tuple[str, ...]
    max_turns: int
    max_context: int
    step: int


@dataclass(eq=False)
class _Episode:
    """One running episode: its environment, its trajectory so far, and what to record of it."""

    spec: EpisodeSpec
    environment: Environment
    builder: TrajectoryBuilder
    info: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    turn: int = 0
    end: EndReason | None = None

    def observe(self, tokens: Sequence[int]) -> None:
        self.builder.observed(tokens)
        self.tokens.extend(tokens)


def play(
    specs: Sequence[EpisodeSpec], settings: EpisodeSettings, sampler: Sampler, version: str
) -> list[Trajectory]:
    """Play `specs` with `version` to their end; one trajectory each, in order.

    An episode in which a step of its environment raises is recorded as failed: its reward is missing,
    not zero.

    Raises:
        UsageError: an environment's first prompt does not fit the model's context.
        OpenTinkerError: every episode failed, so that something is wrong with the environment.
    """
    episodes = [_start(spec, settings) for spec in specs]
    while waiting := [episode for episode in episodes if episode.end is None]:
        for episode, sequence in zip(waiting, _sample(waiting, settings, sampler, version), strict=True):
            _take_turn(episode, sequence, settings)
    if episodes and all(episode.end is EndReason.FAILED for episode in episodes):
        raise OpenTinkerError(
            f"environment {settings.environment!r}: all {len(episodes)} episodes of step {settings.step} "
            f"failed; the first said: {episodes[0].info.get('error')}"
        )
    return [_finish(episode) for episode in episodes]


def demonstrate(specs: Sequence[EpisodeSpec], settings: EpisodeSettings) -> list[Trajectory]:
    """Let the environment itself answer: trajectories for supervised training (one turn each step)."""
    episodes = [_start(spec, settings) for spec in specs]
    for episode in episodes:
        while episode.end is None:
            action = guarded.demonstration(episode.environment, settings.environment)
            tokens = np.array(settings.renderer.demonstration(action), np.int32)
            if len(episode.tokens) + len(tokens) > settings.max_context:
                raise UsageError(
                    f"environment {settings.environment!r}: a demonstration of {len(tokens)} tokens after "
                    f"{len(episode.tokens)} does not fit the model's context of {settings.max_context}"
                )
            logprobs = np.zeros(len(tokens), np.float32)
            sequence = SampledSequence(tokens, logprobs, StopReason.STOP, "demonstration")
            _take_turn(episode, sequence, settings)
    return [_finish(episode) for episode in episodes]


def _start(spec: EpisodeSpec, settings: EpisodeSettings) -> _Episode:
    environment = settings.make_environment()
    observation = guarded.reset(environment, settings.environment, spec.environment_seed)
    builder = TrajectoryBuilder(
        trajectory_id=f"s{settings.step:05d}-g{spec.group}-m{spec.member}",
        agent=AGENT,
        environment=settings.environment,
        seed=spec.environment_seed,
        group=spec.group,
        member=spec.member,
    )
    episode = _Episode(spec, environment, builder, {"prompt": observation.text, "actions": []})
    episode.observe(settings.renderer.initial(observation))
    if not _fits(episode, settings):
        raise UsageError(
            f"environment {settings.environment!r}: a prompt of {len(episode.tokens)} tokens and max_tokens "
            f"{settings.params.max_tokens} do not fit the model's context of {settings.max_context}"
        )
    return episode


def _sample(
    waiting: Sequence[_Episode], settings: EpisodeSettings, sampler: Sampler, version: str
) -> list[SampledSequence]:
    """One request a distinct prompt: members of a group share the prefill of their first turn."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, episode in enumerate(waiting):
        by_prompt.setdefault(tuple(episode.tokens), []).append(index)
    requests = [
        SampleRequest(
            prompt,
            settings.params,
            version,
            tuple(derive_seed(waiting[i].spec.draw_seed, waiting[i].turn) for i in members),
        )
        for prompt, members in by_prompt.items()
    ]
    sampled: list[SampledSequence | None] = [None] * len(waiting)
    for members, sequences in zip(by_prompt.values(), sampler.sample(requests), strict=True):
        for index, sequence in zip(members, sequences, strict=True):
            sampled[index] = sequence
    return [sequence for sequence in sampled if sequence is not None]


def _take_turn(episode: _Episode, sequence: SampledSequence, settings: EpisodeSettings) -> None:
    generated = sequence.tokens.tolist()
    episode.builder.generated(sequence.tokens, sequence.logprobs, sequence.version, sequence.stop_reason)
    episode.tokens.extend(generated)
    episode.turn += 1
    text = settings.renderer.action_text(generated, settings.stop)
    episode.info["actions"].append(text)
    result = guarded.step(episode.environment, settings.environment, Action(text))
    if isinstance(result, str):
        episode.info["error"] = result
        episode.end = EndReason.FAILED
        return
    episode.builder.rewarded(result.reward)
    episode.info["environment"] = result.info
    if result.done:
        episode.end = EndReason.DONE
    elif episode.turn >= settings.max_turns:
        episode.end = EndReason.MAX_TURNS
    else:
        following = settings.renderer.following(result.observation, generated)
        if len(episode.tokens) + len(following) + settings.params.max_tokens > settings.max_context:
            episode.end = EndReason.CONTEXT
        else:
            episode.observe(following)


def _fits(episode: _Episode, settings: EpisodeSettings) -> bool:
    return len(episode.tokens) + settings.params.max_tokens <= settings.max_context


def _finish(episode: _Episode) -> Trajectory:
    assert episode.end is not None
    return episode.builder.terminate(episode.end, info=episode.info)
