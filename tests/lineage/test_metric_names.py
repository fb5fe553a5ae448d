"""Names of metrics are such that MLflow takes them, whatever agents are called."""

import pytest
from mlflow.utils.validation import _validate_metric_name

from opentinker_core.lineage.runs import metric_name

NAMES = ["a@b", "a#b", "..", ".", "a/../b", "a/", "/a", "", "a\nb", "x" * 300]


def test_names_that_mlflow_takes_are_left_alone() -> None:
    for name in ("reward/X", "reward/Ünï", "baseline/player 1/mean", "reward/" + "x" * 200):
        _validate_metric_name(name)
        assert metric_name(name) == name


@pytest.mark.parametrize("agent", NAMES, ids=lambda name: repr(name)[:20])
def test_others_become_names_that_it_takes(agent: str) -> None:
    name = metric_name(f"reward/{agent}")
    assert name.startswith("reward/")
    assert len(name) <= 250
    _validate_metric_name(name)


def test_they_stay_apart() -> None:
    assert len({metric_name(f"reward/{agent}") for agent in NAMES}) == len(NAMES)
