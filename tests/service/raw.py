"""The Tinker protocol by hand: what the SDK would send, in whatever order a test wants it."""

import time
from typing import Any

import httpx
import numpy as np
from tinker.proto import tinker_public_pb2 as pb

PROTOBUF = {"Content-Type": "application/x-protobuf"}


class Raw:
    """One tenant's calls."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=60)

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        return self.http.post(f"/{path}", json=body)

    def ok(self, path: str, /, **body: Any) -> dict[str, Any]:
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def session(self) -> str:
        made = self.ok("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")
        return str(made["session_id"])

    def model(self, session: str | None = None, seq: int = 0, rank: int = 2) -> str:
        """A new model; waits for it."""
        session = session or self.session()
        lora = {"rank": rank, "seed": 1}
        promise = self.ok(
            "create_model", session_id=session, model_seq_id=seq, base_model="tiny", lora_config=lora
        )
        return str(self.result(promise["request_id"])["model_id"])

    def forward_backward(
        self, model: str, seq: int, tokens: tuple[int, ...] = (3, 4, 5, 6), weight: float = 1.0
    ) -> httpx.Response:
        return self.http.post(
            "/forward_backward", content=forward_backward(model, seq, tokens, weight), headers=PROTOBUF
        )

    def step(self, model: str, seq: int, rate: float = 1e-2) -> httpx.Response:
        return self.post("optim_step", model_id=model, seq_id=seq, adam_params={"learning_rate": rate})

    def retrieve(self, request_id: str) -> httpx.Response:
        return self.post("retrieve_future", request_id=request_id)

    def result(self, request_id: str, timeout: float = 60) -> dict[str, Any]:
        """What a future gives in the end: JSON, or the metrics of a forward_backward."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            answer = self.retrieve(request_id)
            assert answer.status_code == 200, answer.text
            if "protobuf" in answer.headers["content-type"]:
                return dict(pb.ForwardBackwardOutput.FromString(answer.content).metrics)
            if answer.json().get("type") != "try_again":
                return dict(answer.json())
        raise AssertionError(f"{request_id} is not done within {timeout} s")

    def samples(self, request_id: str, timeout: float = 60) -> list[list[int]]:
        """The tokens of each completion that a future gives."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            answer = self.retrieve(request_id)
            if "protobuf" in answer.headers["content-type"]:
                sequences = pb.SampleResponse.FromString(answer.content).sequences
                return [np.frombuffer(one.tokens, "<i4").tolist() for one in sequences]
            assert answer.json().get("type") == "try_again", answer.text
        raise AssertionError(f"{request_id} is not done within {timeout} s")


def forward_backward(
    model: str, seq: int, tokens: tuple[int, ...] = (3, 4, 5, 6), weight: float = 1.0
) -> bytes:
    """The body of a request with one datum."""
    request = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], "<i4").tobytes()
    count = len(tokens) - 1
    for name, dtype, values in (
        ("target_tokens", pb.DTYPE_INT64, np.array(tokens[1:], "<i8")),
        ("weights", pb.DTYPE_FLOAT32, np.full(count, weight, "<f4")),
    ):
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = values.tobytes(), dtype
        tensor.shape.append(count)
    return request.SerializeToString()
