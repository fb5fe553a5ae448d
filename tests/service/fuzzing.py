"""Requests that are wrong: by chance, but the same ones for the same seed.

`mutated_json` and `mutated_protobuf` start from what a client would send and change some of it.
"""

import copy
import json
import random
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from tests.service.raw import forward_backward

DEEP = 900
_NASTY: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    2**31 - 1,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**300,
    1e308,
    -1e308,
    5e-324,
    float("nan"),
    float("inf"),
    float("-inf"),
    0.5,
    "",
    " ",
    "a" * 5000,
    "\0",
    "\ud800",
    "é" * 60,
    "../../../../etc/passwd",
    "tinker://../../weights/..",
    "tinker://x:train:0/weights/../../..",
    "x\r\nX-Api-Key: y",
    "%00%2e%2e%2f",
    "'; DROP TABLE ot_sessions; --",
    "{{7*7}}",
    [],
    {},
    [None],
    [[]],
    {"": None},
    {"type": "nothing"},
    ["a"] * 300,
    [0] * 3000,
)
_BYTES = (b"", b"\0", b"null", b"[]", b"{", b'"\\ud800"', b"\xff\xfe", b"1e999", b"-" * 100, b"0" * 5000)


def mutated_json(chance: random.Random, body: Any) -> bytes:
    """A body of JSON that is not quite as it should be."""
    if chance.random() < 0.03:
        return chance.choice(_BYTES)
    if chance.random() < 0.03:
        depth = chance.choice([50, 200, *range(DEEP - 100, DEEP + 100, 7), 5000, 100_000])
        opened, closed = chance.choice([("[", "]"), ('{"a":', "}")])
        deep = opened * depth + "1" + closed * depth
        name = chance.choice([*body, "user_metadata"])
        return json.dumps({**body, name: "DEEP"}).replace('"DEEP"', deep).encode()
    changed = copy.deepcopy(body)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        _change(chance, changed)
    text = json.dumps(changed).encode()
    if chance.random() < 0.05:
        text = _torn(chance, text)
    return text


def _change(chance: random.Random, body: Any) -> None:
    """Change something somewhere in an object or a list."""
    keys = list(body) if isinstance(body, dict) else list(range(len(body)))
    if not keys or chance.random() < 0.05:
        if isinstance(body, dict):
            body[chance.choice(["type", "x", "", "a" * 300])] = copy.deepcopy(chance.choice(_NASTY))
        else:
            body.append(copy.deepcopy(chance.choice(_NASTY)))
        return
    key = chance.choice(keys)
    if isinstance(body[key], dict | list) and chance.random() < 0.7:
        _change(chance, body[key])
    elif chance.random() < 0.1:
        del body[key]
    else:
        body[key] = copy.deepcopy(chance.choice(_NASTY))


def _torn(chance: random.Random, data: bytes) -> bytes:
    """Bytes with some of them changed, lost or doubled."""
    torn = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(torn) + 1)
        match chance.randrange(4):
            case 0:
                torn[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del torn[at : at + chance.randint(1, 8)]
            case 2:
                torn[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 8)))
            case 3:
                torn[at:at] = torn[at : at + chance.randint(1, 64)]
    return bytes(torn)


_LOSSES = (
    "cross_entropy",
    "importance_sampling",
    "ppo",
    "cispo",
    "dro",
    "gspo",
    "stable_reinforce",
    "",
    "x" * 999,
)
_INPUTS = (
    "target_tokens",
    "weights",
    "logprobs",
    "advantages",
    "sequence_ratio_mask",
    "clip_low_threshold",
    "é",
    "",
)
_NUMBERS = (0.0, -1.0, 1e308, -1e308, float("nan"), float("inf"), 5e-324, 0.2)
_LENGTHS = (0, 1, -1, 2, 3, 4, 2**31, 2**62, 2**63 - 1, -(2**63))


def mutated_protobuf(chance: random.Random, model: str, seq: int) -> bytes:
    """A body of `forward_backward` that is not quite as it should be."""
    tokens = tuple(chance.randrange(60) for _ in range(chance.randint(2, 12)))
    body = forward_backward(model, seq, tokens)
    if chance.random() < 0.3:
        return _torn(chance, body)
    request = pb.ForwardBackwardRequest.FromString(body)
    request.forward_only = chance.random() < 0.3
    if chance.random() < 0.3:
        _extreme(chance, request)
        return request.SerializeToString()
    for _ in range(chance.randint(1, 3)):
        chance.choice(_CHANGES)(chance, request)
    return request.SerializeToString()


def _loss(chance: random.Random, request: "pb.ForwardBackwardRequest") -> None:
    request.loss_fn = chance.choice(_LOSSES)


def _config(chance: random.Random, request: "pb.ForwardBackwardRequest") -> None:
    name = chance.choice(["beta", "clip_low_threshold", "clip_high_threshold", "x"])
    request.loss_fn_config[name] = chance.choice(_NUMBERS)
    if chance.random() < 0.3:
        request.loss_fn_config_v2[name].text = "a"


def _number(chance: random.Random, request: "pb.ForwardBackwardRequest") -> None:
    request.seq_id = chance.choice([0, -1, 2**31 - 1, -(2**31), 4000, request.seq_id])


def _model(chance: random.Random, request: "pb.ForwardBackwardRequest") -> None:
    request.model_id = chance.choice(["", "\0", "../..", "a" * 5000, f"{request.model_id}:1", "é"])


def _datums(chance: random.Random, request: "pb.ForwardBackwardRequest") -> None:
    if chance.random() < 0.3:
        del request.data[:]
    for _ in range(chance.choice([1, 40])):
        request.data.add()


def _tokens(chance: random.Random, request: "pb.ForwardBackwardRequest") -> None:
    chunk = _datum(chance, request).model_input.add()
    match chance.randrange(4):
        case 0:
            chunk.image.data = b"x" * 100
        case 1:
            chunk.dmel.dmel = b"x"
        case 2:
            chunk.encoded_text.tokens = np.array(chance.choices([0, -1, 2**31 - 1, 5], k=5), "<i4").tobytes()
        case 3:
            chunk.encoded_text.tokens = b"x" * chance.randint(0, 9)


def _tensor(chance: random.Random, request: "pb.ForwardBackwardRequest") -> None:
    tensor = _datum(chance, request).loss_fn_inputs[chance.choice(_INPUTS)]
    tensor.dtype = chance.choice([0, 1, 2, 3, 4, 99])
    if chance.random() < 0.5:
        tensor.dense = _floats(chance, chance.randint(0, 12))
    if chance.random() < 0.6:
        del tensor.shape[:]
        tensor.shape.extend(chance.choices(_LENGTHS, k=chance.randint(0, 4)))


def _sparse(chance: random.Random, request: "pb.ForwardBackwardRequest") -> None:
    tensor = _datum(chance, request).loss_fn_inputs[chance.choice(_INPUTS)]
    del tensor.shape[:]
    tensor.shape.extend(chance.choices(_LENGTHS, k=2))
    for name in ("values", "crow_indices", "col_indices"):
        numbers = np.array(chance.choices(_LENGTHS, k=chance.randint(0, 4)), "<i8").tobytes()
        setattr(tensor.sparse_csr, name, numbers[: chance.choice([len(numbers), len(numbers) // 2])])


def _weights(chance: random.Random, request: "pb.ForwardBackwardRequest") -> None:
    tensor = _datum(chance, request).loss_fn_inputs["weights"]
    count = len(tensor.dense) // 4
    tensor.dense = _floats(chance, count)


def _floats(chance: random.Random, count: int) -> bytes:
    return _packed(chance.choices([*_NUMBERS, 3e38, -3e38], k=count))


def _packed(numbers: list[float]) -> bytes:
    with np.errstate(over="ignore"):
        return np.array(numbers, "<f4").tobytes()


def _extreme(chance: random.Random, request: "pb.ForwardBackwardRequest") -> None:
    """Of the right form, with numbers that are too large to be of use."""
    request.loss_fn = chance.choice(_LOSSES[:6])
    names = {"cross_entropy": ("weights",), "gspo": _INPUTS[2:5]}.get(request.loss_fn, _INPUTS[2:4])
    inputs = request.data[0].loss_fn_inputs
    (count,) = inputs["target_tokens"].shape
    inputs["weights"].Clear()
    for name in [name for name in inputs if name not in (*names, "target_tokens")]:
        del inputs[name]
    for name in names:
        values = chance.choices([0.0, 0.5, -1.0, 1e-30, 90.0, -90.0, 1e30, -1e30, 3e38], k=count)
        inputs[name].dense = np.abs(np.array(values, "<f4")).tobytes() if "mask" in name else _packed(values)
        inputs[name].dtype = pb.DTYPE_FLOAT32
        inputs[name].shape[:] = [count]


def _datum(chance: random.Random, request: "pb.ForwardBackwardRequest") -> "pb.Datum":
    return chance.choice(request.data) if request.data else request.data.add()


_CHANGES = (_loss, _config, _number, _model, _datums, _tokens, _tensor, _sparse, _weights)
