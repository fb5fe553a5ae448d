"""The tools of one agent in one episode, in use: a round of calls is answered in worker threads.

Calls of tools of the same queue (`python`, whose programs share files) are made in their order, all
others side by side: the same calls give the same results, whatever the threads do. Programs run as many
at a time as there are cores; a call's own time counts from when it begins.
"""

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import TracebackType

from envs.protocol import Message, Observation
from opentinker_core.agents.coordination.actors import Deadline as TurnDeadline
from opentinker_core.agents.tools.formats import (
    CallProblem,
    ParsedAnswer,
    ToolCall,
    ToolDeclaration,
    ToolFormat,
)
from opentinker_core.agents.tools.protocol import Deadline, Toolbox, ToolError, ToolResult
from opentinker_core.config.tools import ToolsConfig
from opentinker_core.errors import UsageError

_WAITING = 64
"""Calls of all agents that wait for other machines at a time."""

_REASONING = ("<think>", "</think>")

Found = ToolCall | CallProblem


@dataclass(frozen=True)
class Results:
    """The answers to a round of calls, in the order of the calls."""

    each: tuple[ToolResult, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """What the model is told."""
        return tuple(result.text for result in self.each)

    @property
    def observation(self) -> Observation:
        """The same, as it is shown."""
        return Observation(tuple(Message("tool", text) for text in self.texts))

    @property
    def errors(self) -> Counter[ToolError]:
        """How many went wrong, by kind."""
        return Counter(result.error for result in self.each if result.error is not None)


class OpenTools:
    """An agent's tools, how it calls them, and what may be closed afterwards."""

    def __init__(
        self,
        config: ToolsConfig,
        wire: ToolFormat,
        toolbox: Toolbox,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Take charge of `toolbox`; `on_close` is called once, when no call runs any more."""
        self.config, self.format, self._toolbox, self._on_close = config, wire, toolbox, on_close
        self._lock = threading.Lock()
        self._running, self._closed = 0, False
        self._made: list[tuple[str, Results]] = []
        """Rounds of this turn."""
        self._replay: list[tuple[str, Results]] | None = None
        """Those of the attempts before that have not come again yet; None: nothing is kept."""

    @property
    def declarations(self) -> tuple[ToolDeclaration, ...]:
        """What the agent's first prompt tells of them: nothing where the config does not want it."""
        return self._toolbox.declarations if self.config.declare else ()

    def parse(self, text: str) -> ParsedAnswer:
        """The calls of a turn, and its text without them. Calls within the reasoning are thoughts."""
        opening, closing = _REASONING
        thought, closed, said = text.partition(closing)
        if not closed:
            if text.lstrip().startswith(opening):  # it did not come to an end
                return ParsedAnswer(text, ())
            thought, said = "", text
        parsed = self.format.parse(said)
        return ParsedAnswer(thought + closed + (parsed.content if parsed.calls else said), parsed.calls)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """An attempt at a turn. If it fails, the next one gets the results of the same rounds from memory.

        An attempt draws the tokens of the one before: its calls would be made twice, and find the files
        that the first ones left.
        """
        self._replay = list(self._made)
        try:
            yield
            self._made.clear()
        finally:
            self._replay = None

    async def run(self, calls: Sequence[Found], deadline: TurnDeadline) -> "Results":
        """Answer a round of calls, in their order; what has no answer by the deadline has timed out.

        Raises:
            OpenTinkerError: a tool is not to be had (a sandbox that cannot be set up, a server that died),
                or these tools are closed.
        """
        if self._replay is None:
            return await self._run(calls, deadline)
        wanted = repr(tuple(calls))  # in which 1, 1.0 and True differ
        if self._replay and self._replay[0][0] == wanted:
            return self._replay.pop(0)[1]
        del self._made[len(self._made) - len(self._replay) :]
        self._replay.clear()
        results = await self._run(calls, deadline)
        if results.errors[ToolError.TIMED_OUT]:
            self._replay = None  # another attempt may have the time: nothing is kept from here on
        else:
            self._made.append((wanted, results))
        return results

    async def _run(self, calls: Sequence[Found], deadline: TurnDeadline) -> "Results":
        """Answer a round, in worker threads."""
        allowed = calls[: self.config.max_calls]
        work = _Round(allowed, Deadline.after(deadline.remaining))
        loop = asyncio.get_running_loop()
        jobs = {
            loop.run_in_executor(_pool(self._computes(calls[group[0]])), self._answer, work, group)
            for group in self._groups(allowed)
        }
        try:
            done, _ = await asyncio.wait(jobs, timeout=deadline.remaining) if jobs else (set(), set())
        finally:
            work.is_over = True
            for job in jobs:
                job.cancel()
        for job in done:
            job.result()
        late = ToolResult("Error: the time for the answer is over", ToolError.TIMED_OUT)
        refused = ToolResult(
            f"Error: there are more than {self.config.max_calls} calls; this one was not made",
            ToolError.OVER_LIMIT,
        )
        answered = [self._shown(result or late) for result in work.results]
        return Results((*answered, *[refused] * (len(calls) - len(allowed))))

    def close(self) -> None:
        """Let the tools go: at once, or when the calls that still run have ended. It does not wait."""
        with self._lock:
            was_open, self._closed = not self._closed, True
            last = was_open and self._running == 0
        if last:
            self._on_close()

    def __enter__(self) -> "OpenTools":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _groups(self, calls: Sequence[Found]) -> list[list[int]]:
        """Indices of the calls: those of a queue together, in their order."""
        groups: dict[str | int, list[int]] = {}
        for index, call in enumerate(calls):
            tool = self._toolbox.tool_of(call)
            queue = tool.queue if tool is not None else None
            groups.setdefault(index if queue is None else queue, []).append(index)
        return list(groups.values())

    def _computes(self, call: Found) -> bool:
        tool = self._toolbox.tool_of(call)
        return tool is None or tool.computes

    def _answer(self, work: "_Round", group: Sequence[int]) -> None:
        """In a worker thread: answer these calls, one after the other, as long as anyone waits for it."""
        self._enter()
        try:
            for index in group:
                if work.is_over:
                    return
                until = work.deadline.sooner(self.config.call_s)
                work.results[index] = self._toolbox.call(work.calls[index], until)
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            if self._closed:
                raise UsageError("tools: these are closed; accepted: calls before their episode's end")
            self._running += 1

    def _leave(self) -> None:
        with self._lock:
            self._running -= 1
            last = self._closed and self._running == 0
        if last:
            self._on_close()

    def _shown(self, result: ToolResult) -> ToolResult:
        """A result as the model gets it: text that can be encoded, and not more of it than is allowed."""
        text, limit = result.text.encode(errors="replace").decode(), self.config.max_result_chars
        if len(text) > limit:
            text = f"{text[:limit]}\n[cut: the first {limit} of {len(text)} characters]"
        return ToolResult(text, result.error)


class _Round:
    """Calls that are being answered: `results` has those that there are so far."""

    def __init__(self, calls: Sequence[Found], deadline: Deadline) -> None:
        self.calls, self.deadline = calls, deadline
        self.results: list[ToolResult | None] = [None] * len(calls)
        self.is_over = False


@cache
def _pool(computes: bool) -> ThreadPoolExecutor:
    """Threads of the whole process: for what computes here, and for what waits for others."""
    size = len(os.sched_getaffinity(0)) if computes else _WAITING
    return ThreadPoolExecutor(size, thread_name_prefix="tools-here" if computes else "tools-elsewhere")
