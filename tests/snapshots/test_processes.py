"""Several processes at one store: one winner, nothing torn, one download."""

import threading
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from opentinker_core.snapshots.cache import SnapshotCache
from opentinker_core.snapshots.protocol import SnapshotError, SnapshotKind
from tests.processes import Worker, worker
from tests.snapshots.conftest import Place

pytestmark = pytest.mark.processes

KEY = ("adder-1f2e", "v000012", "checkpoint")


def directory(parent: Path, name: str, filling: bytes) -> Path:
    folder = parent / name
    folder.mkdir()
    (folder / "state.json").write_bytes(b'"' + filling + b'"')
    (folder / "weights.safetensors").write_bytes(filling * 100_000)
    return folder


def publisher(place: Place, source: Path, *options: str) -> AbstractContextManager[Worker]:
    arguments = (place.uri, place.cache, place.endpoint, "/".join(KEY), source, *options)
    return worker("tests.snapshots.worker", *arguments)


def test_of_concurrent_processes_one_wins(place: Place, tmp_path: Path) -> None:
    sources = [directory(tmp_path, f"source-{n}", bytes([65 + n])) for n in range(4)]
    with ExitStack() as stack:
        workers = [stack.enter_context(publisher(place, source)) for source in sources]
        assert [process.line() for process in workers] == ["ready"] * 4
        for process in workers:
            process.say("go")
        answers = [process.line() for process in workers]
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
    with publisher(place, source, str(write)) as process:
        assert process.line() == "ready"
        process.say("go")
        assert process.line() == "stopped"
    assert not place.blobs().exists("/".join(KEY) + "/manifest.json")
    for key in place.blobs().list():
        with pytest.raises(SnapshotError, match="no such snapshot"):
            place.store().fetch(f"{place.uri}/{key.rpartition('/')[0]}")
    snapshot = place.store().publish(KEY, SnapshotKind.CHECKPOINT, source)
    assert place.store().fetch(snapshot.uri, snapshot.digest).is_dir()


def test_other_content_takes_the_key_of_a_killed_writer(place: Place, tmp_path: Path) -> None:
    with publisher(place, directory(tmp_path, "killed", b"x"), "3") as process:
        assert process.line() == "ready"
        process.say("go")
        assert process.line() == "stopped"
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
