"""A real server of tools, as its own process: `mcp_server.py stdio` or `mcp_server.py http PORT`."""

import os
import sys
import threading
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent, TextContent, ToolAnnotations

server = MCPServer("tests", log_level="ERROR")
READ_ONLY = ToolAnnotations(read_only_hint=True)


@server.tool(annotations=READ_ONLY)
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@server.tool(annotations=READ_ONLY)
def environment(name: str) -> str:
    """The value of an environment variable of this server."""
    return os.environ.get(name, "(not set)")


@server.tool(annotations=READ_ONLY)
def process() -> int:
    """The id of this server's process."""
    return os.getpid()


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ToolError("no luck today")


@server.tool(annotations=READ_ONLY)
def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "awake"


@server.tool(structured_output=False)
def picture() -> list[TextContent | ImageContent]:
    """A picture with a caption."""
    return [TextContent(text="a dot:"), ImageContent(data="aGk=", mime_type="image/png")]


@server.tool()
def crash() -> str:
    """End this server."""
    os._exit(3)


@server.tool(annotations=READ_ONLY)
def crash_once(path: str) -> str:
    """End this server, but only the first time."""
    if Path(path).exists():
        return "survived"
    Path(path).touch()
    os._exit(3)


def end_with_the_tests() -> None:
    """Read until whoever holds the other end of standard input is gone."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    print("the server of tests", file=sys.stderr, flush=True)
    if sys.argv[1] == "http":
        threading.Thread(target=end_with_the_tests, daemon=True).start()
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    elif sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        sys.exit("no such way")
