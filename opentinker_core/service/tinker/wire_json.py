"""Requests of forward and forward_backward in the JSON that SDKs before 0.25 send."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from opentinker_core.errors import UsageError
from opentinker_core.service.tinker.tensors import Budget, dense, from_csr
from opentinker_core.service.tinker.wire_types import (
    ContentError,
    ForwardBackwardBody,
    WireDatum,
    assembled,
    check_count,
    checked_number,
)


def read_forward_backward_json(body: object, *, forward_only: bool) -> ForwardBackwardBody:
    """Decode a parsed body of `forward_backward`, or (`forward_only`) of `forward`.

    Raises:
        ContentError: model and number are known, but the rest is not accepted.
        UsageError: it is not such a request.
    """
    request = _mapping("body", body)
    seq_id = request.get("seq_id")
    if type(seq_id) is not int:
        raise UsageError(f"seq_id: {seq_id!r:.60} is not accepted; accepted: 1, 2, 3, ... by model")
    number = checked_number(_text("model_id", request.get("model_id")), seq_id)
    name = "forward_input" if forward_only else "forward_backward_input"
    try:
        asked = _mapping(name, request.get(name))
        data = _list(f"{name}.data", asked.get("data"))
        check_count(len(data))
        budget = Budget()
        datums = tuple(_datum(f"data[{index}]", one, budget) for index, one in enumerate(data))
        config = _config(asked.get("loss_fn_config") or {})
        return assembled(number, datums, _text("loss_fn", asked.get("loss_fn")), config, forward_only)
    except UsageError as error:
        raise ContentError(*number, str(error)) from None


def _datum(field: str, value: object, budget: Budget) -> WireDatum:
    datum = _mapping(field, value)
    model_input = _mapping(f"{field}.model_input", datum.get("model_input"))
    chunks = [
        _chunk(f"{field}.model_input.chunks[{index}]", chunk, budget)
        for index, chunk in enumerate(_list(f"{field}.model_input.chunks", model_input.get("chunks")))
    ]
    inputs = {
        name: _tensor(f"{field}.loss_fn_inputs[{name!r:.40}]", tensor, budget)
        for name, tensor in _mapping(f"{field}.loss_fn_inputs", datum.get("loss_fn_inputs")).items()
    }
    return WireDatum(np.concatenate(chunks) if chunks else np.empty(0, np.int64), inputs)


def _chunk(field: str, value: object, budget: Budget) -> np.ndarray:
    chunk = _mapping(field, value)
    kind = chunk.get("type", "encoded_text")
    if kind != "encoded_text":
        raise UsageError(f"{field}: a chunk of kind {kind!r:.40} is not accepted; accepted: encoded_text")
    tokens = _array(f"{field}.tokens", chunk.get("tokens"), "int64")
    budget.take(field, tokens.size)
    return tokens


def _tensor(field: str, value: object, budget: Budget) -> np.ndarray:
    tensor = _mapping(field, value)
    dtype = tensor.get("dtype")
    if dtype not in ("float32", "int64"):
        raise UsageError(f"{field}.dtype: {dtype!r:.40} is not accepted; accepted: float32, int64")
    values = _array(f"{field}.data", tensor.get("data"), dtype)
    given = tensor.get("shape")
    shape = [] if given is None else _array(f"{field}.shape", given, "int64").tolist()
    if tensor.get("sparse_crow_indices") is None:
        return dense(field, values, shape, budget)
    rows = _array(f"{field}.sparse_crow_indices", tensor["sparse_crow_indices"], "int64")
    columns = _array(f"{field}.sparse_col_indices", tensor.get("sparse_col_indices"), "int64")
    return from_csr(field, values, rows, columns, shape, budget)


def _array(field: str, value: object, dtype: str) -> np.ndarray:
    """A flat list of numbers; of integers, where the array has them."""
    kinds = (int,) if dtype == "int64" else (int, float)
    values = _list(field, value)
    wrong = next((entry for entry in values if type(entry) not in kinds), None)
    if wrong is not None or None in values:
        raise UsageError(f"{field}: {wrong!r:.60} is not accepted; accepted: a flat list of {dtype}")
    try:
        with np.errstate(over="ignore"):
            return np.array(values, dtype)
    except OverflowError:
        raise UsageError(f"{field}: a number is too large; accepted: a flat list of {dtype}") from None


def _config(value: object) -> dict[str, float | str]:
    config: dict[str, float | str] = {}
    for name, entry in _mapping("loss_fn_config", value).items():
        if type(entry) not in (int, float, str):
            raise UsageError(
                f"loss_fn_config[{name!r:.40}]: {entry!r:.60} is not accepted; accepted: a number or a text"
            )
        try:
            config[name] = entry if isinstance(entry, str) else float(entry)
        except OverflowError:
            raise UsageError(f"loss_fn_config[{name!r:.40}]: too large; accepted: a number") from None
    return config


def _mapping(field: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{field}: {type(value).__name__} is not accepted; accepted: an object")
    return value


def _list(field: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{field}: {type(value).__name__} is not accepted; accepted: a list")
    return value


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{field}: {value!r:.60} is not accepted; accepted: a text")
    return value
