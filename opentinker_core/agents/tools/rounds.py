"""One turn of an agent that has tools: it speaks, its calls are answered, it speaks again.

    speak(observation) ─ text with calls ─ results, as an observation of `tool` messages ─┐
      ▲                                                                                   │
      └───────────────────────────────────────────────────────────────────────────────────┘
    until a text has no calls (that is the answer), or `max_rounds` rounds have been answered

What is sampled in between are turns of the trajectory like all others; results are observations.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from envs.protocol import Observation
from opentinker_core.agents.coordination.actors import Deadline
from opentinker_core.agents.tools.formats import CallProblem
from opentinker_core.agents.tools.opened import OpenTools
from opentinker_core.agents.tools.protocol import ToolError

Speak = Callable[[Observation], Awaitable[str]]
"""Adds an observation to the agent's record, samples one turn, and gives its text."""


@dataclass(frozen=True)
class Answer:
    """What the agent said in the end, and what it did to get there."""

    text: str
    """Its last text; without calls that were not made any more, else to the letter."""
    rounds: int
    """Rounds of calls that were answered: it spoke once more than that."""
    calls: int
    """Calls in them, those that could not be read included."""
    errors: Counter[ToolError] = field(default_factory=Counter)
    """Errors by kind; calls after the last round count as `over_limit`."""
    masked: tuple[int, ...] = ()
    """Which of the times that it spoke (from 0) must not be trained on."""


async def answer(speak: Speak, observation: Observation, tools: OpenTools, deadline: Deadline) -> Answer:
    """Let the agent speak, with as many rounds of calls as it wants and is allowed.

    The same texts give the same observations, as far as the tools themselves are deterministic and no
    time runs out. What `speak` raises ends it; the next attempt is given the results of the same calls
    again, without a second call.

    Raises:
        OpenTinkerError: a tool is not to be had.
    """
    with tools.attempt():
        return await _answer(speak, observation, tools, deadline)


async def _answer(speak: Speak, observation: Observation, tools: OpenTools, deadline: Deadline) -> Answer:
    config = tools.config
    calls, errors, masked = 0, Counter[ToolError](), list[int]()
    for rounds in range(config.max_rounds + 1):
        parsed = tools.parse(await speak(observation))
        unread = any(isinstance(call, CallProblem) for call in parsed.calls)
        if unread and config.on_malformed == "mask":
            masked.append(rounds)
        if not parsed.calls or rounds == config.max_rounds:
            break
        results = await tools.run(parsed.calls, deadline)
        calls += len(results.each)
        errors += results.errors
        observation = results.observation
    if parsed.calls:
        errors[ToolError.OVER_LIMIT] += len(parsed.calls)
    return Answer(parsed.content, rounds, calls, errors, tuple(masked))
