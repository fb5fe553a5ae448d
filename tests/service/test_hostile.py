"""What a client could send to harm the server or others, and what became of it: each was a defect once."""

import json
import time
from pathlib import Path

import httpx
import pytest
from safetensors import SafetensorError
from tinker.proto import tinker_public_pb2 as pb

from opentinker_core.policies.database import DatabaseError
from tests.service.live import Live, serving
from tests.service.raw import PROTOBUF, Raw, forward_backward


@pytest.fixture
def raw(live: Live) -> Raw:
    return Raw(live.url, live.key("hostile"))


def send(raw: Raw, path: str, body: object) -> httpx.Response:
    """Send JSON as Python writes it, lone surrogates and all."""
    return raw.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


def test_the_audit_log_can_be_read_whatever_was_sent(raw: Raw) -> None:
    body = {"model_id": "\ud800", "path": "\ud800", "seq_id": 1, "type": "save_weights"}
    assert send(raw, "/save_weights", body).status_code in (400, 404)
    deadline = time.monotonic() + 20
    while not (entries := raw.http.get("/admin/audit").json()["entries"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert entries[0]["subject"]["model_id"] == "?"


@pytest.mark.parametrize("depth", [30, 40, 900, 960, 962, 963, 980])
@pytest.mark.parametrize("brackets", ["[]", ("{", "}")], ids=["lists", "objects"])
def test_deep_metadata_is_refused_or_can_be_read_again(raw: Raw, depth: int, brackets: str) -> None:
    opened, closed = brackets[0], brackets[1]
    deep = (opened + ('"a":' if opened == "{" else "")) * depth + "1" + closed * depth
    body = f'{{"tags": [], "sdk_version": "", "user_metadata": {{"a": {deep}}}}}'
    made = raw.http.post("/create_session", content=body, headers={"Content-Type": "application/json"})
    assert made.status_code == (200 if depth == 30 else 400), made.text
    for path in ("/sessions", f"/sessions/{made.json().get('session_id', '')}".rstrip("/")):
        assert raw.http.get(path).status_code == 200
    assert raw.post("sessions/search", limit=100).status_code == 200


@pytest.mark.parametrize(
    ("at", "session_id"),
    [
        ("0001-01-01T00:00:00+14:00", "a"),
        ("9999-12-31T23:59:59-14:00", "a"),
        ("2026-01-01T00:00:00+00:00", "\ud800"),
        ("2026-01-01T00:00:00+00:00", "\0"),
    ],
    ids=["before all time", "after all time", "half a character", "nothing"],
)
def test_a_cursor_that_is_none_is_refused(raw: Raw, at: str, session_id: str) -> None:
    answer = send(raw, "/sessions/search", {"cursor": {"last_created_at": at, "last_session_id": session_id}})
    assert answer.status_code == 400
    assert "cursor" in answer.json()["detail"]


@pytest.mark.parametrize("shape", [[0, 2**62], [2**62, 0], [0, 2**63 - 1], [2**25]])
def test_a_length_beyond_all_memory_is_refused(raw: Raw, shape: list[int]) -> None:
    model = raw.model()
    request = pb.ForwardBackwardRequest.FromString(forward_backward(model, 1))
    weights = request.data[0].loss_fn_inputs["weights"]
    weights.dense, weights.shape[:] = b"", shape
    content = request.SerializeToString()
    answer = raw.http.post("/forward_backward", content=content, headers=PROTOBUF)
    assert answer.status_code == 400
    assert "weights" in answer.json()["detail"]
    assert "metrics" in raw.result(raw.step(model, 2).json()["request_id"])


def test_targets_of_a_shape_beyond_all_numbers_are_refused(raw: Raw) -> None:
    sampler = raw.ok(
        "create_sampling_session", session_id=raw.session(), sampling_session_seq_id=0, base_model="tiny"
    )["sampling_session_id"]
    targets = {
        "data": [5],
        "dtype": "int64",
        "shape": [2, 2**63],
        "sparse_crow_indices": [0, 1, 1],
        "sparse_col_indices": [0],
    }
    refused = raw.post(
        "asample",
        sampling_session_id=sampler,
        seq_id=0,
        prompt={"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5]}]},
        num_samples=1,
        sampling_params={"max_tokens": 1},
        target_prompt_logprobs=targets,
    )
    assert refused.status_code == 400
    assert "target_prompt_logprobs" in refused.json()["detail"]


def test_a_day_beyond_the_calendar_is_refused(live: Live) -> None:
    answer = Raw(live.url, live.key()).http.get("/audit", params={"day": "9999-12-31"})
    assert answer.status_code == 400
    assert answer.json()["detail"] == "day: 9999-12-31; accepted: up to today (UTC)"


def test_a_step_without_an_epsilon_is_refused(raw: Raw) -> None:
    model = raw.model()
    refused = raw.post("optim_step", model_id=model, seq_id=1, adam_params={"learning_rate": 1e-2, "eps": 0})
    assert refused.status_code == 400
    assert "eps: 0" in refused.json()["detail"]


def test_a_full_disk_and_a_lost_database_tell_no_paths(
    live: Live, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = raw.model()

    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr("opentinker_core.training.trainer.write_peft", full)
        promise = raw.ok("save_weights_for_sampler", model_id=model, seq_id=1, path="full")["request_id"]
        failed = raw.result(promise)
    assert failed["category"] == "server"
    assert "the sampler weights cannot be written: I/O error: No space left on device" in failed["error"]

    def lost(*_: object, **__: object) -> None:
        raise DatabaseError("catalog sqlite:////var/lib/secret.sqlite: disk I/O error")

    monkeypatch.setattr(live.service.records, "add_session", lost)
    monkeypatch.setattr(live.service.records, "add_model", lost)
    answer = raw.post("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")
    body = {"model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 2}}
    made = raw.ok("create_model", session_id=model.partition(":")[0], **body)
    assert answer.status_code == 503
    for text in (answer.text, str(raw.result(made["request_id"]))):
        assert "the server's database does not answer" in text
        assert "sqlite" not in text


def test_json_that_would_keep_the_event_loop_busy_is_refused(raw: Raw) -> None:
    chunks = b'{"tokens":[1]},' * 70_000 + b'{"tokens":[1]}'
    many = b'{"sampling_session_id":"x","seq_id":1,"num_samples":1,"prompt":{"chunks":[' + chunks + b"]}}"
    large = b'{"session_id":"x","events":[' + b"1," * 9_000_000 + b"1]}"
    for path, body in (("/asample", many), ("/telemetry", large)):
        answer = raw.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        assert "65536 objects" in answer.json()["detail"]


def test_very_many_empty_arrays_are_refused(raw: Raw) -> None:
    model = raw.model()
    request = pb.ForwardBackwardRequest.FromString(forward_backward(model, 1))
    chunks = pb.Datum()
    for _ in range(1000):
        chunks.model_input.add().encoded_text.tokens = b""
    body = request.SerializeToString() + _field(3, chunks.SerializeToString()) * 1100
    answer = raw.http.post("/forward_backward", content=body, headers=PROTOBUF)
    assert (answer.status_code, "too many arrays" in answer.json()["detail"]) == (400, True)


def _field(number: int, content: bytes) -> bytes:
    """A field of a protobuf message that holds another one."""
    length, size = [], len(content)
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


def test_a_stop_string_beyond_all_use_is_refused(raw: Raw) -> None:
    session = raw.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = raw.ok("create_sampling_session", **body)["sampling_session_id"]
    for stop in ("a" * 2000, ["a" * 2000], [""], ""):
        sample = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [3]}]}, "num_samples": 1}
        answer = raw.post(
            "asample", sampling_session_id=sampler, seq_id=1, sampling_params={"stop": stop}, **sample
        )
        assert (answer.status_code, answer.json()["detail"][:5]) == (400, "stop:")


def test_what_comes_too_early_fills_no_memory(tmp_path: Path) -> None:
    tokens = tuple(range(3, 63)) * 8
    with serving(tmp_path, limits={"waiting_mb": 0.02}) as live:
        raw, other = (Raw(live.url, live.key(name)) for name in ("greedy", "other"))
        model, theirs = raw.model(), other.model()
        assert raw.forward_backward(model, 2, tokens).status_code == 200, "9.6 kB"
        assert raw.forward_backward(model, 3, tokens).status_code == 200
        refused = raw.forward_backward(model, 4, tokens)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
        assert "waiting_mb" in refused.json()["detail"]
        assert raw.step(model, 5).status_code == 200, "small, and so taken"
        assert other.forward_backward(theirs, 2, tokens).status_code == 200, "of another tenant"
        first = raw.forward_backward(model, 1, tokens)
        assert first.status_code == 200, "what the others wait for"
        raw.result(f"{model}:3")
        assert raw.forward_backward(model, 4, tokens).status_code == 200, "its number was not consumed"
        assert "metrics" in raw.result(f"{model}:5")
