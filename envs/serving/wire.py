"""What client, listener and shard say to each other: the nouns of episodes as JSON (requests: `bodies`).

An observation is a list of `[role, content]`; numbers, texts and `info` are what they are in Python, so
that a served environment is the local one, figure for figure.
"""

import struct
from collections.abc import Mapping
from typing import Any

from envs.multi import Situation
from envs.playing import BrokenError, Check, require_observation, require_result
from envs.protocol import Action, Call, Message, Observation, StepResult

FRAME = struct.Struct(">IB")
"""Before each answer of a shard: bytes of JSON that follow, and the outcome."""
OK, REFUSED, RAISED, BROKEN = range(4)
"""Outcomes: done; the environment cannot be made so; its code raised; it answered what is no answer."""


def observation_out(observation: Observation) -> list[list[str]]:
    """As JSON; raises `BrokenError` where it is none."""
    require_observation(observation)
    return [[message.role, message.content] for message in observation.messages]


def observation_in(value: Any) -> Observation:
    """From JSON."""
    observation = Observation(tuple(Message(role, content) for role, content in value))
    require_observation(observation)
    return observation


def result_out(result: StepResult) -> dict[str, Any]:
    """As JSON; raises `BrokenError` where it is none."""
    require_result(result)
    return {
        "observation": observation_out(result.observation),
        "reward": result.reward,
        "done": result.done,
        "info": result.info,
    }


def result_in(value: Any) -> StepResult:
    """From JSON."""
    result = StepResult(
        observation_in(value["observation"]), value["reward"], value["done"], dict(value["info"])
    )
    require_result(result)
    return result


def situation_out(situation: Situation) -> dict[str, Any]:
    """As JSON; raises `BrokenError` where it is none."""
    if not isinstance(situation, Situation):
        raise BrokenError(Check.TYPES, f"a situation is {type(situation).__name__}, not Situation")
    return {
        "to_act": list(situation.to_act),
        "together": situation.together,
        "observations": {agent: observation_out(one) for agent, one in situation.observations.items()},
        "rewards": {agent: _number(one) for agent, one in situation.rewards.items()},
        "info": situation.info,
    }


def situation_in(value: Any) -> Situation:
    """From JSON."""
    return Situation(
        tuple(str(agent) for agent in value["to_act"]),
        together=bool(value["together"]),
        observations={agent: observation_in(one) for agent, one in value["observations"].items()},
        rewards={agent: _number(one) for agent, one in value["rewards"].items()},
        info=dict(value["info"]),
    )


def demonstration_out(shown: Action | tuple[Call, ...]) -> dict[str, Any]:
    """As JSON; raises `BrokenError` where it is none."""
    if isinstance(shown, Action) and isinstance(shown.text, str):
        return {"text": shown.text}
    if isinstance(shown, tuple) and all(isinstance(call, Call) for call in shown):
        return {"calls": [{"name": call.name, "arguments": dict(call.arguments)} for call in shown]}
    raise BrokenError(Check.TYPES, f"a demonstration is {shown!r:.60}, not an Action or a tuple of Calls")


def demonstration_in(value: Mapping[str, Any]) -> Action | tuple[Call, ...]:
    """From JSON."""
    if "calls" in value:
        return tuple(Call(str(call["name"]), dict(call["arguments"])) for call in value["calls"])
    return Action(str(value["text"]))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BrokenError(Check.TYPES, f"a reward is {value!r:.40}, not a number")
    return value
