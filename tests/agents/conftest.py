"""A sandbox, and a secret beside it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from opentinker_core.agents.tools.sandbox import PythonTool
from tests.agents.sandboxes import SECRET, SETTINGS


@pytest.fixture
def tool() -> Iterator[PythonTool]:
    with PythonTool(SETTINGS) as tool:
        yield tool


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.txt"
    path.write_text(SECRET)
    return path
