"""Policy states on local disk: replaced whole or not at all, by whatever key, full disk or kill."""

import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from opentinker_core.errors import NotFoundError
from opentinker_core.policies.residency.host import HostTier
from opentinker_core.policies.residency.local_states import LocalStates
from opentinker_core.policies.residency.types import ResidencyError
from tests.disks import make_read_only, small_disk
from tests.policies.residency_values import Disk, State, read, write
from tests.policies.residency_worker import NAMES, SIZE
from tests.processes import worker
from tests.waiting import PATIENCE_S

WORKER = "tests.policies.residency_worker"


def save(states: LocalStates, key: str, step: int, size: int = 8) -> None:
    states.save(key, lambda folder: write(State.of_step(step, size), folder))


def step_of(states: LocalStates, key: str) -> int:
    return states.load(key, read).step


def directories(root: Path) -> list[str]:
    """What lies in the folders of all keys."""
    return sorted(path.name for path in root.glob("*/*"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as folder:
        yield folder


def test_a_state_is_replaced_and_dropped(tmp_path: Path) -> None:
    states = LocalStates(tmp_path / "states")
    assert not states.exists("a")
    with pytest.raises(NotFoundError, match=f"'a': no state below {tmp_path}/states"):
        step_of(states, "a")
    assert not (tmp_path / "states").exists()
    for step in (1, 2, 3):
        save(states, "a", step)
        save(states, "b", 10 * step)
        assert (step_of(states, "a"), step_of(states, "b")) == (step, 10 * step)
    assert directories(tmp_path / "states") == ["3", "3"]
    states.drop("a")
    states.drop("never saved")
    assert not states.exists("a")
    assert step_of(LocalStates(tmp_path / "states"), "b") == 30
    save(states, "a", 4)
    assert step_of(states, "a") == 4


@pytest.mark.parametrize("key", ["", ".", "..", "../../a", "/etc/passwd", "a/b", "a\0b", "ü" * 5000, "C:\\x"])
def test_no_key_leaves_the_root(tmp_path: Path, key: str) -> None:
    states = LocalStates(tmp_path / "states")
    save(states, key, 1)
    save(states, key + "x", 2)
    assert (step_of(states, key), step_of(states, key + "x")) == (1, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["states"]
    assert len(list((tmp_path / "states").iterdir())) == 2


def test_a_failing_save_leaves_the_earlier_state(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "w").write_bytes(b"torn")
        raise ZeroDivisionError

    states = LocalStates(tmp_path)
    with pytest.raises(ZeroDivisionError):
        states.save("a", fail)
    assert not states.exists("a")
    save(states, "a", 1)
    with pytest.raises(ZeroDivisionError):
        states.save("a", fail)
    assert step_of(states, "a") == 1
    assert directories(tmp_path) == ["1"]


def test_full_disk(disk: Path) -> None:
    states = LocalStates(disk / "states")
    save(states, "a", 1, size=100_000)
    with pytest.raises(ResidencyError, match=rf"cannot write the state of 'a' in {disk}/.*No space left"):
        save(states, "a", 2, size=450_000)
    assert step_of(states, "a") == 1
    assert directories(disk / "states") == ["1"]
    save(states, "a", 3, size=100_000)
    assert step_of(states, "a") == 3


def test_full_disk_under_safetensors(disk: Path) -> None:
    """The library has an error of its own for a full disk."""

    def save_moments(size: int) -> None:
        moments = {"m": np.full(size, size, np.float32)}
        states.save("a", lambda folder: save_file(moments, folder / "optimizer.safetensors"))

    states = LocalStates(disk)
    save_moments(10_000)
    with pytest.raises(ResidencyError, match=r"cannot write the state of 'a'.*No space left"):
        save_moments(400_000)
    loaded = states.load("a", lambda folder: load_file(folder / "optimizer.safetensors"))
    assert loaded["m"].tolist() == [10_000.0] * 10_000


def test_a_tier_over_a_full_disk_loses_nothing(disk: Path) -> None:
    backing = Disk(disk / "states")
    size = 150_000
    tier = HostTier(backing, 4 * size, timeout_s=0)
    tier.put("a", State.of_step(1, size))
    tier.put("b", State.of_step(2, size))
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(900_000))
    with pytest.raises(
        ResidencyError, match=r"'c': no room .* 'a' cannot be saved: .*No space left on device"
    ):
        tier.put("c", State.of_step(3, size))
    for key, step in (("a", 1), ("b", 2)):
        with tier.lease(key) as state:
            assert state.step == step
    assert tier.resident() == ["a", "b"]
    ballast.unlink()
    tier.put("c", State.of_step(3, size))
    with tier.lease("c") as c, tier.lease("b") as b:
        assert (c.step, b.step, step_of(backing.states, "a")) == (3, 2, 1)


def test_read_only_disk(disk: Path) -> None:
    states = LocalStates(disk)
    save(states, "a", 1)
    make_read_only(disk)
    with pytest.raises(ResidencyError, match=r"cannot write the state of 'a' in .*: Read-only file system"):
        save(states, "a", 2)
    with pytest.raises(ResidencyError, match=r"cannot write the state of 'b' in .*: Read-only file system"):
        save(states, "b", 2)
    with pytest.raises(ResidencyError, match=r"cannot remove the state of 'a' in .*: Read-only file system"):
        states.drop("a")
    assert step_of(states, "a") == 1


def test_a_damaged_state_is_the_keys_error(tmp_path: Path) -> None:
    states = LocalStates(tmp_path)
    save(states, "a", 1)
    next(tmp_path.glob("*/1/w")).unlink()
    with pytest.raises(
        ResidencyError, match=r"cannot read the state of 'a' in .*: No such file or directory"
    ):
        step_of(states, "a")


def test_readers_and_writers_of_a_key_wait_for_each_other(tmp_path: Path) -> None:
    states = LocalStates(tmp_path)
    writing, may_end = threading.Event(), threading.Event()

    def write_slowly(folder: Path) -> None:
        writing.set()
        assert may_end.wait(PATIENCE_S)
        write(State.of_step(2), folder)

    save(states, "a", 1)
    with ThreadPoolExecutor(2) as pool:
        writer = pool.submit(states.save, "a", write_slowly)
        assert writing.wait(PATIENCE_S)
        reader = pool.submit(step_of, states, "a")
        save(states, "b", 7)
        time.sleep(0.05)
        assert not reader.done()
        may_end.set()
        writer.result()
        assert reader.result() == 2


@pytest.mark.processes
@pytest.mark.parametrize(
    ("place", "left"),
    [("half written", 1), ("flushed", 1), ("renamed", 2), ("garbage", 2), ("dropped", None)],
)
def test_killed_at(place: str, left: int | None, tmp_path: Path) -> None:
    states = LocalStates(tmp_path)
    save(states, "a", 1, SIZE)
    with worker(WORKER, "stop", tmp_path, place) as process:
        assert process.line() == "stopped"
    assert len(directories(tmp_path)) == (1 if left is None else 2)
    if left is None:
        assert not states.exists("a")
    else:
        assert step_of(states, "a") == left
    save(states, "a", 3, SIZE)
    assert step_of(states, "a") == 3
    assert len(directories(tmp_path)) == 1


@pytest.mark.processes
def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    save(LocalStates(tmp_path), "a", 1, SIZE)
    with worker(WORKER, "stop", tmp_path, "half written") as holder:
        assert holder.line() == "stopped"
        with worker(WORKER, "save", tmp_path, 3) as waiting:
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(0.5)
            holder.kill()
            assert waiting.line() == "saved"
    assert step_of(LocalStates(tmp_path), "a") == 3


@pytest.mark.processes
def test_kills_in_the_middle_of_write_backs(tmp_path: Path) -> None:
    """After each kill every state is whole, and not older than what was said to be on disk."""
    states = LocalStates(tmp_path)
    known = dict.fromkeys(NAMES, 0)
    draws = random.Random(3)
    torn = 0
    for round_ in range(15):
        with worker(WORKER, "run", tmp_path, round_) as process:
            lines = [process.line() for _ in range(draws.randint(1, 12))]
            time.sleep(draws.random() / 200)
            lines += process.kill()
        for line in lines:
            name, step = line.split()
            known[name] = int(step)
        torn += any(name == "staged" for name in directories(tmp_path))
        for name in NAMES:
            if known[name] or states.exists(name):
                assert step_of(states, name) >= known[name]
                known[name] = step_of(states, name)
    assert sum(known.values()) > 15
    assert torn, "no kill came in the middle of a save"
    shutil.rmtree(tmp_path)
