"""What the tests of the sandbox share: how to run a program in it, and what it looks like to be refused."""

import textwrap

import pytest

from opentinker_core.agents.tools import landlock, seccomp
from opentinker_core.agents.tools.protocol import Deadline, ToolError, ToolResult
from opentinker_core.agents.tools.sandbox import PythonTool, SandboxSettings
from tests.waiting import PATIENCE_S

needs_sandbox = pytest.mark.skipif(
    landlock.abi() < landlock.MINIMAL_ABI or not seccomp.available(),
    reason="this kernel lacks Landlock or seccomp, without which there is no sandbox",
)
SECRET = "the-secret-of-the-house"
SETTINGS = SandboxSettings(seconds=PATIENCE_S)


def run(tool: PythonTool, code: str, seconds: float = PATIENCE_S) -> ToolResult:
    return tool.call({"code": textwrap.dedent(code)}, Deadline.after(seconds))


def assert_refused(result: ToolResult) -> None:
    """Nothing was let through: the kernel said no, and the program ended there."""
    assert result.error is ToolError.FAILED, result
    assert "PermissionError" in result.text, result
    assert "BREACH" not in result.text.partition("Traceback")[0], result


def assert_works(tool: PythonTool, code: str, output: str) -> None:
    result = run(tool, code)
    assert (result.error, result.text) == (None, output)
