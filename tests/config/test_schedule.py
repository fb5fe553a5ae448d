"""The learning rate of each step of a phase."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from opentinker_core.config.schema import OptimizerConfig, PhaseOptimizerConfig, RLPhase, SFTPhase


def rates(steps: int, **fields: object) -> list[float]:
    optimizer = PhaseOptimizerConfig.model_validate({"learning_rate": 1.0, **fields})
    return [optimizer.at(step, steps).learning_rate for step in range(1, steps + 1)]


def test_by_default_the_rate_stays() -> None:
    optimizer = PhaseOptimizerConfig(learning_rate=2e-3, beta2=0.99)
    assert optimizer.at(3, 7) == OptimizerConfig(learning_rate=2e-3, beta2=0.99)


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("constant", 2, [0.5, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("linear", 2, [0.5, 1, 1, 0.5]),
        ("cosine", 0, [1, 0.853553, 0.5, 0.146447]),
        ("cosine", 3, [1 / 3, 2 / 3, 1, 1]),
    ],
)
def test_it_rises_in_the_warm_up_and_falls_by_the_schedule(
    schedule: str, warmup_steps: int, expected: list[float]
) -> None:
    assert rates(4, schedule=schedule, warmup_steps=warmup_steps) == pytest.approx(expected, abs=1e-6)


@given(st.data(), st.integers(1, 300), st.sampled_from(["constant", "linear", "cosine"]))
def test_it_is_above_0_and_reaches_the_rate_at_the_end_of_the_warm_up(
    data: st.DataObject, steps: int, schedule: str
) -> None:
    warmup = data.draw(st.integers(0, steps - 1))
    found = rates(steps, schedule=schedule, warmup_steps=warmup)
    assert all(0 < rate <= 1 for rate in found)
    assert found[warmup] == 1
    assert found[:warmup] == sorted(found[:warmup])
    assert found[warmup:] == sorted(found[warmup:], reverse=True)


@pytest.mark.parametrize("phase", [SFTPhase, RLPhase])
def test_a_warm_up_of_the_whole_phase_is_refused(phase: type[SFTPhase | RLPhase]) -> None:
    expected = "optimizer.warmup_steps is 3; accepted: below the phase's 3 steps"
    with pytest.raises(ValidationError, match=expected):
        phase.model_validate({"steps": 3, "optimizer": {"warmup_steps": 3}})
