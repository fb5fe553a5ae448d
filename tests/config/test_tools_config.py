"""The config of tools: what contradicts itself is refused with the field, the value and what is accepted."""

from typing import Any

import pytest
from pydantic import ValidationError

from opentinker_core.config.tools import SandboxSettings, ToolsConfig

STDIO = {"name": "files", "command": ["files-server", "--root", "/srv"], "env": ["FILES_KEY"]}
HTTP = {
    "name": "search",
    "url": "https://tools.example/mcp",
    "headers": {"Authorization": "SEARCH_KEY"},
    "tools": ["find"],
}


def test_tools_of_all_kinds() -> None:
    config = ToolsConfig.model_validate({"names": ["calculator", "python"], "mcp": [STDIO, HTTP]})
    assert [server.name for server in config.mcp] == ["files", "search"]
    assert ToolsConfig.model_validate_json(config.model_dump_json()) == config


def test_layers_are_a_set_with_one_order() -> None:
    assert SandboxSettings(may_lack=("seccomp", "landlock", "seccomp")).may_lack == ("landlock", "seccomp")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "no tools; accepted: 'names' (calculator, python)"),
        ({"names": ["abacus"]}, "'calculator' or 'python'"),
        ({"names": ["python", "python"]}, "names: python, python; accepted: each name once"),
        ({"mcp": [STDIO, STDIO]}, "mcp: files, files; accepted: each name once"),
        ({"mcp": [{"name": "x"}]}, "server 'x' has neither of 'command' and 'url'; accepted: one"),
        ({"mcp": [STDIO | HTTP]}, "server 'search' has both of"),
        ({"mcp": [STDIO | {"headers": {"A": "B"}}]}, "headers: accepted with 'command': none (env are)"),
        ({"mcp": [HTTP | {"env": ["A"]}]}, "env: accepted with 'url': none (headers are)"),
        ({"mcp": [HTTP | {"url": "tools.example"}]}, "mcp.0.url"),
        ({"mcp": [HTTP | {"headers": {"Authorization": "Bearer abc"}}]}, "mcp.0.headers.Authorization"),
        ({"names": ["python"], "max_rounds": 0}, "max_rounds"),
        ({"names": ["python"], "python": {"seconds": 0}}, "python.seconds"),
    ],
    ids=lambda value: value if isinstance(value, str) else "given",
)
def test_wrong_configs_are_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ToolsConfig.model_validate(given)
    assert expected in str(caught.value)
