"""Who answers for an agent: `PolicyActor` samples, `DemonstratingActor` asks the environment.

Both write what happens into the `Dialogue` of their agent's episode. An attempt that comes to nothing
is rewound, so that the next begins where it began, and draws the same tokens.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from envs.multi import MultiEnvironment
from envs.protocol import Action, Call, DemonstratesTools, Message, Observation
from opentinker_core.agents import guarded
from opentinker_core.agents.alone import Alone
from opentinker_core.agents.broker import Broker
from opentinker_core.agents.coordination.actors import ContextFull, Reply, Request
from opentinker_core.agents.dialogue import Dialogue, History, no_logprobs
from opentinker_core.agents.tools.formats import ToolCall
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.models.renderer import Renderer
from opentinker_core.sampling.protocol import SampledSequence, SamplingParams
from opentinker_core.seeds import derive_seed
from opentinker_core.trajectories.types import DEMONSTRATION, StopReason

if TYPE_CHECKING:
    from opentinker_core.agents.tools.making import OpenTools


@dataclass(frozen=True)
class Seat:
    """How an agent plays, whatever plays it."""

    environment: str
    """Its name, for errors."""
    renderer: Renderer
    params: SamplingParams
    stop: tuple[str, ...]
    max_context: int
    history: History = "append"
    max_observation_chars: int = 0
    """Of one message that it is shown; what is longer is cut, and says so; 0: no limit."""
    open_tools: "Callable[[], OpenTools] | None" = None
    """Opens the tools of one episode."""


class Actor:
    """What both actors have: a dialogue, and tools if the seat has any."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.tools = seat.open_tools() if seat.open_tools else None
        self.dialogue = Dialogue(seat.renderer, seat.history, self.tools.declarations if self.tools else ())
        self.prompt_text = ""
        """What it was shown first."""

    def close(self) -> None:
        """Close the tools."""
        if self.tools:
            self.tools.close()

    async def act(self, request: Request) -> Reply:
        """See `coordination.Actor`."""
        mark = self.dialogue.mark()
        try:
            return await self._answer(request)
        except BaseException:
            self.dialogue.rewind(mark)
            raise

    async def _answer(self, request: Request) -> Reply:
        raise NotImplementedError

    def _show(self, observation: Observation, room: int) -> None:
        """Add what the agent is shown, if `room` tokens fit after it.

        Raises:
            ContextFull: they do not, and the agent has said something already.
            UsageError: they do not at the very beginning.
            OpenTinkerError: there is nothing to answer, as the agent was never shown any text.
        """
        seat = self.seat
        if seat.max_observation_chars:
            observation = _capped(observation, seat.max_observation_chars)
        rendered = self.dialogue.rendered(observation)
        ids, begins = rendered
        if not ids and not self.dialogue.prompt:
            raise OpenTinkerError(
                f"environment {seat.environment!r}: an agent that was shown nothing is to act; accepted: text"
            )
        known = 0 if begins else len(self.dialogue.prompt)
        if known + len(ids) + room > seat.max_context:
            if not self.dialogue.turns:
                raise UsageError(
                    f"environment {seat.environment!r}: a prompt of {len(ids)} tokens and {room} "
                    f"to be generated do not fit the model's context of {seat.max_context}"
                )
            raise ContextFull(f"{known + len(ids)} tokens and {room} of {seat.max_context}")
        self.prompt_text = self.prompt_text or observation.text
        self.dialogue.observe(observation, rendered)


class PolicyActor(Actor):
    """Samples from the version that it is asked for."""

    def __init__(self, seat: Seat, broker: Broker, draw_seed: int) -> None:
        super().__init__(seat)
        self._broker, self._draw_seed = broker, draw_seed

    async def _answer(self, request: Request) -> Reply:
        first = len(self.dialogue.turns)
        said: list[SampledSequence] = []

        async def speak(observation: Observation) -> str:
            self._show(observation, self.seat.params.max_tokens)
            sequence = await self._broker.sample(
                request.episode,
                self.dialogue.prompt,
                self.seat.params,
                request.version,
                derive_seed(self._draw_seed, len(self.dialogue.turns)),
            )
            text = self.seat.renderer.action_text(sequence.tokens.tolist(), self.seat.stop)
            self.dialogue.spoke(sequence, text, (request.round, request.attempt))
            said.append(sequence)
            return text

        if self.tools is None:
            text = await speak(request.observation)
        else:
            from opentinker_core.agents.tools.rounds import answer

            answered = await answer(speak, request.observation, self.tools, request.deadline)
            text = answered.text
            for index in answered.masked:
                self.dialogue.mask(first + index)
        return Reply(Action(text), _version(said))


Ask = Callable[[Callable[[Any], Any], Any, object], Awaitable[Any]]
"""Calls a function with its argument, on behalf of an environment: as `Stepper.call`."""


class DemonstratingActor(Actor):
    """Says what the environment demonstrates; with tools, the calls that it names are really made."""

    def __init__(self, seat: Seat, environment: MultiEnvironment, ask: Ask) -> None:
        """`ask`: how the environment is called."""
        super().__init__(seat)
        self._environment = environment
        self._ask = ask

    async def _answer(self, request: Request) -> Reply:
        observation, results = request.observation, list[str]()
        while True:

            def demonstration(results: tuple[str, ...]) -> Action | tuple[Call, ...]:
                return self._next(request.agent, results)

            step = await self._ask(demonstration, tuple(results), self._environment)
            calls = [] if isinstance(step, Action) else [ToolCall(one.name, one.arguments) for one in step]
            text = step.text if isinstance(step, Action) else self._written(calls)
            tokens, logprobs = no_logprobs(self.seat.renderer.demonstration(Action(text)))
            self._show_all(observation, len(tokens))
            sequence = SampledSequence(tokens, logprobs, StopReason.STOP, DEMONSTRATION)
            self.dialogue.spoke(sequence, text, (request.round, request.attempt))
            if not calls:
                return Reply(Action(text), request.version)
            assert self.tools is not None
            shown = await self.tools.run(calls, request.deadline)
            results.extend(shown.texts)
            observation = shown.observation

    def _next(self, agent: str, results: tuple[str, ...]) -> Action | tuple[Call, ...]:
        name, environment = self.seat.environment, self._environment
        if isinstance(environment, Alone):
            source = environment.environment
            if isinstance(source, DemonstratesTools):
                if self.tools is None:
                    raise UsageError(f"tools: environment {name!r} demonstrates them; accepted: its tools")
                return source.demonstration_after(results)
            return guarded.demonstration(source, name)
        return guarded.demonstration_of(environment, name, agent)

    def _show_all(self, observation: Observation, room: int) -> None:
        try:
            self._show(observation, room)
        except ContextFull as full:
            raise UsageError(
                f"environment {self.seat.environment!r}: a demonstration does not fit the model's "
                f"context: {full}"
            ) from full

    def _written(self, calls: list[ToolCall]) -> str:
        assert self.tools is not None
        return self.tools.format.render(calls)


def _version(said: list[SampledSequence]) -> str:
    """What was sampled from; of several, the first that differs from the last tells of the trouble."""
    versions = {sequence.version: None for sequence in said}
    return next(iter(versions)) if len(versions) == 1 else " and ".join(versions)


def _capped(observation: Observation, limit: int) -> Observation:
    return Observation(tuple(_cut(message, limit) for message in observation.messages))


def _cut(message: Message, limit: int) -> Message:
    left = len(message.content) - limit
    if left <= 0:
        return message
    return replace(message, content=f"{message.content[:limit]}\n[{left} characters left out]")
