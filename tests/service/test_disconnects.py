"""Clients that leave at every stage of a call: what they began settles, and nothing of it stays."""

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from opentinker_core.service.tinker import futures
from opentinker_core.training.trainer import PolicyBatch
from tests.service.held import Held, nothing_kept
from tests.service.live import Live
from tests.service.raw import PROTOBUF, Raw, forward_backward
from tests.service.sockets import Line, line
from tests.waiting import PATIENCE_S, wait_until

API = "/api/v1"
LONG = {"max_tokens": 400, "ignore_eos": True, "n": 8}
"""Completions that nobody would wait for."""


@dataclass
class Visit:
    """A tenant with a session, a model and a connection that will break."""

    live: Live
    raw: Raw
    model: str
    line: Line

    def sampler(self) -> str:
        """A sampler of the base model."""
        session = self.model.partition(":")[0]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        return str(self.raw.ok("create_sampling_session", **body)["sampling_session_id"])


@pytest.fixture(scope="module")
def key(live: Live) -> str:
    return live.key("fickle")


@pytest.fixture
def visit(live: Live, key: str) -> Iterator[Visit]:
    """After the test the session ends, and the server must hold what it held before."""
    raw = Raw(live.url, key)
    with nothing_kept(live):
        session = raw.session()
        with line(live.url, key) as connection:
            yield Visit(live, raw, raw.model(session), connection)
        answer = raw.post(f"sessions/{session}/finish", reason={"type": "success"})
        assert answer.status_code == 204


def sample(sampler: str, seq: int, samples: int = 8, tokens: int = 400) -> dict[str, Any]:
    """A request that takes a while."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5]}]}
    params = {"max_tokens": tokens, "stop": [], "seed": seq}
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "num_samples": samples,
        "prompt": prompt,
        "sampling_params": params,
    }


def announced(visit: Visit) -> None:
    visit.line.head("POST", f"{API}/forward_backward", 5000, PROTOBUF["Content-Type"])


def announced_in_chunks(visit: Visit) -> None:
    visit.line.head("POST", f"{API}/forward_backward", None, PROTOBUF["Content-Type"])


def half_a_body(visit: Visit) -> None:
    body = forward_backward(visit.model, 1)
    visit.line.head("POST", f"{API}/forward_backward", len(body), PROTOBUF["Content-Type"])
    visit.line.send(body[: len(body) // 2])


def half_a_chunk(visit: Visit) -> None:
    visit.line.head("POST", f"{API}/asample", None)
    visit.line.send(b'100\r\n{"num_samples')


def submitted_training(visit: Visit) -> None:
    body = forward_backward(visit.model, 1)
    visit.line.head("POST", f"{API}/forward_backward", len(body), PROTOBUF["Content-Type"])
    visit.line.send(body)


def submitted_what_waits(visit: Visit) -> None:
    body = {"model_id": visit.model, "seq_id": 5, "adam_params": {}}
    visit.line.request("POST", f"{API}/optim_step", body)


def submitted_a_model(visit: Visit) -> None:
    session = visit.model.partition(":")[0]
    lora = {"rank": 2, "seed": 1}
    body = {"session_id": session, "model_seq_id": 1, "base_model": "tiny", "lora_config": lora}
    visit.line.request("POST", f"{API}/create_model", body)


def submitted_a_save(visit: Visit) -> None:
    body = {"model_id": visit.model, "seq_id": 1, "path": "left"}
    visit.line.request("POST", f"{API}/save_weights", body)


def submitted_samples(visit: Visit) -> None:
    visit.line.request("POST", f"{API}/asample", sample(visit.sampler(), 1))
    visit.line.head_of_answer()


def polled(visit: Visit) -> None:
    visit.raw.step(visit.model, 2)
    visit.line.request("POST", f"{API}/retrieve_future", {"request_id": f"{visit.model}:2"})


def completed(visit: Visit) -> None:
    body = {"model": "tiny", "prompt": [3, 4, 5], **LONG}
    visit.line.request("POST", "/v1/completions", body)
    wait_until(lambda: Held.of(visit.live).sequences)


def streamed(visit: Visit) -> None:
    body = {"model": "tiny", "prompt": [3, 4, 5], **LONG, "stream": True}
    visit.line.request("POST", "/v1/completions", body)
    visit.line.read(b"data: ")


def chatted(visit: Visit) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "1+1="}], **LONG, "stream": True}
    visit.line.request("POST", "/v1/chat/completions", body)
    visit.line.read(b"data: ")


def downloaded(visit: Visit) -> None:
    made = visit.raw.ok("save_weights", model_id=visit.model, seq_id=1, path="kept")
    visit.raw.result(made["request_id"])
    visit.line.request("GET", f"{API}/training_runs/{visit.model}/checkpoints/weights/kept/archive")
    visit.line.head_of_answer()


STAGES: tuple[Callable[[Visit], None], ...] = (
    announced,
    announced_in_chunks,
    half_a_body,
    half_a_chunk,
    submitted_training,
    submitted_what_waits,
    submitted_a_model,
    submitted_a_save,
    submitted_samples,
    polled,
    completed,
    streamed,
    chatted,
    downloaded,
)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_nothing_is_kept_of_a_client_that_left(
    visit: Visit, stage: Callable[[Visit], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "POLL_SECONDS", 10 * PATIENCE_S)  # a poll ends with its client, or never
    before = Held.of(visit.live)
    stage(visit)
    visit.line.reset()
    after = {"open_requests": before.open_requests, "busy": before.busy, "body_bytes": before.body_bytes}
    wait_until(lambda: {name: getattr(Held.of(visit.live), name) for name in after} == after)


def test_what_was_submitted_is_done_though_nobody_heard_the_promise(visit: Visit) -> None:
    submitted_training(visit)
    visit.line.reset()
    wait_until(lambda: visit.raw.retrieve(f"{visit.model}:1").status_code == 200)
    loss = visit.raw.result(f"{visit.model}:1")["loss:sum"]
    again = visit.raw.forward_backward(visit.model, 1).json()
    assert visit.raw.result(again["request_id"])["loss:sum"] == loss, "a retry is the same request"


def test_a_poll_that_nobody_read_does_not_count_as_read(visit: Visit) -> None:
    polled(visit)
    wait_until(lambda: Held.of(visit.live).open_requests == 1, "the poll")
    visit.line.reset()
    wait_until(lambda: Held.of(visit.live).open_requests == 0, "its end")
    visit.raw.forward_backward(visit.model, 1)
    future = visit.live.service.futures._futures[f"{visit.model}:2"]
    wait_until(lambda: future.outcome is not None)
    assert future.read_at is None
    assert "metrics" in visit.raw.result(f"{visit.model}:2")
    assert future.read_at is not None


def test_a_future_that_nobody_reads_keeps_its_result_but_not_its_data(visit: Visit) -> None:
    raw, model, trained = visit.raw, visit.model, visit.live.service.training.find("fickle", visit.model)
    assert trained is not None
    raw.forward_backward(model, 1)
    assert raw.forward_backward(model, 2, tokens=(3, 4, 10**6)).status_code == 400
    assert raw.step(model, 3, rate=-1.0).status_code == 400
    assert raw.forward_backward(model, 4).status_code == 200
    wait_until(lambda: Held.of(visit.live).holdings.work_running == 0)
    assert set(trained.refusals) == {2, 3}

    def batches() -> int:
        gc.collect()
        return sum(type(one) is PolicyBatch for one in gc.get_objects())

    wait_until(lambda: batches() == 0, "an end of the data", 0.2)
    again = raw.step(model, 3, rate=0.1)
    assert (again.status_code, "learning_rate" in again.json()["detail"]) == (400, True), "as the first time"


def test_a_session_that_ends_takes_in_nothing_while_it_ends(live: Live, key: str) -> None:
    """Models of a session are released one after the other; requests for the last come meanwhile."""
    raw = Raw(live.url, key)
    before = Held.of(live).holdings
    session = raw.session()
    models = [raw.model(session, seq) for seq in range(4)]
    ended = threading.Event()

    def ask() -> None:
        seq = 2  # number 1 never comes: what is taken in would wait for ever
        own = Raw(live.url, key)
        while not ended.is_set():
            for model in models:
                own.step(model, seq)
            seq += 1

    asking = threading.Thread(target=ask)
    asking.start()
    answer = raw.post(f"sessions/{session}/finish", reason={"type": "success"})
    ended.set()
    asking.join()
    assert answer.status_code == 204
    held = Held.of(live).holdings
    assert (held.futures_pending, held.work_running) == (before.futures_pending, before.work_running)
    live.service.futures.forget(session)  # refusals, which are kept to be read
