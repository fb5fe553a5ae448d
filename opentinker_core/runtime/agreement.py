"""Whether sampler and trainer agree about the versions of a run: the canary, and what an update shows."""

import logging
from collections.abc import Sequence

import numpy as np

from opentinker_core.config.schema import TrainConfig
from opentinker_core.policies.types import PolicyVersion
from opentinker_core.runtime.policy_states import PolicyStates
from opentinker_core.runtime.protocol import RunEngine
from opentinker_core.sampling.canary import Canary
from opentinker_core.sampling.protocol import BASE
from opentinker_core.trajectories.types import Datum

logger = logging.getLogger(__name__)

_MISMATCH_ALARM = {"float32": 1e-3, "bfloat16": 0.5}
"""Difference between sampler and trainer logprobs above which a wrong adapter is the likely cause."""


class Agreement:
    """See the module."""

    def __init__(self, config: TrainConfig, engine: RunEngine, states: PolicyStates, run_id: str) -> None:
        self._engine, self._states, self._run_id = engine, states, run_id
        kind = config.runtime.sampler
        theirs = config.runtime.vllm.dtype if kind == "vllm" else "auto"
        coarse = engine.dtype != "float32" or theirs not in ("auto", "float32")
        self._canary = config.canary.enabled and Canary(
            config.canary,
            engine.sampler,
            self._score,
            engine.tokenizer,
            kind=kind,
            dtype="bfloat16" if coarse else "float32",
        )
        self._every = config.canary.every
        self._refreshes = 0
        self._served: str | None = None
        self._due = False
        self.metrics: dict[str, float] = {}
        """Of the version that is served (see `Canary.check`); empty if it was not compared."""

    def served(self, version: PolicyVersion) -> None:
        """Say that the sampler was given the run's current version, and compare it if the trainer holds it.

        Raises:
            CanaryError: the two disagree (see `config.canary`).
        """
        if version.ref != self._served:
            self._served, self.metrics = version.ref, {}
            self._due = self._refreshes % self._every == 0
            self._refreshes += 1
        self.compare(version)

    def compare(self, version: PolicyVersion) -> None:
        """Compare the served version, once; after a resume the trainer holds it from the next update on.

        Raises:
            CanaryError: as `served`.
        """
        if self._canary and self._due and self._served == version.ref and self._states.holds(version):
            self.metrics = self._canary.check(version.ref)
            self._due = False

    def of_update(
        self, logprobs: Sequence[np.ndarray], datums: Sequence[Datum], version: str
    ) -> dict[str, float]:
        """How far the trainer's `logprobs` are from the sampler's, on what `version` sampled."""
        gaps = np.concatenate(
            [
                np.abs(ours - datum.sampler_logprobs_N)[datum.mask_N]
                for ours, datum in zip(logprobs, datums, strict=True)
            ]
        )
        largest = float(gaps.max())
        if largest > _MISMATCH_ALARM[self._engine.dtype]:
            logger.warning("sampler and trainer logprobs differ by %.3g at %s", largest, version)
        return {"logprob_gap_max": largest, "logprob_gap_mean": float(gaps.mean())}

    def _score(self, version: str, datums: Sequence[Datum]) -> list[np.ndarray]:
        return self._engine.trainer.forward(None if version == BASE else self._run_id, datums)
