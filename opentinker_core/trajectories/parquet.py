"""Trajectory sets as Parquet: one row a trajectory, its turns nested; the same set gives the same bytes.

Plain columns (no pickled or packed values), so that any Parquet reader can analyse a set. The schema's
version stands in the file's metadata.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from opentinker_core.digests import canonical_json
from opentinker_core.trajectories.errors import TrajectoryError, TrajectoryStoreError
from opentinker_core.trajectories.types import EndReason, StopReason, Trajectory, Turn

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1
_VERSION_KEY = b"opentinker.trajectories"
_PLAIN = ("trajectory_id", "agent", "environment", "seed", "group", "member", "end_reason", "reward")


@cache
def _schema() -> "pa.Schema":
    import pyarrow as pa

    turn = {
        "start": pa.int32(),
        "end": pa.int32(),
        "version": pa.string(),
        "stop_reason": pa.string(),
        "reward": pa.float64(),
    }
    columns = {
        "trajectory_id": pa.string(),
        "agent": pa.string(),
        "environment": pa.string(),
        "seed": pa.int64(),
        "group": pa.int64(),
        "member": pa.int64(),
        "end_reason": pa.string(),
        "reward": pa.float64(),
        "tokens": pa.list_(pa.int32()),
        "mask": pa.list_(pa.bool_()),
        "logprobs": pa.list_(pa.float32()),
        "turns": pa.list_(pa.struct(turn)),
        "info": pa.string(),
    }
    return pa.schema(columns, metadata={_VERSION_KEY: str(SCHEMA_VERSION)})


def encode(trajectories: Sequence[Trajectory]) -> bytes:
    """The set as the bytes of a Parquet file.

    Raises:
        TrajectoryError: `info` of a trajectory is not made of JSON values.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema()
    columns: dict[str, Any] = {
        name: [getattr(trajectory, name) for trajectory in trajectories] for name in _PLAIN
    }
    columns["tokens"] = _lists(pa.int32(), [trajectory.tokens_T for trajectory in trajectories])
    columns["mask"] = _lists(pa.bool_(), [trajectory.mask_T for trajectory in trajectories])
    columns["logprobs"] = _lists(pa.float32(), [trajectory.logprobs_T for trajectory in trajectories])
    columns["turns"] = [[_turn_row(turn) for turn in trajectory.turns] for trajectory in trajectories]
    columns["info"] = [_info(trajectory) for trajectory in trajectories]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=schema), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def decode(content: bytes, place: str, rows: Sequence[int] | None = None) -> list[Trajectory]:
    """The set (or some rows of it) from the bytes of a Parquet file; every invariant is checked again.

    Raises:
        IndexError: there is no such row.
        TrajectoryStoreError: not a trajectory set, or of a version this release does not know.
        TrajectoryError: a trajectory breaks an invariant.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(content))
    except (pa.ArrowInvalid, OSError) as error:
        raise TrajectoryStoreError(f"{place} is not a trajectory set: {error}") from error
    version = (table.schema.metadata or {}).get(_VERSION_KEY, b"none").decode()
    if version != str(SCHEMA_VERSION):
        raise TrajectoryStoreError(f"{place}: schema version {version}; accepted: {SCHEMA_VERSION}")
    if not table.schema.equals(_schema()):
        raise TrajectoryStoreError(f"{place}: its columns are not those of schema version {SCHEMA_VERSION}")
    if rows is not None:
        table = table.take(pa.array(rows, pa.int64()))
    plain = table.select([*(name for name in _PLAIN if name != "reward"), "turns", "info"]).to_pylist()
    arrays = (_arrays(table[name]) for name in ("tokens", "mask", "logprobs"))
    return [_trajectory(row, *values) for row, *values in zip(plain, *arrays, strict=True)]


def _lists(value_type: "pa.DataType", arrays: Sequence[np.ndarray]) -> "pa.ListArray":
    import pyarrow as pa

    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays), value_type))


def _arrays(column: "pa.ChunkedArray") -> Iterable[np.ndarray]:
    for chunk in column.chunks:
        values = chunk.values.to_numpy(zero_copy_only=False)
        offsets = chunk.offsets.to_numpy()
        yield from (values[start:end] for start, end in pairwise(offsets))


def _turn_row(turn: Turn) -> dict[str, Any]:
    return {
        "start": turn.start,
        "end": turn.end,
        "version": turn.version,
        "stop_reason": turn.stop_reason,
        "reward": turn.reward,
    }


def _info(trajectory: Trajectory) -> str:
    try:
        return canonical_json(trajectory.info).decode()
    except (TypeError, ValueError) as error:
        field = f"info of trajectory {trajectory.trajectory_id}"
        raise TrajectoryError(field, trajectory.info, f"JSON values ({error})") from error


def _trajectory(
    row: dict[str, Any], tokens: np.ndarray, mask: np.ndarray, logprobs: np.ndarray
) -> Trajectory:
    turns = tuple(
        Turn(agent=row["agent"], index=index, **{**turn, "stop_reason": StopReason(turn["stop_reason"])})
        for index, turn in enumerate(row.pop("turns"))
    )
    row["end_reason"] = EndReason(row["end_reason"])
    row["info"] = json.loads(row["info"])
    return Trajectory(**row, turns=turns, tokens_T=tokens, mask_T=mask, logprobs_T=logprobs)
