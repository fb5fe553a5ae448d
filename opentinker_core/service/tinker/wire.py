"""Requests and results of forward_backward: protobuf (or the JSON of old SDKs) from and to numpy arrays.

What a client can send is checked here, as far as a request can be looked at by itself, and in `losses`,
before any of it meets the engine. Whatever does not hold is a `UsageError` that names the field, the value
and what is accepted.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from opentinker_core.errors import UsageError
from opentinker_core.service.tinker.tensors import Budget, dense, from_bytes, from_csr
from opentinker_core.service.tinker.wire_json import read_forward_backward_json as read_forward_backward_json
from opentinker_core.service.tinker.wire_types import (
    ContentError,
    ForwardBackwardBody,
    WireDatum,
    assembled,
    check_count,
    checked_number,
)

_DTYPES = {
    pb.DTYPE_FLOAT32: "float32",
    pb.DTYPE_INT64: "int64",
    pb.DTYPE_INT32: "int32",
    pb.DTYPE_BFLOAT16: "bfloat16",
}
_OUTPUT_TYPE = "TorchLossReturn"


def read_forward_backward(body: bytes) -> ForwardBackwardBody:
    """Decode the protobuf `ForwardBackwardRequest` of a body (not compressed).

    Raises:
        ContentError: model and number are known, but the rest is not accepted.
        UsageError: it is not such a request.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise UsageError(
            f"body: {len(body)} bytes are not accepted; accepted: a tinker_public.ForwardBackwardRequest"
        ) from None
    number = checked_number(message.model_id, message.seq_id)
    try:
        check_count(len(message.data))
        budget = Budget()
        data = tuple(_datum(f"data[{index}]", one, budget) for index, one in enumerate(message.data))
        return assembled(number, data, message.loss_fn, _config(message), message.forward_only)
    except UsageError as error:
        raise ContentError(*number, str(error)) from None


def write_forward_backward(
    outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]
) -> bytes:
    """The protobuf `ForwardBackwardOutput`: of each datum its arrays by name, and the metrics.

    Raises:
        ValueError: a metric is not named `name:reduction`.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type=_OUTPUT_TYPE, metrics=_metrics(metrics))
    # A record is rectangular: neighbours whose arrays have other shapes (K targets) get one of their own.
    for shapes, group in groupby(outputs, key=_trailing_shapes):
        members = list(group)
        record = message.loss_fn_outputs.add(type_tag=_OUTPUT_TYPE, num_datums=len(members))
        for name, shape in shapes.items():
            arrays = [np.ascontiguousarray(member[name], "<f4") for member in members]
            field = record.fields[name]
            field.dtype = pb.DTYPE_FLOAT32
            field.trailing_shape.extend(shape)
            field.data = b"".join(array.tobytes() for array in arrays)
            offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
            field.offsets = offsets.tobytes()
    return message.SerializeToString()


def forward_backward_json(
    outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]
) -> dict[str, Any]:
    """The same result as JSON, for clients that do not accept protobuf.

    Raises:
        ValueError: a metric is not named `name:reduction`.
    """
    rows = [
        {
            name: {"data": array.reshape(-1).tolist(), "dtype": "float32", "shape": list(array.shape)}
            for name, array in output.items()
        }
        for output in outputs
    ]
    return {
        "loss_fn_output_type": _OUTPUT_TYPE,
        "loss_fn_outputs": rows,
        "metrics": _metrics(metrics),
        "type": "forward_backward",
    }


def _datum(field: str, message: pb.Datum, budget: Budget) -> WireDatum:
    chunks = [
        _chunk(f"{field}.model_input[{index}]", chunk, budget)
        for index, chunk in enumerate(message.model_input)
    ]
    tokens_N = np.concatenate(chunks) if chunks else np.empty(0, np.int64)
    inputs = {
        name: _tensor(f"{field}.loss_fn_inputs[{name!r:.40}]", tensor, budget)
        for name, tensor in message.loss_fn_inputs.items()
    }
    return WireDatum(tokens_N, inputs)


def _chunk(field: str, message: pb.Chunk, budget: Budget) -> np.ndarray:
    kind = message.WhichOneof("chunk")
    if kind != "encoded_text":
        raise UsageError(f"{field}: a chunk of kind {kind} is not accepted; accepted: encoded_text")
    tokens = from_bytes(f"{field}.tokens", message.encoded_text.tokens, "int32")
    budget.take(field, tokens.size)
    return tokens


def _tensor(field: str, message: pb.Tensor, budget: Budget) -> np.ndarray:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise UsageError(
            f"{field}.dtype: {message.dtype} is not accepted; accepted: {', '.join(_DTYPES.values())}"
        )
    shape = list(message.shape)
    if message.WhichOneof("encoding") != "sparse_csr":
        return dense(field, from_bytes(field, message.dense, dtype), shape, budget)
    csr = message.sparse_csr
    return from_csr(
        field,
        from_bytes(f"{field}.values", csr.values, dtype),
        from_bytes(f"{field}.crow_indices", csr.crow_indices, "int64"),
        from_bytes(f"{field}.col_indices", csr.col_indices, "int64"),
        shape,
        budget,
    )


def _config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    config: dict[str, float | str] = {}
    for name, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise UsageError(f"loss_fn_config[{name!r:.40}]: no value; accepted: a number or a text")
        config[name] = value.number if kind == "number" else value.text
    return config


def _trailing_shapes(output: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape[1:] for name, array in output.items()}


def _metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    for name in metrics:
        if name.count(":") != 1:  # the SDK splits it there
            raise ValueError(f"metrics[{name!r}]: its name is not of the form name:reduction")
    return {name: float(value) for name, value in metrics.items()}
