import os
from collections.abc import Iterator

import pytest
import torch

from opentinker_core.config.schema import RuntimeConfig
from opentinker_core.errors import UsageError
from opentinker_core.models.placement import Placement, available_cores, placement


@pytest.fixture(autouse=True)
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_cpu_computes_in_float32_unless_asked_otherwise() -> None:
    assert placement(RuntimeConfig(device="cpu")).dtype == torch.float32
    assert placement(RuntimeConfig(device="cpu", dtype="bfloat16")).dtype == torch.bfloat16


def test_threads_are_applied() -> None:
    assert placement(RuntimeConfig(device="cpu", threads=3)) == Placement("cpu", torch.float32, 3)
    assert torch.get_num_threads() == 3


def test_omp_num_threads_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert placement(RuntimeConfig(device="cpu")).threads == 5
    assert placement(RuntimeConfig(device="cpu", threads=2)).threads == 2


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no CPU affinity on this system")
@pytest.mark.parametrize("setting", [None, "", "0", "many"])
def test_affinity_is_respected(setting: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if setting is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_there_are_at_most_as_many_cores_as_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize("device", ["gpu", "", "cuda:", "cuda:-1", "CPU", "cpu:0", "mps", "cuda:x"])
def test_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match=r"runtime\.device: .* is unknown; accepted here: auto, cpu"):
        placement(RuntimeConfig(device=device))


def test_absent_device_is_refused() -> None:
    with pytest.raises(UsageError, match=r"runtime\.device: 'cuda:99' is not there"):
        placement(RuntimeConfig(device="cuda:99"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_auto_is_the_cpu_without_a_gpu() -> None:
    assert placement(RuntimeConfig()).device == "cpu"
    with pytest.raises(UsageError, match="'cuda' is not there"):
        placement(RuntimeConfig(device="cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_computes_in_bfloat16_unless_asked_otherwise() -> None:
    assert placement(RuntimeConfig()).device == "cuda:0"
    assert placement(RuntimeConfig(device="cuda")).dtype == torch.bfloat16
    assert placement(RuntimeConfig(device="cuda:0", dtype="float32")).dtype == torch.float32
