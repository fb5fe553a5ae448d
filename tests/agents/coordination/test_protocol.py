from typing import Any

import pytest

from opentinker_core.agents.coordination.protocol import OnDeath, TurnOrder, parse_protocol
from opentinker_core.errors import UsageError

MATCH: dict[str, Any] = {"policies": {"X": "good", "O": "random"}, "order": "sequential"}


def test_plain_data_becomes_a_protocol() -> None:
    protocol = parse_protocol(MATCH | {"frozen": ["random"], "phase_s": {"update": 5}, "on_death": "forfeit"})
    assert protocol.order is TurnOrder.SEQUENTIAL
    assert protocol.on_death is OnDeath.FORFEIT
    assert protocol.agents == ("X", "O")
    assert protocol.trained == ("good",)
    assert (protocol.phase_s.update, protocol.phase_s.refresh) == (5, 600)


def test_a_shared_policy_is_trained_once() -> None:
    assert parse_protocol(MATCH | {"policies": {"a": "p", "b": "q", "c": "p"}}).trained == ("p", "q")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": "chaos"}, "order: 'chaos': Input should be 'sequential', 'simultaneous'"),
        ({"policies": {}}, "policies: {}: Dictionary should have at least 1 item"),
        ({"policies": {"X": ""}}, "policies.X: '': String should have at least 1 character"),
        ({"quorum": 3}, "quorum: 3 is not accepted; accepted: 1 to 2, the agents"),
        ({"frozen": ["nobody"]}, "frozen: 'nobody' plays no agent; accepted: good, random"),
        ({"turn_barrier": False}, "turn_barrier: false is not accepted with order 'sequential'"),
        ({"turn_s": 0}, "turn_s: 0: Input should be greater than 0"),
        ({"turn_s": 10, "episode_s": 5}, "turn_s: 10.0 is not accepted; accepted: at most episode_s"),
        ({"attempts": 0}, "attempts: 0: Input should be greater than or equal to 1"),
        ({"phase_s": {"sleep": 1}}, "phase_s.sleep: 1: Extra inputs are not permitted"),
        ({"turns": 4}, "turns: 4: Extra inputs are not permitted"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_accepted_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_protocol(MATCH | change)
    assert message in str(refused.value)
