"""The state machine: legal calls record exactly what they were given, illegal ones change nothing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from opentinker_core.trajectories.errors import TrajectoryError, TransitionError
from opentinker_core.trajectories.fsm import EpisodeState, TrajectoryBuilder
from opentinker_core.trajectories.types import EndReason, StopReason, Trajectory
from tests.trajectories import strategies

BUILD: dict[str, Any] = {"trajectory_id": "t", "agent": "solver", "environment": "arithmetic", "seed": 0}


class Episode(RuleBasedStateMachine):
    """Random calls against a model that keeps (token, sampled?, logprob) triples and rewards."""

    def __init__(self) -> None:
        super().__init__()
        self.builder = TrajectoryBuilder(**BUILD)
        self.state = EpisodeState.PENDING
        self.recorded: list[tuple[int, bool, float]] = []
        self.turn_lengths: list[int] = []
        self.rewards: list[float | None] = []
        self.trajectory: Trajectory | None = None

    def attempt(self, legal: bool, call: Callable[[], Any]) -> Any:
        if legal:
            return call()
        before = (self.builder.state, self.builder.tokens, self.builder.turns)
        with pytest.raises(TrajectoryError):
            call()
        assert (self.builder.state, self.builder.tokens, self.builder.turns) == before
        return None

    @rule(tokens=strategies.tokens)
    def observed(self, tokens: list[int]) -> None:
        starts = self.state is EpisodeState.PENDING and bool(tokens)
        legal = starts or self.state is EpisodeState.INTERACTING
        self.attempt(legal, lambda: self.builder.observed(tokens))
        if legal:
            self.recorded += [(token, False, 0.0) for token in tokens]
            self.state = EpisodeState.GENERATING

    @rule(sampled=st.lists(st.tuples(st.integers(0, 9), strategies.logprobs), max_size=4))
    def generated(self, sampled: list[tuple[int, float]]) -> None:
        legal = self.state is EpisodeState.GENERATING and bool(sampled)
        ids, logprobs = [token for token, _ in sampled], [logprob for _, logprob in sampled]
        self.attempt(legal, lambda: self.builder.generated(ids, logprobs, "adder@1", StopReason.STOP))
        if legal:
            self.recorded += [(token, True, logprob) for token, logprob in sampled]
            self.turn_lengths.append(len(sampled))
            self.rewards.append(None)
            self.state = EpisodeState.INTERACTING

    @rule(
        bad=st.sampled_from(
            [
                ([1, 2], [-0.5], "adder@1"),
                ([1], [0.1], "adder@1"),
                ([1], [float("nan")], "adder@1"),
                ([1], [float("-inf")], "adder@1"),
                ([-1], [-0.5], "adder@1"),
                ([2**31], [-0.5], "adder@1"),
                ([1.5], [-0.5], "adder@1"),
                ([1], [-0.5], ""),
                ([1], [-0.5], "adder"),
                ([1], [-0.5], "demonstration"),
            ]
        )
    )
    def generated_wrongly(self, bad: tuple[list[int], list[float], str]) -> None:
        self.attempt(False, lambda: self.builder.generated(*bad, StopReason.STOP))

    @rule(reward=strategies.rewards | st.just(float("nan")))
    def rewarded(self, reward: float) -> None:
        open_turn = self.state is EpisodeState.INTERACTING and self.rewards[-1] is None
        legal = open_turn and reward == reward
        self.attempt(legal, lambda: self.builder.rewarded(reward))
        if legal:
            self.rewards[-1] = reward

    @rule(end_reason=st.sampled_from(EndReason), really=st.integers(0, 3))
    def terminate(self, end_reason: EndReason, really: int) -> None:
        if really and self.state is not EpisodeState.TERMINATED:
            return  # else most episodes would end at once
        legal = self.state is not EpisodeState.TERMINATED
        trajectory = self.attempt(legal, lambda: self.builder.terminate(end_reason))
        if legal:
            self.trajectory = trajectory
            self.state = EpisodeState.TERMINATED

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.builder.state is self.state
        assert list(self.builder.tokens) == [token for token, _, _ in self.recorded]

    def teardown(self) -> None:
        trajectory = self.trajectory or self.builder.terminate(EndReason.DONE)
        expected = [(token, sampled, np.float32(logprob)) for token, sampled, logprob in self.recorded]
        arrays = (trajectory.tokens_T, trajectory.mask_T, trajectory.logprobs_T)
        assert list(zip(*arrays, strict=True)) == expected
        assert [turn.end - turn.start for turn in trajectory.turns] == self.turn_lengths
        assert [turn.reward for turn in trajectory.turns] == self.rewards
        assert trajectory.sampled_tokens == trajectory.mask_T.sum()


TestEpisode = Episode.TestCase
TestEpisode.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_an_illegal_call_names_the_state_and_what_is_accepted() -> None:
    builder = TrajectoryBuilder(**BUILD)
    with pytest.raises(TransitionError, match=r"state: 'PENDING' .* generated\(\) only in GENERATING"):
        builder.generated([1], [-1.0], "adder@1", StopReason.STOP)


def test_a_turn_is_rewarded_once() -> None:
    builder = TrajectoryBuilder(**BUILD)
    builder.observed([1])
    builder.generated([2], [-1.0], "adder@1", StopReason.STOP)
    builder.rewarded(1.0)
    with pytest.raises(TransitionError, match="one reward a turn"):
        builder.rewarded(1.0)


def test_nothing_is_added_to_what_was_sampled() -> None:
    trajectory = strategies.two_turns()
    assert trajectory.tokens_T.tolist() == [10, 11, 20, 21, 12, 22, 13]
    assert trajectory.mask_T.tolist() == [False, False, True, True, False, True, False]
    assert [(turn.start, turn.end, turn.version) for turn in trajectory.turns] == [
        (2, 4, "adder@3"),
        (5, 6, "adder@4"),
    ]


def test_a_demonstration_has_no_logprobs() -> None:
    builder = TrajectoryBuilder(**BUILD)
    builder.observed([1])
    with pytest.raises(TrajectoryError, match="all 0 in a demonstration"):
        builder.generated([2, 3], [0.0, -0.1], "demonstration", StopReason.STOP)
    builder.generated([2, 3], [0.0, 0.0], "demonstration", StopReason.STOP)


def test_an_episode_may_fail_before_anything_was_sampled() -> None:
    trajectory = TrajectoryBuilder(**BUILD).terminate(EndReason.FAILED)
    assert len(trajectory.tokens_T) == 0
    assert trajectory.reward is None
