"""Episodes: what the sampler returned is what is recorded; failures are missing; limits are told."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs.protocol import Action, Observation, StepResult
from opentinker_core.agents.episodes import EpisodeSettings, EpisodeSpec, demonstrate, play
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.models.renderer import Renderer
from opentinker_core.sampling.protocol import BASE, SampledSequence, SampleRequest, SamplingParams
from opentinker_core.trajectories.types import EndReason, Trajectory
from tests.tiny import TinyEngine


class Chatty:
    """Lasts `turns` turns, rewards turn k with k, answers with text; seeds ending in 7 break at turn 2."""

    def __init__(self, turns: int = 3, broken: bool = False) -> None:
        self._turns, self._broken = turns, broken
        self._turn, self._seed = 0, 0

    def reset(self, seed: int) -> Observation:
        self._turn, self._seed = 0, seed
        return Observation.user(f"start {seed % 3}: ")

    def step(self, action: Action) -> StepResult:
        self._turn += 1
        if self._broken or (self._seed % 10 == 7 and self._turn == 2):
            raise ConnectionError("the world ended")
        done = self._turn == self._turns
        return StepResult(Observation.user("" if done else f" [{self._turn}] "), float(self._turn), done)


class RecordingSampler:
    """The real sampler, with a log of what went through it."""

    def __init__(self, engine: TinyEngine) -> None:
        self._engine = engine
        self.log: list[tuple[SampleRequest, list[SampledSequence]]] = []

    def refresh(self, version: str, snapshot_uri: str, digest: str) -> None:
        self._engine.sampler.refresh(version, snapshot_uri, digest)

    def sample(self, requests: Sequence[SampleRequest]) -> list[list[SampledSequence]]:
        answers = self._engine.sampler.sample(requests)
        self.log.extend(zip(requests, answers, strict=True))
        return answers


@pytest.fixture(scope="module")
def engine(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyEngine:
    return TinyEngine.open(tiny_home, tmp_path_factory.mktemp("episodes"))


@pytest.fixture
def settings(engine: TinyEngine) -> EpisodeSettings:
    return _settings(engine, Chatty)


def _settings(engine: TinyEngine, make: Callable[[], Chatty]) -> EpisodeSettings:
    renderer = Renderer(engine.tokenizer, "plain")
    params = SamplingParams(max_tokens=5, stop_token_ids=renderer.stop_token_ids)
    return EpisodeSettings("chatty", make, renderer, params, (), max_turns=8, max_context=512, step=3)


def _specs(seeds: Sequence[int]) -> list[EpisodeSpec]:
    return [EpisodeSpec(seed, index // 2, index % 2, 1000 + index) for index, seed in enumerate(seeds)]


def _by_prompt(log: list[tuple[SampleRequest, list[SampledSequence]]]) -> set[tuple[int, ...]]:
    return {
        (*request.prompt_tokens, *sequence.tokens.tolist())
        for request, sequences in log
        for sequence in sequences
    }


def test_what_was_sampled_is_what_is_recorded(engine: TinyEngine, settings: EpisodeSettings) -> None:
    sampler = RecordingSampler(engine)
    trajectories = play(_specs([1, 1, 2, 2]), settings, sampler, BASE)
    seen = _by_prompt(sampler.log)
    for trajectory in trajectories:
        assert len(trajectory.turns) == 3
        for turn in trajectory.turns:
            assert tuple(trajectory.tokens_T[: turn.end].tolist()) in seen
            assert turn.version == BASE
        assert [turn.reward for turn in trajectory.turns] == [1.0, 2.0, 3.0]
        assert trajectory.reward == 6.0
        assert trajectory.end_reason is EndReason.DONE
    sampled = sum(len(sequence.tokens) for _, sequences in sampler.log for sequence in sequences)
    assert sum(int(trajectory.mask_T.sum()) for trajectory in trajectories) == sampled


def test_members_of_a_group_share_the_prefill_and_draw_differently(
    engine: TinyEngine, settings: EpisodeSettings
) -> None:
    sampler = RecordingSampler(engine)
    play(_specs([4, 4, 5, 5]), replace(settings, max_turns=1), sampler, BASE)
    assert sorted(len(request.seeds) for request, _ in sampler.log) == [2, 2]
    assert len({seed for request, _ in sampler.log for seed in request.seeds}) == 4


def test_a_broken_episode_is_missing_and_the_others_go_on(
    engine: TinyEngine, settings: EpisodeSettings
) -> None:
    good, broken = play(_specs([1, 7]), settings, RecordingSampler(engine), BASE)
    assert good.reward == 6.0
    assert broken.end_reason is EndReason.FAILED
    assert broken.reward is None
    assert broken.info["error"] == "ConnectionError: the world ended"
    assert len(broken.turns) == 2


def test_an_environment_that_always_fails_is_an_error(engine: TinyEngine) -> None:
    settings = _settings(engine, lambda: Chatty(broken=True))
    with pytest.raises(OpenTinkerError, match=r"all 2 episodes of step 3 failed.*the world ended"):
        play(_specs([1, 2]), settings, RecordingSampler(engine), BASE)


def test_turn_and_context_limits_truncate_with_their_reason(engine: TinyEngine) -> None:
    settings = _settings(engine, lambda: Chatty(turns=100))
    (by_turns,) = play(_specs([1]), replace(settings, max_turns=4), RecordingSampler(engine), BASE)
    assert (by_turns.end_reason, len(by_turns.turns)) == (EndReason.MAX_TURNS, 4)
    (by_context,) = play(
        _specs([1]), replace(settings, max_turns=99, max_context=60), RecordingSampler(engine), BASE
    )
    assert by_context.end_reason is EndReason.CONTEXT
    assert len(by_context.tokens_T) <= 60
    assert by_context.reward is not None


def test_a_first_prompt_that_does_not_fit_is_refused(engine: TinyEngine, settings: EpisodeSettings) -> None:
    with pytest.raises(UsageError, match="do not fit the model's context of 10"):
        play(_specs([1]), replace(settings, max_context=10), RecordingSampler(engine), BASE)


def test_an_environment_without_demonstrations_is_named(settings: EpisodeSettings) -> None:
    with pytest.raises(UsageError, match="'chatty' has no demonstrations"):
        demonstrate(_specs([1]), settings)


def test_episodes_do_not_depend_on_who_is_played_beside_them(
    engine: TinyEngine, settings: EpisodeSettings
) -> None:
    specs = _specs([1, 1, 2, 2, 3, 3])

    def tokens(trajectories: list[Trajectory]) -> list[list[int]]:
        return [trajectory.tokens_T.tolist() for trajectory in trajectories]

    together = tokens(play(specs, settings, RecordingSampler(engine), BASE))
    alone = [tokens(play([spec], settings, RecordingSampler(engine), BASE))[0] for spec in specs]
    assert together == alone
    assert np.unique([len(row) for row in together]).size >= 1


class Faulty(Chatty):
    """Does one thing wrong."""

    def __init__(self, fault: str) -> None:
        super().__init__(turns=1)
        self._fault = fault

    def reset(self, seed: int) -> Observation:
        if self._fault == "reset raises":
            raise SystemExit("no\nmore")
        observation = super().reset(seed)
        if self._fault == "reset returns":
            return None  # type: ignore[return-value]
        return Observation.user("") if self._fault == "empty" else observation

    def step(self, action: Action) -> StepResult:
        result = super().step(action)
        rewards = {"text": "1", "missing": None, "huge": 10**400, "nan": float("nan")}
        if self._fault in rewards:
            return replace(result, reward=rewards[self._fault])
        return (result, 1.0) if self._fault == "step returns" else result  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("reset raises", r"reset\(1\) raised SystemExit: no more"),
        ("reset returns", "reset returned NoneType; accepted: Observation"),
        ("empty", "empty observation"),
        ("step returns", "step returned tuple; accepted: StepResult"),
        ("text", "reward '1'; accepted: a finite number"),
        ("missing", "reward None"),
        ("huge", "reward 1000"),
        ("nan", "reward nan"),
    ],
)
def test_an_environment_that_breaks_the_protocol_is_named(
    engine: TinyEngine, fault: str, message: str
) -> None:
    settings = _settings(engine, lambda: Faulty(fault))
    with pytest.raises(OpenTinkerError, match=rf"environment 'chatty': .*{message}"):
        play(_specs([1]), settings, RecordingSampler(engine), BASE)
