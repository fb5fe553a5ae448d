"""Stored sets: what was saved is what is loaded, under a digest that anything else changes."""

import hashlib
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker_core.errors import UsageError
from opentinker_core.snapshots.blobs import BlobError, BlobMissingError
from opentinker_core.trajectories.digest import combine_digests, token_ids_digest
from opentinker_core.trajectories.errors import TrajectoryError, TrajectoryStoreError
from opentinker_core.trajectories.fsm import TrajectoryBuilder
from opentinker_core.trajectories.parquet import decode, encode
from opentinker_core.trajectories.store import TrajectoryStore
from opentinker_core.trajectories.types import EndReason, Trajectory
from tests.trajectories.conftest import OpenStore
from tests.trajectories.strategies import demonstration, trajectory_lists, two_turns

KEY = ("run-1f2e", "s00003-train")
SET = [two_turns(), demonstration()]


@pytest.fixture
def local(tmp_path: Path) -> TrajectoryStore:
    return TrajectoryStore((tmp_path / "sets").as_uri(), tmp_path / "cache")


def file_of(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path))


@settings(max_examples=30, deadline=None)
@given(trajectory_lists())
def test_any_set_survives_the_file_format(trajectories: list[Trajectory]) -> None:
    content = encode(trajectories)
    assert decode(content, "memory") == trajectories
    assert encode(decode(content, "memory")) == content


def test_a_set_is_loaded_as_it_was_saved_by_another_process(open_store: OpenStore) -> None:
    stored = open_store().save(KEY, SET)
    assert (stored.episodes, stored.tokens) == (2, 5)
    loaded = open_store().load(stored.uri, stored.digest)
    assert loaded == SET
    assert open_store().load(stored.uri) == SET
    assert loaded[0].reward == 1.25


@given(trajectory_lists(), st.data())
@settings(max_examples=20, deadline=None)
def test_some_rows_are_those_of_the_whole(trajectories: list[Trajectory], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(trajectories) - 1)))
    assert decode(encode(trajectories), "memory", rows) == [trajectories[row] for row in rows]
    with pytest.raises(IndexError):
        decode(encode(trajectories), "memory", [len(trajectories)])


def test_saving_again_changes_nothing_and_another_set_replaces_nothing(open_store: OpenStore) -> None:
    first = open_store().save(KEY, SET)
    assert open_store().save(KEY, SET) == first
    other = open_store().save(KEY, SET[:1])
    assert other.uri != first.uri
    assert open_store().load(first.uri, first.digest) == SET
    assert open_store().load(other.uri, other.digest) == SET[:1]


def test_the_digest_is_the_file_s_sha256_and_the_file_plain_parquet(local: TrajectoryStore) -> None:
    stored = local.save(KEY, SET)
    content = file_of(stored.uri).read_bytes()
    assert hashlib.sha256(content).hexdigest() == stored.digest
    rows = pq.read_table(pa.BufferReader(content)).to_pylist()
    assert [row["reward"] for row in rows] == [1.25, 1.0]
    assert rows[0]["tokens"] == [10, 11, 20, 21, 12, 22, 13]
    assert rows[0]["turns"][1] == {
        "start": 5, "end": 6, "version": "adder@4", "stop_reason": "length", "reward": 1.0,
    }  # fmt: skip


def test_a_flipped_byte_is_refused_and_repaired_by_saving_again(local: TrajectoryStore) -> None:
    stored = local.save(KEY, SET)
    path = file_of(stored.uri)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    for digest in (stored.digest, None):
        with pytest.raises(TrajectoryStoreError, match="damaged"):
            local.load(stored.uri, digest)
    assert local.save(KEY, SET) == stored
    assert local.load(stored.uri, stored.digest) == SET


def test_a_damaged_copy_in_the_cache_is_not_used(open_store: OpenStore, tmp_path: Path) -> None:
    stored = open_store().save(KEY, SET)
    open_store().load(stored.uri)
    for copy in (tmp_path / "cache").glob("*.parquet"):
        copy.write_bytes(b"damaged")
    assert open_store().load(stored.uri, stored.digest) == SET


def test_another_digest_is_refused(open_store: OpenStore) -> None:
    stored = open_store().save(KEY, SET)
    with pytest.raises(TrajectoryStoreError, match="another set"):
        open_store().load(stored.uri, "0" * 64)


def test_missing_and_foreign_sets_are_named(open_store: OpenStore) -> None:
    store = open_store()
    missing = f"{store.uri}/run/{'0' * 16}.parquet"
    with pytest.raises(BlobMissingError):
        store.load(missing)
    with pytest.raises(BlobError, match="outside the store"):
        store.load("file:///etc/passwd")
    with pytest.raises(BlobError, match="not the URI"):
        store.load(f"{store.uri}/../secret.parquet")


@pytest.mark.parametrize("part", ["../up", "/etc", "", "a\x00b", "x" * 300])
def test_hostile_keys_are_refused(local: TrajectoryStore, part: str) -> None:
    with pytest.raises(UsageError, match="trajectory key"):
        local.save(("run", part), SET)


def test_sets_that_could_not_be_told_apart_later_are_refused(local: TrajectoryStore) -> None:
    with pytest.raises(TrajectoryError, match="at least one"):
        local.save(KEY, [])
    with pytest.raises(TrajectoryError, match="unique within a set"):
        local.save(KEY, [two_turns(), two_turns()])
    with pytest.raises(TrajectoryError, match=r"info of trajectory t.*JSON"):
        local.save(KEY, [replace(two_turns(), info={"score": {1, 2}})])


def test_other_files_and_other_versions_are_refused() -> None:
    with pytest.raises(TrajectoryStoreError, match="not a trajectory set"):
        decode(b"PAR1 and nothing else", "here")
    table = pa.table({"tokens": [1]})
    for metadata, message in (({}, "none"), ({"opentinker.trajectories": "2"}, "schema version 2")):
        sink = pa.BufferOutputStream()
        pq.write_table(table.replace_schema_metadata(metadata), sink)
        with pytest.raises(TrajectoryStoreError, match=message):
            decode(sink.getvalue().to_pybytes(), "here")


def test_what_is_loaded_keeps_the_invariants() -> None:
    table = pq.read_table(pa.BufferReader(encode([two_turns()])))
    masks = pa.array([[False] * 7], pa.list_(pa.bool_()))
    sink = pa.BufferOutputStream()
    pq.write_table(table.set_column(table.schema.get_field_index("mask"), "mask", masks), sink)
    with pytest.raises(TrajectoryError, match="logprobs_T"):
        decode(sink.getvalue().to_pybytes(), "here")


def test_an_episode_without_tokens_can_be_stored(local: TrajectoryStore) -> None:
    builder = TrajectoryBuilder(trajectory_id="f", agent="solver", environment="arithmetic", seed=1)
    failed = builder.terminate(EndReason.FAILED, {"error": "RuntimeError: no"})
    stored = local.save(KEY, [failed, two_turns()])
    assert local.load(stored.uri) == [failed, two_turns()]


def test_encoding_a_step_s_episodes_is_cheap() -> None:
    episodes = [replace(two_turns(), trajectory_id=f"s00001-g{i // 8}-m{i % 8}") for i in range(64)]
    times = []
    for _ in range(10):
        start = time.perf_counter()
        encode(episodes)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.03  # measured 0.006 s


@settings(max_examples=30, deadline=None)
@given(trajectory_lists())
def test_the_token_digest_sees_tokens_and_masks_and_their_order_alone(trajectories: list[Trajectory]) -> None:
    digest = token_ids_digest(trajectories)
    renamed = [replace(t, environment="other", info={}, seed=1) for t in trajectories]
    assert token_ids_digest(renamed) == digest
    assert token_ids_digest([*trajectories, two_turns()]) != digest
    assert token_ids_digest([two_turns(), demonstration()]) != token_ids_digest(
        [demonstration(), two_turns()]
    )


def test_digests_combine_in_order() -> None:
    assert combine_digests(["a", "b"]) != combine_digests(["b", "a"])
    assert combine_digests(["ab"]) != combine_digests(["a", "b"])
