import re
import sys
from pathlib import Path

import pytest

from envs.conformance import assert_conforms
from envs.playing import Check

DOCUMENT = Path(__file__).parents[2] / "docs/environments.md"


def test_the_documented_environment_has_30_lines_and_conforms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, use = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len([line for line in source.splitlines() if line.strip()]) <= 30
    (tmp_path / "reversal.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert_conforms("reversal:Reversal")
    exec(use, {})
    del sys.modules["reversal"]


def test_the_table_of_promises_names_every_check() -> None:
    named = re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert named == [str(check) for check in Check]
