import json
from typing import Any

import pytest

from envs.multi import Situation
from envs.playing import BrokenError
from envs.protocol import Action, Call, Message, Observation, StepResult
from envs.serving import wire

SHOWN = Observation((Message("system", "be brief"), Message("tool", "é 🙂\n")))


def _sent(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_what_is_sent_comes_back_figure_for_figure() -> None:
    result = StepResult(SHOWN, 1, False, {"a": [0.1, None], "b": {"c": True}})
    back = wire.result_in(_sent(wire.result_out(result)))
    assert back == result
    assert isinstance(back.reward, int)
    situation = Situation(("a", "b"), True, {"a": SHOWN}, {"b": -0.25, "a": 1}, {"round": 3})
    assert wire.situation_in(_sent(wire.situation_out(situation))) == situation
    for shown in (Action("7"), (Call("calculator", {"expression": "1+1"}), Call("python", {}))):
        assert wire.demonstration_in(_sent(wire.demonstration_out(shown))) == shown


@pytest.mark.parametrize(
    ("encode", "value"),
    [
        (wire.observation_out, "text"),
        (wire.observation_out, Observation((Message("narrator", "x"),))),  # type: ignore[arg-type]
        (wire.result_out, (SHOWN, 1.0, True, {})),
        (wire.result_out, StepResult(SHOWN, "1", True)),  # type: ignore[arg-type]
        (wire.situation_out, StepResult(SHOWN, 1.0, True)),
        (wire.situation_out, Situation(("a",), rewards={"a": True})),
        (wire.demonstration_out, "7"),
        (wire.demonstration_out, ("7",)),
    ],
)
def test_what_is_not_of_the_protocol_is_not_sent(encode: Any, value: Any) -> None:
    with pytest.raises(BrokenError):
        encode(value)
