import re
import sys
from pathlib import Path

import pytest

from envs.conformance import check_environment
from envs.playing import Check

DOCUMENT = Path(__file__).parents[2] / "docs/environments.md"


NAMES = ("reversal", "meet")


def test_the_documented_environments_have_30_lines_and_conform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *sources, use = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    for name, source in zip(NAMES, sources, strict=True):
        assert len([line for line in source.splitlines() if line.strip()]) <= 30
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for name, kind in zip(NAMES, ("Reversal", "Meet"), strict=True):
        report = check_environment(f"{name}:{kind}")
        assert report.ok, report
        assert Check.DEMONSTRATION in report.passed
    exec(use, {})
    for name in NAMES:
        del sys.modules[name]


def test_the_table_of_promises_names_every_check() -> None:
    named = re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert named == [str(check) for check in Check]
