"""Tools of real servers in processes of their own: by standard input and output, and by HTTP."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from opentinker_core.agents.tools.making import open_tools
from opentinker_core.agents.tools.mcp_tools import (
    MCPConnection,
    MCPServerError,
    MCPTool,
    close_connections,
    connection,
)
from opentinker_core.agents.tools.protocol import Deadline, ToolError, ToolResult
from opentinker_core.config.tools import MCPServerConfig, ToolsConfig
from opentinker_core.errors import UsageError
from tests.agents.tools.helpers import Speaker, call, play
from tests.servers import free_port
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.processes

SCRIPT = str(Path(__file__).parent / "mcp_server.py")
STDIO = MCPServerConfig(name="tests", command=(sys.executable, SCRIPT, "stdio"), start_s=PATIENCE_S)


def use(server: MCPConnection, name: str, /, seconds: float = PATIENCE_S, **arguments: Any) -> ToolResult:
    return tool(server, name).call(arguments, Deadline.after(seconds))


def tool(server: MCPConnection, name: str) -> MCPTool:
    return next(one for one in server.tools if one.name == name)


class HTTPServer:
    """The same server at a URL; it can be killed and started again."""

    def __init__(self) -> None:
        self.port = free_port()
        self.config = MCPServerConfig(name="web", url=f"http://127.0.0.1:{self.port}/mcp", start_s=PATIENCE_S)

    def start(self) -> None:
        command = [sys.executable, SCRIPT, "http", str(self.port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)  # it ends when this pipe does
        wait_until(self._answers, "the server")

    def stop(self) -> None:
        with self._process:
            self._process.kill()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/", timeout=PATIENCE_S).status_code > 0
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def web() -> Iterator[HTTPServer]:
    server = HTTPServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module", params=["stdio", "http"])
def server(request: pytest.FixtureRequest) -> Iterator[MCPConnection]:
    config = STDIO if request.param == "stdio" else request.getfixturevalue("web").config
    server = MCPConnection(config)
    yield server
    server.close()


def test_tools_are_those_of_the_server(server: MCPConnection) -> None:
    add = tool(server, "add")
    assert add.description == "Add two integers."
    assert add.parameters["required"] == ["a", "b"]
    assert (add.queue, add.repeatable) == (None, True)
    assert (tool(server, "fail").queue, tool(server, "fail").repeatable) == (f"mcp:{server.name}", False)


def test_a_call_is_answered_by_the_server(server: MCPConnection) -> None:
    assert use(server, "add", a=40, b=2) == ToolResult("42")
    assert use(server, "picture") == ToolResult("a dot:\n[image: image/png]")


def test_errors_are_answers_of_a_kind(server: MCPConnection) -> None:
    failed = use(server, "fail")
    assert failed.error is ToolError.FAILED
    assert "no luck today" in failed.text
    wrong = ToolResult("Error: wrong arguments: a: 'x' is not of type 'integer'", ToolError.INVALID_ARGUMENTS)
    assert use(server, "add", a="x", b=2) == wrong
    assert "'b' is a required property" in use(server, "add", a=1).text


def test_a_call_ends_by_its_deadline_and_others_go_on(server: MCPConnection) -> None:
    late = ToolResult("Error: the time for the answer is over", ToolError.TIMED_OUT)
    assert tool(server, "sleep").call({"seconds": PATIENCE_S}, Deadline.after(0.05)) == late
    assert use(server, "add", seconds=0.0, a=1, b=1) == late
    assert use(server, "add", a=1, b=1) == ToolResult("2")


def test_a_program_gets_only_the_variables_that_the_config_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLS_KEY", "for the server")
    monkeypatch.setenv("TOOLS_SECRET", "not for it")
    server = MCPConnection(STDIO.model_copy(update={"env": ("TOOLS_KEY",)}))
    assert use(server, "environment", name="TOOLS_KEY").text == "for the server"
    assert use(server, "environment", name="TOOLS_SECRET").text == "(not set)"
    server.close()


def test_a_header_comes_from_the_environment(web: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    config = web.config.model_copy(update={"headers": {"Authorization": "TOOLS_KEY"}})
    with pytest.raises(UsageError, match="'web' needs the environment variable TOOLS_KEY, which is not set"):
        MCPConnection(config)
    monkeypatch.setenv("TOOLS_KEY", "Bearer x")
    server = MCPConnection(config)
    assert server._headers == {"Authorization": "Bearer x"}
    assert use(server, "add", a=1, b=1) == ToolResult("2")
    server.close()


def test_a_call_in_which_the_server_ends_is_answered_and_the_next_starts_it_again() -> None:
    server = MCPConnection(STDIO)
    before = use(server, "process").text
    ended = ToolResult("Error: the server of this tool ended during the call", ToolError.FAILED)
    assert use(server, "crash") == ended
    assert use(server, "process").text != before
    server.close()


def test_a_call_that_does_no_harm_is_made_again_once(tmp_path: Path) -> None:
    server = MCPConnection(STDIO)
    assert use(server, "crash_once", path=str(tmp_path / "crashed")) == ToolResult("survived")
    server.close()


def test_a_program_that_was_killed_is_started_again() -> None:
    server = MCPConnection(STDIO)
    first = int(use(server, "process").text)
    os.kill(first, signal.SIGKILL)
    assert int(use(server, "process").text) != first
    server.close()


def test_a_url_is_connected_to_again_when_its_server_is_back() -> None:
    web = HTTPServer()
    web.start()
    server = MCPConnection(web.config.model_copy(update={"start_s": 5.0}))
    assert use(server, "add", a=1, b=1) == ToolResult("2")
    web.stop()
    with pytest.raises(MCPServerError, match="server 'web' is not to be had"):
        use(server, "add", a=1, b=1)
    web.start()
    assert use(server, "add", a=1, b=1) == ToolResult("2")
    server.close()
    web.stop()


def test_a_server_that_does_not_start_is_told_with_what_it_said() -> None:
    with pytest.raises(MCPServerError, match=r"'tests' is not to be had.*it said: .*no such way"):
        MCPConnection(STDIO.model_copy(update={"command": (sys.executable, SCRIPT, "pigeon")}))
    with pytest.raises(MCPServerError, match=r"is not to be had: FileNotFoundError: .*no-such-program"):
        MCPConnection(STDIO.model_copy(update={"command": ("/no-such-program",)}))
    silent = STDIO.model_copy(update={"command": ("sleep", "1000"), "start_s": 0.2})
    with pytest.raises(MCPServerError, match=r"is not to be had: no answer within 0\.2 s"):
        MCPConnection(silent)


def test_only_the_tools_that_the_config_names_are_given() -> None:
    server = MCPConnection(STDIO.model_copy(update={"tools": ("add",)}))
    assert [one.name for one in server.tools] == ["add"]
    server.close()
    with pytest.raises(UsageError, match="server 'tests' has no tool 'subtract'; accepted: add, environment"):
        MCPConnection(STDIO.model_copy(update={"tools": ("subtract",)}))


def test_a_process_shares_its_connections_and_agents_call_through_them(tiny_tokenizer: Any) -> None:
    config = ToolsConfig(names=("calculator",), mcp=(STDIO,), format="hermes", call_s=PATIENCE_S)
    try:
        with open_tools(config, tiny_tokenizer) as mine, open_tools(config, tiny_tokenizer) as others:
            assert [one.name for one in mine.declarations][:3] == ["calculator", "add", "environment"]
            shown: list[str] = []
            for tools in (mine, others):
                speaker = Speaker([call("add", '{"a": 40, "b": 2}') + call("process", "{}"), "."])
                play(tools, speaker)
                shown.append(speaker.shown[1].text)
            assert shown[0] == shown[1]
            assert shown[0].startswith("42")
        process = int(use(connection(STDIO), "process").text)
    finally:
        close_connections()
    wait_until(lambda: not Path(f"/proc/{process}").exists(), "the end of the server")
    with pytest.raises(UsageError, match="a name is there twice"):
        open_tools(
            config.model_copy(update={"mcp": (STDIO, STDIO.model_copy(update={"name": "b"}))}), tiny_tokenizer
        )
    close_connections()


def test_a_closed_connection_takes_no_calls() -> None:
    server = MCPConnection(STDIO)
    server.close()
    server.close()
    with pytest.raises(MCPServerError, match="the connection to 'tests' is closed"):
        use(server, "add", a=1, b=1)
