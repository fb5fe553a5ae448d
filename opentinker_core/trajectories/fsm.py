"""The state machine that trajectories are built through: what was sampled is what is recorded.

    PENDING --observed--> GENERATING --generated--> INTERACTING --observed--> GENERATING ...
                     any of these --terminate--> TERMINATED

Context enters only through `observed`, trained tokens only through `generated`. A call that raises
changes nothing.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np

from opentinker_core.trajectories.checks import check_logprobs, check_reward, check_turn
from opentinker_core.trajectories.errors import TrajectoryError, TransitionError
from opentinker_core.trajectories.types import EndReason, StopReason, Trajectory, Turn

Tokens = Sequence[int] | np.ndarray
_MAX_TOKEN = 2**31 - 1


class EpisodeState(StrEnum):
    """Where an agent stands in its episode."""

    PENDING = "pending"
    """Nothing was observed yet."""
    GENERATING = "generating"
    """The context is complete: the policy speaks next."""
    INTERACTING = "interacting"
    """The policy spoke: the environment answers next."""
    TERMINATED = "terminated"
    """The trajectory was handed out; nothing can be added."""


class TrajectoryBuilder:
    """Records one agent's episode, token in and token out, and hands out a checked `Trajectory`."""

    def __init__(
        self, *, trajectory_id: str, agent: str, environment: str, seed: int, group: int = 0, member: int = 0
    ) -> None:
        self._identity: dict[str, Any] = {
            "trajectory_id": trajectory_id,
            "agent": agent,
            "environment": environment,
            "seed": seed,
            "group": group,
            "member": member,
        }
        self._agent = agent
        self._state = EpisodeState.PENDING
        self._tokens: list[int] = []
        self._logprobs: list[np.ndarray] = []
        self._turns: list[Turn] = []

    @property
    def state(self) -> EpisodeState:
        """Where the episode stands."""
        return self._state

    @property
    def tokens(self) -> tuple[int, ...]:
        """All ids recorded so far: in GENERATING, the prompt of the next request."""
        return tuple(self._tokens)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns recorded so far."""
        return tuple(self._turns)

    def observed(self, tokens: Tokens) -> None:
        """Append context (PENDING or INTERACTING → GENERATING); empty only between turns.

        Raises:
            TransitionError: in another state.
            TrajectoryError: not token ids, or no tokens at the start of the episode.
        """
        self._require("observed", EpisodeState.PENDING, EpisodeState.INTERACTING)
        ids = _token_ids("observed tokens", tokens)
        if self._state is EpisodeState.PENDING and not len(ids):
            raise TrajectoryError("observed tokens", [], "at least one token to start an episode with")
        self._append(ids, np.zeros(len(ids), dtype=np.float32))
        self._state = EpisodeState.GENERATING

    def generated(
        self,
        tokens: Tokens,
        logprobs: Sequence[float] | np.ndarray,
        version: str,
        stop_reason: StopReason,
    ) -> None:
        """Append one turn exactly as it was sampled (GENERATING → INTERACTING).

        `logprobs`: one a token, of the distribution that was sampled from; all 0 when `version` is
        `demonstration`.

        Raises:
            TransitionError: in another state.
            TrajectoryError: no tokens, lengths differ, a logprob is positive or not finite, or
                `version` names no policy version.
        """
        self._require("generated", EpisodeState.GENERATING)
        ids = _token_ids("generated tokens", tokens)
        values = np.asarray(logprobs, dtype=np.float32)
        if not len(ids):
            raise TrajectoryError("generated tokens", [], "at least one token a turn")
        if values.shape != ids.shape:
            raise TrajectoryError("generated logprobs", list(values.shape), f"one a token: {list(ids.shape)}")
        check_logprobs("generated logprobs", values, np.ones(len(ids), dtype=bool))
        start = len(self._tokens)
        turn = Turn(len(self._turns), start, start + len(ids), self._agent, version, StopReason(stop_reason))
        check_turn("generated", turn, values)
        self._append(ids, values)
        self._turns.append(turn)
        self._state = EpisodeState.INTERACTING

    def rewarded(self, reward: float) -> None:
        """Set the reward of the turn that was just generated (INTERACTING), once.

        Raises:
            TransitionError: in another state, or the turn has its reward already.
            TrajectoryError: not a finite number.
        """
        self._require("rewarded", EpisodeState.INTERACTING)
        if self._turns[-1].reward is not None:
            raise TransitionError("rewarded", self._turns[-1].reward, "one reward a turn")
        check_reward("reward", reward)
        self._turns[-1] = replace(self._turns[-1], reward=float(reward))

    def terminate(self, end_reason: EndReason, info: dict[str, Any] | None = None) -> Trajectory:
        """End the episode (any state → TERMINATED). `info`: JSON values for the record.

        Raises:
            TransitionError: the episode has ended already.
        """
        self._require("terminate", *(state for state in EpisodeState if state is not EpisodeState.TERMINATED))
        tokens = np.array(self._tokens, dtype=np.int32)
        mask = np.zeros(len(tokens), dtype=bool)
        for turn in self._turns:
            mask[turn.start : turn.end] = True
        trajectory = Trajectory(
            **self._identity,
            tokens_T=tokens,
            mask_T=mask,
            logprobs_T=np.concatenate([np.zeros(0, dtype=np.float32), *self._logprobs]),
            turns=tuple(self._turns),
            end_reason=EndReason(end_reason),
            info=dict(info or {}),
        )
        self._state = EpisodeState.TERMINATED
        return trajectory

    def _append(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        self._tokens.extend(ids.tolist())
        self._logprobs.append(logprobs)

    def _require(self, call: str, *states: EpisodeState) -> None:
        if self._state not in states:
            accepted = f"{call}() only in " + " or ".join(state.name for state in states)
            raise TransitionError("state", self._state.name, accepted)


def _token_ids(field: str, tokens: Tokens) -> np.ndarray:
    ids = np.asarray(tokens)
    if ids.size == 0:
        return np.zeros(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TrajectoryError(field, f"{ids.dtype}{list(ids.shape)}", "a flat sequence of integers")
    if ids.min() < 0 or ids.max() > _MAX_TOKEN:
        raise TrajectoryError(field, (int(ids.min()), int(ids.max())), f"token ids in [0, {_MAX_TOKEN}]")
    return ids.astype(np.int64)
