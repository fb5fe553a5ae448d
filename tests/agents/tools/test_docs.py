"""The page about tools: its config is valid, and its program prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

from opentinker_core.config.tools import ToolsConfig

PAGE = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return found.group(1)


def test_the_config_of_the_page_is_one() -> None:
    config = ToolsConfig.model_validate(yaml.safe_load(block("yaml"))["tools"])
    assert [server.name for server in config.mcp] == ["files", "search"]
    defaults = ToolsConfig(names=config.names, mcp=config.mcp)
    assert config == defaults


def test_the_program_of_the_page_prints_what_it_says() -> None:
    program = block("python")
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert [f"# {line}" for line in printed.splitlines()] == program.splitlines()[-3:]
