"""Running baselines: weights of the steps, and the way through a version's metrics and back."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_core.advantages.credit import AgentPart, credit
from opentinker_core.advantages.running import RunningMean, from_metrics, to_metrics
from opentinker_core.config.credit import Advantage, CreditConfig
from opentinker_core.errors import UsageError

values = st.floats(-1e6, 1e6)
momenta = st.floats(0, 0.999)


@given(values=st.lists(values, min_size=1, max_size=30), momentum=momenta)
def test_the_weights_fall_by_the_momentum_and_sum_to_one(values: list[float], momentum: float) -> None:
    running = RunningMean(0.0, 0)
    for value in values:
        running = running.after(value, momentum)
    weights = [momentum**age for age in reversed(range(len(values)))]
    expected = math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)
    assert running.mean == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert running.steps == len(values)


@given(
    running=st.dictionaries(
        st.text("aXO_-1/", min_size=1),
        st.builds(RunningMean, mean=st.floats(allow_nan=False), steps=st.integers(1, 2**40)),
    )
)
def test_metrics_keep_every_bit(running: dict[str, RunningMean]) -> None:
    metrics = {"loss": 1.0, "baseline": 2.0} | to_metrics(running)
    assert all(isinstance(value, float) for value in metrics.values())
    assert from_metrics(json.loads(json.dumps(metrics))) == running


def test_a_baseline_without_its_steps_is_refused() -> None:
    with pytest.raises(UsageError, match="'baseline/X/mean' is there without baseline/X/steps"):
        from_metrics({"baseline/X/mean": 0.5})


@given(
    steps=st.lists(st.lists(st.tuples(st.sampled_from("XO"), values), max_size=4), max_size=8), data=st.data()
)
def test_a_run_killed_anywhere_and_resumed_gets_the_same_advantages(steps, data) -> None:
    config = CreditConfig(baseline="running", momentum=0.7)
    killed_at = data.draw(st.integers(0, len(steps)))

    def play(resume_at: int | None) -> list[list[list[float]]]:
        running, found = {}, []
        for number, step in enumerate(steps):
            if number == resume_at:
                running = from_metrics(json.loads(json.dumps(to_metrics(running))))
            done = credit([AgentPart(0, role, (0.0, v)) for role, v in step], config, Advantage.GRPO, running)
            running = done.running
            found.append([one.tolist() for one in done.advantages])
        return found

    assert play(killed_at) == play(None)


def test_a_step_without_known_rewards_leaves_a_role_as_it_was() -> None:
    past = {"X": RunningMean(0.25, 3), "O": RunningMean(-0.25, 3)}
    config = CreditConfig(baseline="running")
    done = credit([AgentPart(0, "X", None), AgentPart(0, "O", (1.0,))], config, Advantage.GRPO, past)
    assert done.running["X"] == past["X"]
    assert done.running["O"].steps == 4
    assert past["O"] == RunningMean(-0.25, 3)
