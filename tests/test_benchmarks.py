"""Benchmarks are run by their path, from anywhere."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_runs_by_its_path(script: str, tmp_path: Path) -> None:
    """And transformers does not take `kernels.py` beside it for the package `kernels`, and runs it."""
    command = [sys.executable, "-X", "importtime", str(FOLDER / script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script}")
    assert ("benchmarks.kernel_cases" in done.stderr) == (script == "kernels.py")
