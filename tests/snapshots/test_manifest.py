"""A manifest is trusted in nothing: what is hostile, damaged or from the future is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_core.digests import digest_json
from opentinker_core.snapshots.manifest import decode, describe, encode
from opentinker_core.snapshots.protocol import Manifest, SnapshotError, SnapshotFile, SnapshotKind
from tests.snapshots.conftest import Place

KEY = ("adder-1f2e", "v000012", "sampler")
FILE = {
    "name": "a.json",
    "size": 2,
    "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
}


def forged(**changes: Any) -> bytes:
    """A manifest whose digest fits its content, as an attacker would write it."""
    value = {"format": 1, "kind": "sampler", "files": [FILE], **changes}
    files = sorted(value["files"], key=lambda file: str(file["name"]))
    digest = digest_json({"kind": value["kind"], "files": files})
    return json.dumps({**value, "digest": changes.get("digest", digest)}).encode()


def test_the_forger_can_write_a_valid_manifest() -> None:
    assert decode(forged(), "here").files == (SnapshotFile(**FILE),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "../x.json",
        "/etc/x.json",
        "a/b.json",
        "a\0.json",
        "n" * 300 + ".json",
        "",
        ".json",
        "a.py",
        "manifest.json",
        7,
    ],
)
def test_hostile_file_names_are_refused(name: object) -> None:
    with pytest.raises(SnapshotError, match="not a valid snapshot manifest"):
        decode(forged(files=[{**FILE, "name": name}]), "here")


@pytest.mark.parametrize(
    "changes",
    [
        {"files": []},
        {"files": [FILE, FILE]},
        {"files": [{**FILE, "size": -1}]},
        {"files": [{**FILE, "size": True}]},
        {"files": [{**FILE, "size": "2"}]},
        {"files": [{**FILE, "sha256": "0"}]},
        {"files": [{**FILE, "sha256": None}]},
        {"files": [{**FILE, "mode": 0o777}]},
        {"kind": "program"},
        {"digest": "0" * 64},
    ],
)
def test_malformed_manifests_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SnapshotError):
        decode(forged(**changes), "here")


def test_a_newer_format_says_so() -> None:
    with pytest.raises(SnapshotError, match="format 2; this version of opentinker reads 1"):
        decode(forged(format=2), "here")


WORDS = ["format", "kind", "files", "digest", "name", "size", "sha256"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner),
)


@given(st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode()))
def test_nothing_but_a_snapshot_error_comes_out_of_any_bytes(content: bytes) -> None:
    with pytest.raises(SnapshotError):
        decode(content, "here")


def test_deeply_nested_json_is_refused() -> None:
    with pytest.raises(SnapshotError):
        decode(b"[" * 100_000, "here")


names = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}\.(json|safetensors|md|txt)", fullmatch=True)
hashes = st.binary(min_size=32, max_size=32).map(bytes.hex)
files = st.builds(
    SnapshotFile, names.filter(lambda name: name != "manifest.json"), st.integers(0, 2**50), hashes
)
listings = st.lists(files, min_size=1, max_size=4, unique_by=lambda file: file.name)


@given(listings, st.sampled_from(SnapshotKind), st.data())
def test_manifests_round_trip_and_every_flipped_bit_is_found(
    listed: list[SnapshotFile], kind: SnapshotKind, data: st.DataObject
) -> None:
    digest = digest_json({"kind": kind, "files": [vars(f) for f in sorted(listed, key=lambda f: f.name)]})
    manifest = Manifest(kind, tuple(listed), digest)
    content = bytearray(encode(manifest))
    assert decode(bytes(content), "here") == manifest
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(SnapshotError):
        decode(bytes(content), "here")


def test_a_store_refuses_a_forged_manifest(place: Place) -> None:
    place.blobs().put("/".join(KEY) + "/manifest.json", forged(files=[{**FILE, "name": "../../x.json"}]))
    with pytest.raises(SnapshotError, match=r"snapshot file: '\.\./\.\./x\.json' is not a name"):
        place.store().fetch(f"{place.uri}/{'/'.join(KEY)}/0123456789abcdef")


def test_a_file_that_is_not_in_the_manifest_is_refused(local: Place, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.json").write_text("{}")
    snapshot = local.store().publish(KEY, SnapshotKind.SAMPLER, source)
    (local.store().fetch(snapshot.uri) / "adapter_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(SnapshotError, match="not part of the snapshot"):
        local.store().fetch(snapshot.uri)


def test_the_digest_does_not_depend_on_time_or_place(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, order in zip(folders, ("ab", "ba"), strict=True):
        folder.mkdir()
        for name in order:
            (folder / f"{name}.json").write_text(name)
    first, second = (encode(describe(SnapshotKind.SAMPLER, folder)) for folder in folders)
    assert first == second
