"""The codec of forward_backward, against the SDK's own; hostile bodies are refused and nothing worse."""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from opentinker_core.errors import UsageError
from opentinker_core.service.tinker.losses import LOSSES, policy_batch
from opentinker_core.service.tinker.tensors import MAX_ELEMENTS
from opentinker_core.service.tinker.wire import (
    forward_backward_json,
    read_forward_backward,
    read_forward_backward_json,
    write_forward_backward,
)
from opentinker_core.service.tinker.wire_types import ContentError, ForwardBackwardBody

INT64 = st.integers(-(2**63), 2**63 - 1)
names = st.sampled_from(["target_tokens", "weights", "logprobs", "advantages", "sequence_ratio_mask"])
shapes = npst.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=9)
arrays = st.one_of(
    npst.arrays(np.float32, shapes),
    npst.arrays(np.int64, shapes, elements=INT64),
    # Mostly 0, so that the SDK sends it sparse.
    npst.arrays(np.int64, (8, 9), elements=st.integers(0, 5), fill=st.just(0)),
    npst.arrays(np.float32, (7, 11), elements=st.floats(-2, 2, width=32), fill=st.just(0)),
)
tokens = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=12)


@st.composite
def sdk_datums(draw: st.DrawFn) -> tinker.Datum:
    chunks = [tinker.EncodedTextChunk(tokens=part) for part in draw(st.lists(tokens, max_size=3))]
    inputs = {name: torch.from_numpy(draw(arrays)) for name in draw(st.sets(names))}
    return tinker.Datum(model_input=tinker.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


requests = st.builds(
    lambda datums, loss_fn, config, seq: ForwardBackwardRequest(
        forward_backward_input=ForwardBackwardInput(data=datums, loss_fn=loss_fn, loss_fn_config=config),
        model_id="s:train:0",
        seq_id=seq,
    ),
    st.lists(sdk_datums(), min_size=1, max_size=4),
    st.sampled_from([*LOSSES, "stable_reinforce"]),
    st.none()
    | st.dictionaries(st.text(max_size=8), st.floats(allow_nan=False) | st.text(max_size=8), max_size=3),
    st.integers(1, 2**31 - 1),
)


def _assert_read(body: ForwardBackwardBody, request: ForwardBackwardRequest) -> None:
    asked = request.forward_backward_input
    assert (body.model_id, body.seq_id, body.loss_fn) == (request.model_id, request.seq_id, asked.loss_fn)
    assert body.config == (asked.loss_fn_config or {})
    for ours, theirs in zip(body.data, asked.data, strict=True):
        assert ours.tokens_N.tolist() == theirs.model_input.to_ints()
        assert ours.inputs.keys() == theirs.loss_fn_inputs.keys()
        for name, array in ours.inputs.items():
            expected = theirs.loss_fn_inputs[name].to_numpy()
            assert array.dtype == expected.dtype
            assert not array.flags.writeable
            np.testing.assert_array_equal(array, expected)


@given(requests)
def test_what_the_sdk_writes_is_read(request: ForwardBackwardRequest) -> None:
    message = forward_backward_request_to_proto(request)
    body = read_forward_backward(message.SerializeToString())
    _assert_read(body, request)
    assert not body.forward_only
    message.forward_only = True
    assert read_forward_backward(message.SerializeToString()).forward_only


def _old_json(request: ForwardBackwardRequest) -> dict[str, Any]:
    """What SDKs before 0.25 send."""
    asked = request.forward_backward_input
    data = []
    for datum in asked.data:
        inputs = {}
        for name, tensor in datum.loss_fn_inputs.items():
            inputs[name] = {"data": tensor.data, "dtype": tensor.dtype, "shape": tensor.shape}
            if tensor.sparse_crow_indices is not None:
                inputs[name]["sparse_crow_indices"] = tensor.sparse_crow_indices
                inputs[name]["sparse_col_indices"] = tensor.sparse_col_indices
        chunks = [{"type": "encoded_text", "tokens": list(c.tokens)} for c in datum.model_input.chunks]
        data.append({"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs})
    content = {"data": data, "loss_fn": asked.loss_fn, "loss_fn_config": asked.loss_fn_config}
    body = {"model_id": request.model_id, "seq_id": request.seq_id, "forward_backward_input": content}
    return json.loads(json.dumps(body))


@given(requests)
def test_what_old_sdks_write_is_read(request: ForwardBackwardRequest) -> None:
    dumped = _old_json(request)
    body = read_forward_backward_json(dumped, forward_only=False)
    _assert_read(body, request)
    dumped["forward_input"] = dumped.pop("forward_backward_input")
    assert read_forward_backward_json(dumped, forward_only=True).forward_only


def test_one_content_has_one_digest_in_whatever_encoding_it_comes() -> None:
    inputs = {"target_tokens": torch.tensor([1, 2]), "weights": torch.tensor([0.1, 1e-30])}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([3, 4]), loss_fn_inputs=inputs)
    asked = ForwardBackwardInput(data=[datum], loss_fn="dro", loss_fn_config={"beta": 1})
    request = ForwardBackwardRequest(forward_backward_input=asked, model_id="m", seq_id=1)
    wire = forward_backward_request_to_proto(request).SerializeToString()
    as_json = read_forward_backward_json(_old_json(request), forward_only=False)
    assert as_json.digest == read_forward_backward(wire).digest


def _request(**changes: Any) -> pb.ForwardBackwardRequest:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=3, loss_fn="cross_entropy")
    message.loss_fn_config_v2["beta"].number = 0.5
    message.loss_fn_config_v2["alpha"].number = 0.25
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.int32([1, 2, 3]).tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dtype = pb.DTYPE_INT64
    targets.shape.append(3)
    targets.dense = np.int64([2, 3, 4]).tobytes()
    weights = datum.loss_fn_inputs["weights"]
    weights.dtype = pb.DTYPE_FLOAT32
    weights.shape.extend([3, 2])
    weights.sparse_csr.values = np.float32([5, 6]).tobytes()
    weights.sparse_csr.crow_indices = np.int64([0, 1, 1, 2]).tobytes()
    weights.sparse_csr.col_indices = np.int64([1, 0]).tobytes()
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def test_narrow_numbers_are_widened() -> None:
    message = _request()
    inputs = message.data[0].loss_fn_inputs
    inputs["target_tokens"].dtype = pb.DTYPE_INT32
    inputs["target_tokens"].dense = np.int32([-1, 7, 8]).tobytes()
    inputs["advantages"].dtype = pb.DTYPE_BFLOAT16
    inputs["advantages"].dense = (
        torch.tensor([1.5, -2, 0.125], dtype=torch.bfloat16).view(torch.int16).numpy().tobytes()
    )
    (datum,) = read_forward_backward(message.SerializeToString()).data
    assert datum.inputs["target_tokens"].dtype == np.int64
    assert datum.inputs["target_tokens"].tolist() == [-1, 7, 8]
    assert datum.inputs["advantages"].tolist() == [1.5, -2, 0.125]
    assert datum.inputs["weights"].tolist() == [[0, 5], [0, 0], [6, 0]]


def test_the_digest_is_of_the_content() -> None:
    def digest(message: pb.ForwardBackwardRequest) -> str:
        return read_forward_backward(message.SerializeToString()).digest

    first, reordered = _request(), _request()
    reordered.ClearField("loss_fn_config_v2")
    reordered.loss_fn_config_v2["alpha"].number = 0.25
    reordered.loss_fn_config_v2["beta"].number = 0.5
    reordered.loss_fn_config["beta"] = 9  # the old map, not looked at where there is the new one
    two_chunks = _request()
    two_chunks.data[0].model_input[0].encoded_text.tokens = np.int32([1]).tobytes()
    two_chunks.data[0].model_input.add().encoded_text.tokens = np.int32([2, 3]).tobytes()
    assert digest(first) == digest(reordered) == digest(two_chunks)
    others = [
        _request(seq_id=4),
        _request(model_id="n"),
        _request(loss_fn="ppo"),
        _request(forward_only=True),
    ]
    changed = _request()
    changed.data[0].loss_fn_inputs["target_tokens"].dense = np.int64([2, 3, 5]).tobytes()
    assert len({digest(one) for one in (first, changed, *others)}) == 6


def _tensor(change: Callable[[pb.Tensor], object], name: str = "weights") -> pb.ForwardBackwardRequest:
    message = _request()
    change(message.data[0].loss_fn_inputs[name])
    return message


def _shape(*lengths: int) -> Callable[[pb.Tensor], object]:
    def change(tensor: pb.Tensor) -> None:
        del tensor.shape[:]
        tensor.shape.extend(lengths)

    return change


def _csr(field: str, values: list[int]) -> Callable[[pb.Tensor], object]:
    return lambda tensor: setattr(tensor.sparse_csr, field, np.int64(values).tobytes())


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (_tensor(_shape(3, 2**40)), r"weights.*elements are not accepted; accepted: 16777216"),
        (_tensor(_shape(2**62, 2**62)), "crow_indices: 4 entries"),
        (_tensor(_shape(3, -2)), r"shape: \[3, -2\]"),
        (_tensor(_shape(3)), r"shape: \[3\].*two dimensions"),
        (_tensor(_shape()), "two dimensions"),
        (_tensor(_shape(*[1] * 5000)), "one or two lengths"),
        (_tensor(_csr("crow_indices", [0, 1, 1, 9])), "crow_indices.*from 0 to 2"),
        (_tensor(_csr("crow_indices", [0, 2, 1, 2])), "never falling"),
        (_tensor(_csr("crow_indices", [1, 1, 1, 2])), "from 0 to 2"),
        (_tensor(_csr("crow_indices", [0, -(2**63), 2**63 - 1, 2])), "never falling"),
        (_tensor(_csr("col_indices", [1, 2])), "col_indices.*0 to 1"),
        (_tensor(_csr("col_indices", [-1, 0])), "0 to 1"),
        (_tensor(_csr("col_indices", [1])), "col_indices: 1 entries.*2"),
        (
            _tensor(lambda t: (_csr("crow_indices", [0, 2, 2, 2])(t), _csr("col_indices", [1, 1])(t))),
            "rising",
        ),
        (_tensor(lambda t: setattr(t.sparse_csr, "values", b"12345")), "5 bytes.*multiple of 4"),
        (_tensor(_shape(4), "target_tokens"), r"shape: \[4\].*3 elements"),
        (_tensor(_shape(-1, -3), "target_tokens"), "one or two lengths"),
        (_tensor(_shape(2**32, 2**32), "target_tokens"), "3 elements"),
        (_tensor(lambda t: setattr(t, "dtype", 0), "target_tokens"), "dtype: 0.*int64"),
        (_tensor(lambda t: setattr(t, "dtype", 99), "target_tokens"), "dtype: 99"),
        (_tensor(lambda t: setattr(t, "dense", b"123"), "target_tokens"), "3 bytes"),
    ],
)
def test_tensors_that_do_not_hold_together_are_refused(message: pb.ForwardBackwardRequest, says: str) -> None:
    with pytest.raises(ContentError, match=says) as caught:
        read_forward_backward(message.SerializeToString())
    assert (caught.value.model_id, caught.value.seq_id) == ("m", 3)


def test_other_chunks_are_refused() -> None:
    for kind in ("image", "dmel", None):
        message = _request()
        chunk = message.data[0].model_input.add()
        if kind is not None:
            getattr(chunk, kind).SetInParent()
        with pytest.raises(ContentError, match=rf"model_input\[1\].*{kind}.*encoded_text"):
            read_forward_backward(message.SerializeToString())


def test_a_request_says_whose_it_is() -> None:
    for message, says in (
        (_request(model_id=""), "model_id"),
        (_request(seq_id=0), "seq_id: 0"),
        (_request(seq_id=-5), "seq_id: -5"),
    ):
        with pytest.raises(UsageError, match=says):
            read_forward_backward(message.SerializeToString())
    with pytest.raises(UsageError, match="body: 4 bytes"):
        read_forward_backward(b"\xff\xff\xff\xff")
    with pytest.raises(ContentError, match="0 datums"):
        read_forward_backward(pb.ForwardBackwardRequest(model_id="m", seq_id=1).SerializeToString())


def test_many_small_tensors_share_one_budget() -> None:
    message = _request()
    side = 2**12
    tensor = message.data[0].loss_fn_inputs["weights"]
    _shape(side, side)(tensor)
    tensor.sparse_csr.CopyFrom(pb.SparseCsr(crow_indices=np.zeros(side + 1, np.int64).tobytes()))
    assert side * side == MAX_ELEMENTS
    with pytest.raises(ContentError, match="elements are not accepted"):
        read_forward_backward(message.SerializeToString())
    _shape(side, side - 1)(tensor)
    assert read_forward_backward(message.SerializeToString()).data[0].inputs["weights"].shape == (
        side,
        side - 1,
    )


def _mutated(body: bytes, draw: random.Random) -> bytes:
    data = bytearray(body)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data))
        match draw.randrange(4):
            case 0:
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                data[at] = draw.choice([0, 1, 0x7F, 0x80, 0xFF])
            case 2:
                del data[at : at + draw.randint(1, 9)]
            case _:
                data[at:at] = data[draw.randrange(len(data)) :][: draw.randint(1, 30)]
        if not data:
            return b""
    return bytes(data)


def test_mutated_bodies_are_refused_and_nothing_worse() -> None:
    """5,000 of them, through the losses as well: what they raise is a UsageError."""
    draw, body = random.Random(0), _request().SerializeToString()
    refusals = []
    for _ in range(5000):
        try:
            read = read_forward_backward(_mutated(body, draw))
            policy_batch("p", read.data, read.loss_fn, {}, vocabulary=99, max_length=64)
        except UsageError as error:
            refusals.append(str(error))
    assert len(refusals) > 2500
    assert max(map(len, refusals)) < 1000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_other_json_is_refused_and_nothing_worse(data: st.DataObject) -> None:
    tensor = {"data": [1, 2], "dtype": "int64", "shape": [2]}
    sparse = {
        "data": [1],
        "dtype": "int64",
        "shape": [1, 2],
        "sparse_crow_indices": [0, 1],
        "sparse_col_indices": [0],
    }
    chunk = {"type": "encoded_text", "tokens": [1, 2]}
    datum = {
        "model_input": {"chunks": [chunk]},
        "loss_fn_inputs": {"target_tokens": tensor, "weights": sparse},
    }
    asked = {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": {"beta": 1}}
    body = {"model_id": "m", "seq_id": 1, "forward_backward_input": asked}
    read_forward_backward_json(body, forward_only=False)
    parts = [body, asked, datum, datum["model_input"], datum["loss_fn_inputs"], chunk, tensor, sparse]
    part: dict[str, Any] = data.draw(st.sampled_from(parts))  # type: ignore[arg-type]
    part[data.draw(st.sampled_from(sorted(part)))] = data.draw(json_values)
    with suppress(UsageError):
        read_forward_backward_json(body, forward_only=False)


@settings(max_examples=50)
@given(
    st.lists(
        npst.arrays(
            np.float32,
            npst.array_shapes(min_dims=1, max_dims=2, min_side=1, max_side=5),
            elements=st.floats(width=32),
        ),
        max_size=8,
    ),
    st.floats(),
)
def test_what_is_written_the_sdk_reads(logprobs: list[np.ndarray], loss: float) -> None:
    outputs = [{"logprobs": array} for array in logprobs]
    written = write_forward_backward(outputs, {"loss:sum": loss})
    read = deserialize_forward_backward_output(written)
    assert read.metrics == pytest.approx({"loss:sum": loss}, nan_ok=True)
    as_json = forward_backward_json(outputs, {"loss:sum": loss})
    tensors = [output["logprobs"] for output in read.loss_fn_outputs]
    tensors_json = [tinker.TensorData(**output["logprobs"]) for output in as_json["loss_fn_outputs"]]
    for array, *both in zip(logprobs, tensors, tensors_json, strict=True):
        for tensor in both:
            assert tensor.shape == list(array.shape)
            np.testing.assert_array_equal(tensor.to_numpy(), array)


def test_metrics_without_a_reduction_are_a_mistake_of_ours() -> None:
    for name in ("loss", "loss:sum:mean"):
        with pytest.raises(ValueError, match="name:reduction"):
            write_forward_backward([], {name: 1.0})
