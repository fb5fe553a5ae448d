"""Runs the tests under `interpreted/` with Triton's interpreter, in a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from opentinker_kernels import triton_ops

TESTS = Path(__file__).parent / "interpreted"


@pytest.mark.skipif(not triton_ops.available(), reason="Triton is not installed")
def test_the_kernels_pass_their_tests_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout
