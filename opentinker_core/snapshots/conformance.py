"""What every snapshot store must do, as checks to run on your own.

    from opentinker_core.snapshots.conformance import check_store

    check_store(lambda: MyStore("my://place"), Path("/tmp/scratch"))

`open_store` opens the same store anew at each call, as another process would; `scratch` is an empty
local directory. Each check uses keys of its own, so a store may be used for several runs. A check
raises `ConformanceError`, which says what the store did wrong. To let damage be checked too, pass
`damage(snapshot, file_name)`, which flips a byte of that file where your store keeps it.
"""

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.snapshots.protocol import (
    Snapshot,
    SnapshotConflictError,
    SnapshotError,
    SnapshotKind,
    SnapshotStore,
)

OpenStore = Callable[[], SnapshotStore]
Damage = Callable[[Snapshot, str], None]

WRITERS = 8
HOSTILE_NAMES = ("..", "../x", "/etc/passwd", "a/b", "nul\0byte", "n" * 300, "", ".hidden", "a@b", "a b")


class ConformanceError(AssertionError):
    """The store does not do what `SnapshotStore` promises."""


def check_store(open_store: OpenStore, scratch: Path, damage: Damage | None = None) -> None:
    """Run every check.

    Raises:
        ConformanceError: the first promise that the store broke.
    """
    for check in CHECKS:
        check(open_store, _folder(scratch))
    if damage is not None:
        check_refuses_damage(open_store, _folder(scratch), damage)


def check_round_trip(open_store: OpenStore, scratch: Path) -> None:
    """What was published is what another instance fetches: kind, names, bytes, digest, size."""
    contents = {
        "adapter_config.json": b"{}",
        "adapter_model.safetensors": bytes(range(256)) * 50,
        "empty.txt": b"",
    }
    snapshot = open_store().publish(_key(), SnapshotKind.SAMPLER, _source(scratch, contents))
    store = open_store()
    manifest, fetched = store.manifest(snapshot.uri), store.fetch(snapshot.uri, snapshot.digest)
    _require(snapshot.uri.startswith(store.uri + "/"), "a snapshot's URI is below the store's")
    _require(snapshot.size == sum(map(len, contents.values())), "a snapshot's size is that of its files")
    _require(
        (manifest.kind, manifest.digest) == (SnapshotKind.SAMPLER, snapshot.digest),
        "the manifest has the kind and digest of the snapshot",
    )
    _require({file.name for file in manifest.files} == set(contents), "the manifest lists every file")
    _require(_contents(fetched) == contents, "the fetched files are the published ones")


def check_digest_is_of_the_content(open_store: OpenStore, scratch: Path) -> None:
    """Equal content under two keys has one digest; another byte, name or kind has another."""
    store = open_store()

    def digest(kind: SnapshotKind, contents: dict[str, bytes]) -> str:
        return store.publish(_key(), kind, _source(scratch, contents)).digest

    reference = digest(SnapshotKind.SAMPLER, {"a.json": b"1"})
    _require(digest(SnapshotKind.SAMPLER, {"a.json": b"1"}) == reference, "equal content has one digest")
    others = {
        digest(SnapshotKind.SAMPLER, {"a.json": b"2"}),
        digest(SnapshotKind.SAMPLER, {"b.json": b"1"}),
        digest(SnapshotKind.CHECKPOINT, {"a.json": b"1"}),
    }
    _require(reference not in others and len(others) == 3, "other content has another digest")


def check_publishing_again(open_store: OpenStore, scratch: Path) -> None:
    """The same content again is the same snapshot; other content is refused and changes nothing."""
    key, first = _key(), _source(scratch, {"a.json": b"1"})
    snapshot = open_store().publish(key, SnapshotKind.SAMPLER, first)
    again = open_store().publish(key, SnapshotKind.SAMPLER, first)
    _require(again == snapshot, "publishing the same content again returns the same snapshot")
    _refused(
        SnapshotConflictError,
        "publishing other content under the same key",
        lambda: open_store().publish(key, SnapshotKind.SAMPLER, _source(scratch, {"a.json": b"2"})),
    )
    _require(_contents(open_store().fetch(snapshot.uri)) == {"a.json": b"1"}, "the first content stays")


def check_one_winner(open_store: OpenStore, scratch: Path) -> None:
    """Of concurrent writers of different content exactly one wins, and its snapshot is whole."""
    key = _key()
    sources = [
        _source(scratch, {"a.json": f"{n}".encode() * 1000, "b.safetensors": bytes([n]) * 9999})
        for n in range(WRITERS)
    ]

    def publish(source: Path) -> Snapshot | None:
        try:
            return open_store().publish(key, SnapshotKind.CHECKPOINT, source)
        except SnapshotConflictError:
            return None

    with ThreadPoolExecutor(WRITERS) as pool:
        results = list(pool.map(publish, sources))
    winners = [(snapshot, source) for snapshot, source in zip(results, sources, strict=True) if snapshot]
    _require(len(winners) == 1, f"one of {WRITERS} concurrent writers wins, not {len(winners)}")
    snapshot, source = winners[0]
    _require(
        _contents(open_store().fetch(snapshot.uri, snapshot.digest)) == _contents(source),
        "the winner's snapshot holds the winner's files",
    )


def check_equal_writers(open_store: OpenStore, scratch: Path) -> None:
    """Concurrent writers of equal content all get the same snapshot."""
    key, source = _key(), _source(scratch, {"a.json": b"same", "b.safetensors": b"same"})
    with ThreadPoolExecutor(WRITERS) as pool:
        results = list(
            pool.map(lambda _: open_store().publish(key, SnapshotKind.SAMPLER, source), range(WRITERS))
        )
    _require(len(set(results)) == 1, "writers of equal content get one snapshot")


def check_refuses_hostile_names(open_store: OpenStore, scratch: Path) -> None:
    """Keys that are no safe names, and files that are no plain data, are refused."""
    store = open_store()
    good = _source(scratch, {"a.json": b"{}"})
    for name in HOSTILE_NAMES:
        _refused(
            UsageError,
            f"the key part {name!r:.40}",
            store.publish,
            (name,),
            SnapshotKind.SAMPLER,
            good,
        )
    _refused(UsageError, "an empty key", store.publish, (), SnapshotKind.SAMPLER, good)
    for name in ("run.py", "weights.bin", "weights.pt", "state.pkl", ".hidden.json", "a b.json"):
        source = _source(scratch, {name: b"x"})
        _refused(UsageError, f"the file name {name!r}", store.publish, _key(), SnapshotKind.SAMPLER, source)
    linked = _source(scratch, {"a.json": b"{}"})
    (linked / "link.json").symlink_to("/etc/hostname")
    _refused(UsageError, "a symbolic link", store.publish, _key(), SnapshotKind.SAMPLER, linked)
    nested = _source(scratch, {"a.json": b"{}"})
    (nested / "folder.json").mkdir()
    _refused(UsageError, "a folder", store.publish, _key(), SnapshotKind.SAMPLER, nested)
    _refused(UsageError, "no files", store.publish, _key(), SnapshotKind.SAMPLER, _source(scratch, {}))


def check_refuses_other_uris(open_store: OpenStore, scratch: Path) -> None:
    """What was never published, and what lies outside the store, is not found; nor is a wrong digest."""
    store = open_store()
    snapshot = store.publish(_key(), SnapshotKind.SAMPLER, _source(scratch, {"a.json": b"{}"}))
    uris = (
        f"{store.uri}/{_key()[0]}/0123456789abcdef",
        f"{store.uri}/../x/0123456789abcdef",
        f"{store.uri}",
        f"{store.uri}/x",
        "file:///etc/x",
        "",
        f"{snapshot.uri}/a.json",
        f"{store.uri}-other/{snapshot.uri.removeprefix(store.uri + '/')}",
    )
    for uri in uris:
        _refused(SnapshotError, f"the manifest of {uri!r}", store.manifest, uri)
        _refused(SnapshotError, f"fetching {uri!r}", store.fetch, uri)
    _refused(SnapshotError, "fetching with another digest", store.fetch, snapshot.uri, "0" * 64)


def check_delete(open_store: OpenStore, scratch: Path) -> None:
    """A deleted snapshot is gone, deleting is idempotent, touches no other, and frees the key."""
    store = open_store()
    key = _key()
    inner = store.publish((*key, "inner"), SnapshotKind.SAMPLER, _source(scratch, {"a.json": b"inner"}))
    outer = store.publish(key, SnapshotKind.SAMPLER, _source(scratch, {"a.json": b"outer"}))
    store.delete(outer.uri)
    store.delete(outer.uri)
    _refused(SnapshotError, "fetching a deleted snapshot", open_store().fetch, outer.uri)
    _require(_contents(store.fetch(inner.uri)) == {"a.json": b"inner"}, "deleting leaves other keys alone")
    second = store.publish(key, SnapshotKind.SAMPLER, _source(scratch, {"a.json": b"second"}))
    store.delete(outer.uri)
    _require(
        _contents(store.fetch(second.uri)) == {"a.json": b"second"},
        "deleting an old snapshot leaves the one that took its key",
    )


def check_large_file(open_store: OpenStore, scratch: Path) -> None:
    """A file of 20 MiB, more than one part of a multipart upload, survives."""
    block = bytes(range(256)) * 4096
    contents = {"big.safetensors": b"".join(bytes([n]) + block for n in range(20))}
    snapshot = open_store().publish(_key(), SnapshotKind.CHECKPOINT, _source(scratch, contents))
    fetched = open_store().fetch(snapshot.uri, snapshot.digest)
    _require(_contents(fetched) == contents, "a large file comes back as it was")


def check_refuses_damage(open_store: OpenStore, scratch: Path, damage: Damage) -> None:
    """A snapshot with a flipped byte is refused."""
    contents = {"a.json": b"{}", "b.safetensors": bytes(1000)}
    for name in contents:
        snapshot = open_store().publish(_key(), SnapshotKind.SAMPLER, _source(scratch, contents))
        damage(snapshot, name)
        _refused(SnapshotError, f"fetching with a byte of {name} flipped", open_store().fetch, snapshot.uri)


CHECKS: tuple[Callable[[OpenStore, Path], None], ...] = (
    check_round_trip,
    check_digest_is_of_the_content,
    check_publishing_again,
    check_one_winner,
    check_equal_writers,
    check_refuses_hostile_names,
    check_refuses_other_uris,
    check_delete,
    check_large_file,
)


def _key() -> tuple[str, ...]:
    return (f"conformance-{secrets.token_hex(6)}", "v000001")


def _folder(scratch: Path) -> Path:
    folder = scratch / secrets.token_hex(6)
    folder.mkdir(parents=True)
    return folder


def _source(scratch: Path, contents: dict[str, bytes]) -> Path:
    folder = _folder(scratch)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def _contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def _require(holds: bool, promise: str) -> None:
    if not holds:
        raise ConformanceError(f"broken promise: {promise}")


def _refused(
    kind: type[OpenTinkerError], what: str, action: Callable[..., object], *arguments: object
) -> None:
    try:
        action(*arguments)
    except kind:
        return
    raise ConformanceError(f"broken promise: {what} raises {kind.__name__}")
