"""The config of credit: what it is by default, and what it refuses."""

import pytest
from pydantic import ValidationError

from opentinker_core.config.credit import Baseline, CreditConfig, Returns


def test_by_default_episodes_are_compared_within_their_group() -> None:
    config = CreditConfig()
    assert (config.returns, config.discount, config.baseline) == (Returns.EPISODE, 1, Baseline.GROUP)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"discount": 0.9}, "discount: 0.9; accepted with returns 'episode': 1"),
        ({"returns": "turn", "discount": 0}, "discount"),
        ({"returns": "turn", "discount": 1.01}, "discount"),
        ({"baseline": "role"}, "'group', 'turn', 'running' or 'none'"),
        ({"momentum": 1}, "momentum"),
        ({"lambda": 0.95}, "lambda"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CreditConfig.model_validate(given)
