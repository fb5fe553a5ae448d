"""Open an agent's tools as a config has them: one set of them for each episode and agent."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from opentinker_core.agents.tools.calculator import Calculator
from opentinker_core.agents.tools.formats import ToolFormat, format_of_template, tool_format
from opentinker_core.agents.tools.mcp_tools import connection
from opentinker_core.agents.tools.opened import OpenTools
from opentinker_core.agents.tools.protocol import Tool, Toolbox
from opentinker_core.agents.tools.sandbox import PythonTool
from opentinker_core.config.tools import ToolsConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def chosen_format(config: ToolsConfig, tokenizer: "PreTrainedTokenizerBase") -> ToolFormat:
    """The configured format; `auto`: that of the model's chat template, else `json`."""
    if config.format != "auto":
        return tool_format(config.format)
    template = tokenizer.chat_template
    sources: Sequence[str] = (
        [template] if isinstance(template, str) else list(template.values()) if template else []
    )
    return tool_format(next(filter(None, map(format_of_template, sources)), "json"))


def open_tools(config: ToolsConfig, tokenizer: "PreTrainedTokenizerBase") -> OpenTools:
    """Tools for one agent in one episode: its Python programs share files with nobody else's.

    Servers of tools are shared by all episodes and agents of the process.

    Raises:
        OpenTinkerError: a tool is not to be had here.
        UsageError: two tools have the same name, or a server's config names what is not there.
    """
    with ExitStack() as closing:
        tools: list[Tool] = []
        for name in config.names:
            tools.append(
                Calculator() if name == "calculator" else closing.enter_context(PythonTool(config.python))
            )
        for server in config.mcp:
            tools += connection(server).tools
        return OpenTools(config, chosen_format(config, tokenizer), Toolbox(tools), closing.pop_all().close)
    raise AssertionError("unreachable")
