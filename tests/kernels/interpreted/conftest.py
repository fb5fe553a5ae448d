"""Tests of the kernels in Triton's interpreter.

The choice for the interpreter is made once a process, when Triton is imported, and code compiled by
torch would not survive it. So `tests/kernels/test_triton_interpreter.py` runs this directory in a
process of its own; anywhere else nothing is collected here.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _outputs_begin_as_nan() -> None:
    """Whatever a kernel should have written and has not is seen in results and in partial sums alike."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
