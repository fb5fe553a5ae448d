"""Several processes at one store: one winner, nothing torn, one download."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from opentinker_core.snapshots.cache import SnapshotCache
from opentinker_core.snapshots.protocol import SnapshotError, SnapshotKind
from tests.snapshots.conftest import Place

pytestmark = pytest.mark.processes

KEY = ("adder-1f2e", "v000012", "checkpoint")


def directory(parent: Path, name: str, filling: bytes) -> Path:
    folder = parent / name
    folder.mkdir()
    (folder / "state.json").write_bytes(b'"' + filling + b'"')
    (folder / "weights.safetensors").write_bytes(filling * 100_000)
    return folder


@contextmanager
def worker(place: Place, source: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    arguments = (place.uri, str(place.cache), place.endpoint, "/".join(KEY), str(source), *options)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.snapshots.worker", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def say_go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_of_concurrent_processes_one_wins(place: Place, tmp_path: Path) -> None:
    sources = [directory(tmp_path, f"source-{n}", bytes([65 + n])) for n in range(4)]
    with ExitStack() as stack:
        workers = [stack.enter_context(worker(place, source)) for source in sources]
        assert [line_of(process) for process in workers] == ["ready"] * 4
        for process in workers:
            say_go(process)
        answers = [line_of(process) for process in workers]
    winners = [n for n, answer in enumerate(answers) if answer != "conflict"]
    assert len(winners) == 1
    winning = sources[winners[0]]
    snapshot = place.store().publish(KEY, SnapshotKind.CHECKPOINT, winning)
    assert snapshot.digest == answers[winners[0]]
    fetched = place.store().fetch(snapshot.uri, snapshot.digest)
    assert (fetched / "weights.safetensors").read_bytes() == (winning / "weights.safetensors").read_bytes()


@pytest.mark.parametrize("write", [1, 2, 3], ids=["first file", "second file", "manifest"])
def test_a_writer_killed_in_the_middle_leaves_nothing_visible(
    place: Place, tmp_path: Path, write: int
) -> None:
    source = directory(tmp_path, "source", b"x")
    with worker(place, source, str(write)) as process:
        assert line_of(process) == "ready"
        say_go(process)
        assert line_of(process) == "stopped"
        process.kill()
        process.wait()
    assert not place.blobs().exists("/".join(KEY) + "/manifest.json")
    for key in place.blobs().list():
        with pytest.raises(SnapshotError, match="no such snapshot"):
            place.store().fetch(f"{place.uri}/{key.rpartition('/')[0]}")
    snapshot = place.store().publish(KEY, SnapshotKind.CHECKPOINT, source)
    assert place.store().fetch(snapshot.uri, snapshot.digest).is_dir()


def test_other_content_takes_the_key_of_a_killed_writer(place: Place, tmp_path: Path) -> None:
    with worker(place, directory(tmp_path, "killed", b"x"), "3") as process:
        assert line_of(process) == "ready"
        say_go(process)
        assert line_of(process) == "stopped"
    other = directory(tmp_path, "other", b"y")
    snapshot = place.store().publish(KEY, SnapshotKind.CHECKPOINT, other)
    fetched = place.store().fetch(snapshot.uri, snapshot.digest)
    assert (fetched / "state.json").read_bytes() == b'"y"'


def test_concurrent_readers_download_once(local: Place, tmp_path: Path) -> None:
    source = directory(tmp_path, "source", b"x")
    manifest = local.store().manifest(local.store().publish(KEY, SnapshotKind.CHECKPOINT, source).uri)
    downloads: list[str] = []

    def download(name: str, target: Path) -> None:
        downloads.append(name)
        time.sleep(0.05)
        target.write_bytes((source / name).read_bytes())

    readers = [
        threading.Thread(target=SnapshotCache(tmp_path / "cache").directory, args=(manifest, download))
        for _ in range(8)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert sorted(downloads) == ["state.json", "weights.safetensors"]
