"""What a policy learns follows its seat: policies that exchange seats exchange their curves."""

from pathlib import Path

import pytest

from benchmarks.agents_learning import collecting, exchanged, learn

pytestmark = pytest.mark.learning


def test_policies_that_change_seats_exchange_their_curves(tmp_path: Path) -> None:
    short = ["sft.steps=6", "sft.publish_every=6", "sft.examples=60"]
    short += ["rl.steps=3", "rl.groups=12", "evaluation.episodes=10"]
    config = collecting(3, 0, *short)
    one = learn(config, tmp_path / "one")
    other = learn(exchanged(config, "p1", "p2"), tmp_path / "other")
    assert one["p1"].curve != one["p2"].curve
    assert [one[name].curve for name in ("p1", "p2", "p3")] == [
        other[name].curve for name in ("p2", "p1", "p3")
    ]
