"""Tools of servers that speak the Model Context Protocol, by its official package (the extra `mcp`).

A process has one connection to each configured server, which all its agents share: `connection`. It lives
in a thread of its own, with its own event loop; calls come from any thread. Tools are listed once, when it
is opened. A server that ends is started (or connected to) again by the next call. The call in which it
ended is made again once if the server says that this does no harm; else it is answered by an error.
"""

import asyncio
import atexit
import json
import os
import threading
from collections import deque
from collections.abc import Coroutine, Mapping
from concurrent.futures import TimeoutError as TooLate
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from opentinker_core.agents.tools.protocol import Deadline, ToolError, ToolResult
from opentinker_core.config.tools import MCPServerConfig
from opentinker_core.errors import OpenTinkerError, UsageError

if TYPE_CHECKING:
    from mcp import Client, MCPError
    from mcp.types import CallToolResult, ContentBlock
    from mcp.types import Tool as Listed

T = TypeVar("T")

_CLOSE_S = 10.0
"""Time for a server to end; the package kills a program that does not after some seconds."""
_GRACE_S = 5.0
_MAX_PAGES = 100
_TOO_LATE = ToolResult("Error: the time for the answer is over", ToolError.TIMED_OUT)


class MCPServerError(OpenTinkerError):
    """A server cannot be started, reached or understood: its tools are not to be had."""


class MCPTool:
    """A tool of a server."""

    computes = False

    def __init__(self, server: "MCPConnection", listed: "Listed") -> None:
        """Take over what the server says of it."""
        hints = listed.annotations
        read_only = bool(hints and hints.read_only_hint)
        self._server = server
        self.name = listed.name
        self.description = listed.description or listed.title or listed.name
        self.parameters: dict[str, Any] = listed.input_schema
        self.queue = None if read_only else f"mcp:{server.name}"
        self.repeatable = read_only or bool(hints and hints.idempotent_hint)
        """Whether a second call does nothing that the first did not."""

    def call(self, arguments: Mapping[str, Any], deadline: Deadline) -> ToolResult:
        """What the server answers.

        Raises:
            MCPServerError: it ended, and cannot be started again.
        """
        if problem := _problem(self.parameters, arguments):
            return ToolResult(f"Error: wrong arguments: {problem:.1000}", ToolError.INVALID_ARGUMENTS)
        return self._server.call(self, arguments, deadline)


@dataclass(eq=False)
class _Session:
    """A conversation with a running server."""

    client: "Client"
    listed: "list[Listed]"
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False


class MCPConnection:
    """A server, and the thread in which it is talked to. `tools`: those that the config wants."""

    def __init__(self, config: MCPServerConfig) -> None:
        """Start the server or connect to it, and list its tools.

        Raises:
            UsageError: an environment variable, the package, or a tool that the config names is missing.
            MCPServerError: the server cannot be started, reached or understood.
        """
        _require_package()
        self._config, self.name = config, config.name
        self._environment = {name: _variable(config, name) for name in config.env}
        self._headers = {header: _variable(config, name) for header, name in config.headers.items()}
        self._session: _Session | None = None
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"mcp-{self.name}", daemon=True)
        self._thread.start()
        try:
            listed = self._submit(self._living()).result().listed
            self.tools = tuple(MCPTool(self, one) for one in self._wanted(listed))
        except BaseException:
            self.close()
            raise

    def call(self, tool: MCPTool, arguments: Mapping[str, Any], deadline: Deadline) -> ToolResult:
        """Call a tool, from any thread but the connection's own.

        Raises:
            MCPServerError: the server ended, and cannot be started again; or the connection is closed.
        """
        if not self._thread.is_alive():
            raise MCPServerError(f"tools.mcp: the connection to {self.name!r} is closed")
        if deadline.remaining_s() <= 0:
            return _TOO_LATE
        answer = self._submit(self._call(tool, dict(arguments), deadline))
        try:
            return answer.result(max(0.0, deadline.remaining_s()) + _GRACE_S)
        except TooLate:
            return _TOO_LATE

    def close(self) -> None:
        """End the server, if it is a program of ours, and the thread."""
        if self._thread.is_alive():
            self._submit(self._end()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _submit(self, coroutine: "Coroutine[Any, Any, T]") -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _call(self, tool: MCPTool, arguments: dict[str, Any], deadline: Deadline) -> ToolResult:
        from mcp import MCPError

        for may_repeat in (tool.repeatable, False):
            session = await self._living()
            try:
                async with asyncio.timeout(deadline.remaining_s()):
                    return _result(await session.client.call_tool(tool.name, arguments))
            except TimeoutError:
                return _TOO_LATE
            except MCPError as error:
                if not _has_ended(error):
                    return _failure(error)
            except (RuntimeError, ValidationError) as error:
                return ToolResult(
                    f"Error: the server's answer cannot be read: {error!s:.500}", ToolError.FAILED
                )
            session.is_over = True
            session.stop.set()
            if not may_repeat:
                break
        return ToolResult("Error: the server of this tool ended during the call", ToolError.FAILED)

    async def _living(self) -> _Session:
        """The session, a new one if there is none any more."""
        async with self._starting:
            if self._session is None or self._session.is_over:
                await self._end()
                self._session = await self._start()
            return self._session

    async def _start(self) -> _Session:
        opened: asyncio.Future[_Session] = asyncio.get_running_loop().create_future()
        said = _Tail()
        self._task = asyncio.create_task(self._talk(opened, said))
        both: set[asyncio.Future[Any]] = {opened, self._task}
        done, _ = await asyncio.wait(both, timeout=self._config.start_s, return_when=asyncio.FIRST_COMPLETED)
        if opened in done:
            return opened.result()
        reason = f"no answer within {self._config.start_s:g} s"
        if self._task in done and (error := self._task.exception()) is not None:
            reason = _described(error)
        await self._end()
        words = await asyncio.to_thread(said.text)
        raise MCPServerError(
            f"tools.mcp: server {self.name!r} is not to be had: {reason}"
            + (f"; it said: {words}" if words else "")
        )

    async def _talk(self, opened: "asyncio.Future[_Session]", said: "_Tail") -> None:
        """One session, from its beginning to its end: the package wants both in one task."""
        from mcp import Client

        session: _Session | None = None
        try:
            async with AsyncExitStack() as stack:
                stack.callback(said.close)
                client = await stack.enter_async_context(
                    Client(await self._transport(stack, said), cache=None)
                )
                session = _Session(client, await _listed(client))
                opened.set_result(session)
                await session.stop.wait()
        finally:
            if session is not None:
                session.is_over = True

    async def _transport(self, stack: AsyncExitStack, said: "_Tail") -> Any:
        config = self._config
        if config.url is None:
            from mcp.client.stdio import StdioServerParameters, stdio_client

            program, *arguments = config.command
            parameters = StdioServerParameters(command=program, args=arguments, env=self._environment)
            return stdio_client(parameters, errlog=said.file)
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        timeout = httpx2.Timeout(config.start_s, read=None)  # calls have deadlines of their own
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=self._headers, timeout=timeout))
        return streamable_http_client(config.url, http_client=http)

    async def _end(self) -> None:
        session, task = self._session, self._task
        self._session = self._task = None
        if task is None:
            return
        if session is not None:
            session.stop.set()
        else:
            task.cancel()
        await asyncio.wait({task}, timeout=_CLOSE_S)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CLOSE_S)
        if task.done() and not task.cancelled():
            task.exception()  # it has been told, or is no news: the server ended

    def _wanted(self, listed: "list[Listed]") -> "list[Listed]":
        names = [one.name for one in listed]
        if unknown := [name for name in self._config.tools if name not in names]:
            raise UsageError(
                f"tools.mcp: server {self.name!r} has no tool {unknown[0]!r}; accepted: {', '.join(names)}"
            )
        return [one for one in listed if not self._config.tools or one.name in self._config.tools]


class _Tail:
    """The last lines of what a program writes to `file`."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self.file = os.fdopen(writing, "w")
        self._lines: deque[str] = deque(maxlen=10)
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Write no more from here; the program may still."""
        self.file.close()

    def text(self) -> str:
        """All lines, on one; waits a little for the program's end."""
        self._reader.join(1.0)
        return " | ".join(line.strip() for line in list(self._lines) if line.strip())[-1000:]

    def _read(self, reading: int) -> None:
        with os.fdopen(reading, errors="replace") as stream:
            self._lines.extend(stream)


async def _listed(client: "Client") -> "list[Listed]":
    page = await client.list_tools()
    listed = list(page.tools)
    for _ in range(_MAX_PAGES):
        if page.next_cursor is None:
            return listed
        page = await client.list_tools(cursor=page.next_cursor)
        listed += page.tools
    raise MCPServerError(f"its list of tools has more than {_MAX_PAGES} pages")


def _has_ended(error: "MCPError") -> bool:
    from mcp.types import CONNECTION_CLOSED

    return (
        error.code == CONNECTION_CLOSED or error.message == "Session terminated"
    )  # of HTTP: it was forgotten


def _failure(error: "MCPError") -> ToolResult:
    from mcp.types import INVALID_PARAMS

    kind = ToolError.INVALID_ARGUMENTS if error.code == INVALID_PARAMS else ToolError.FAILED
    return ToolResult(f"Error: {error.message}", kind)


def _result(result: "CallToolResult") -> ToolResult:
    text = "\n".join(_text(block) for block in result.content)
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    return ToolResult(text or "(no output)", ToolError.FAILED if result.is_error else None)


def _text(block: "ContentBlock") -> str:
    """What a model of text gets to see of it."""
    if block.type == "text":
        return block.text
    if block.type == "resource_link":
        return f"[{block.name}: {block.uri}]"
    if block.type == "resource":
        inside = getattr(block.resource, "text", None)
        return inside if isinstance(inside, str) else f"[data: {block.resource.uri}]"
    return f"[{block.type}: {block.mime_type}]"


def _problem(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """How the arguments break the schema; None where they do not, or the schema is not to be understood.

    References of a schema to other places are not followed: the server judges then.
    """
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.exceptions import best_match
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        Draft202012Validator.check_schema(schema)
        errors = Draft202012Validator(schema, registry=Registry()).iter_errors(dict(arguments))
        error = best_match(errors)
    except (SchemaError, Unresolvable):
        return None
    if error is None:
        return None
    place = ".".join(map(str, error.absolute_path))
    return f"{place}: {error.message}" if place else error.message


def _variable(config: MCPServerConfig, name: str) -> str:
    if name not in os.environ:
        raise UsageError(
            f"tools.mcp: server {config.name!r} needs the environment variable {name}, which is not set"
        )
    return os.environ[name]


def _require_package() -> None:
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise UsageError("tools.mcp: the package 'mcp' is missing; pip install 'opentinker[mcp]'") from error


def _described(error: BaseException) -> str:
    """Type and message of what is at the bottom of groups of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split())


_CONNECTIONS: dict[tuple[int, str], MCPConnection] = {}
_LOCK = threading.Lock()


def connection(config: MCPServerConfig) -> MCPConnection:
    """This process's connection to a server; opened by whoever asks first, and closed when the process ends.

    Raises:
        UsageError: an environment variable, the package, or a tool that the config names is missing.
        MCPServerError: the server cannot be started, reached or understood.
    """
    key = (os.getpid(), config.model_dump_json())
    with _LOCK:
        if key not in _CONNECTIONS:
            _CONNECTIONS[key] = MCPConnection(config)
        return _CONNECTIONS[key]


@atexit.register
def close_connections() -> None:
    """Close all connections of this process; who asks again opens new ones."""
    with _LOCK:
        for key in [key for key in _CONNECTIONS if key[0] == os.getpid()]:
            _CONNECTIONS.pop(key).close()
