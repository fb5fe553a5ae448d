"""The order of a model's requests, retries, refusals and failures, as the protocol has them."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from opentinker_core.service.tinker import futures
from tests.service.live import Live
from tests.service.raw import Raw


@pytest.fixture(scope="module")
def raw(live: Live) -> Raw:
    return Raw(live.url, live.key("orders"))


def steps_of(live: Live, raw: Raw, model: str, seq: int) -> int:
    """How many optimizer steps the model took, as its checkpoint says; `seq`: the next number."""
    raw.result(raw.ok("save_weights", model_id=model, seq_id=seq, path=f"at-{seq}")["request_id"])
    found = live.service.checkpoints.resolve("orders", f"tinker://{model}/weights/at-{seq}")
    return found.version.step


def test_what_arrives_early_waits_for_what_is_before_it(raw: Raw) -> None:
    in_order, reordered = raw.model(), raw.model()
    expected = []
    for seq in (1, 3):
        expected.append(raw.result(raw.forward_backward(in_order, seq).json()["request_id"])["loss:sum"])
        raw.result(raw.step(in_order, seq + 1).json()["request_id"])
    promises = {4: raw.step(reordered, 4), 3: raw.forward_backward(reordered, 3)}
    promises |= {2: raw.step(reordered, 2), 1: raw.forward_backward(reordered, 1)}
    got = [raw.result(promises[seq].json()["request_id"])["loss:sum"] for seq in (1, 3)]
    assert got == expected


def test_a_future_that_waits_is_told_so_and_nothing_times_out(
    raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "POLL_SECONDS", 0.2)
    model = raw.model()
    promise = raw.step(model, 2).json()["request_id"]
    waiting = raw.retrieve(promise).json()
    assert waiting == {"type": "try_again", "request_id": promise, "queue_state": "active"}
    raw.forward_backward(model, 1)
    assert "grad_norm" in raw.result(promise)["metrics"]


def test_a_retry_is_the_same_request_and_is_done_once(live: Live, raw: Raw) -> None:
    model = raw.model()
    promises: set[str] = set()

    def send() -> None:
        promises.add(raw.step(model, 1).json()["request_id"])

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(promises) == 1
    (promise,) = promises
    assert raw.result(promise) == raw.result(promise), "a result can be read again"
    assert raw.step(model, 1).json()["request_id"] == promise
    assert steps_of(live, raw, model, 2) == 1


def test_a_number_is_of_one_request(raw: Raw) -> None:
    model = raw.model()
    first = raw.result(raw.forward_backward(model, 1).json()["request_id"])
    other = raw.forward_backward(model, 1, weight=2.0)
    assert other.status_code == 400
    assert "seq_id: 1 was used for another forward_backward" in other.json()["detail"]
    assert raw.step(model, 1).status_code == 400
    assert raw.result(raw.forward_backward(model, 1).json()["request_id"]) == first
    assert "metrics" in raw.result(raw.step(model, 2).json()["request_id"])


@pytest.mark.parametrize("seeds", [(1,) * 6, tuple(range(6))], ids=["retries", "others"])
def test_models_of_one_number_that_are_asked_for_at_once_are_one(
    live: Live, raw: Raw, seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, arrived = raw.session(), 0
    all_there = asyncio.Event()

    async def stored(*_: str) -> None:
        """Nobody goes on before all have found that the number is free."""
        nonlocal arrived
        arrived += 1
        if arrived == len(seeds):
            all_there.set()
        await all_there.wait()

    monkeypatch.setattr(live.service.training, "_stored", stored)
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    with ThreadPoolExecutor(len(seeds)) as threads:
        answers = list(
            threads.map(
                lambda seed: raw.post("create_model", **body, lora_config={"rank": 2, "seed": seed}), seeds
            )
        )
    taken = [answer for answer in answers if answer.status_code == 200]
    assert len(taken) == (len(seeds) if len(set(seeds)) == 1 else 1)
    assert {answer.status_code for answer in answers} <= {200, 400}
    assert raw.result(taken[0].json()["request_id"])["model_id"] == f"{session}:train:0"
    raw.post(f"sessions/{session}/finish", reason={"type": "success"})
    assert live.service.quotas.running == 0, "what was refused counts as running still"


def test_a_refused_number_is_consumed_and_refused_again(raw: Raw) -> None:
    model = raw.model()
    later = raw.step(model, 4).json()["request_id"]
    assert raw.step(model, 1, rate=-1.0).status_code == 400
    assert raw.post("save_weights", model_id=model, seq_id=2, path=7).status_code == 422
    broken = raw.forward_backward(model, 3, tokens=(3, 4, 10**6))
    assert broken.status_code == 400, broken.text
    assert "metrics" in raw.result(later)
    again = raw.step(model, 1, rate=-1.0)
    assert (again.status_code, again.json()["detail"]) == (400, raw.step(model, 1, rate=0.1).json()["detail"])


def test_a_failed_request_tells_why_and_a_checkpoint_mends_the_model(raw: Raw) -> None:
    model = raw.model()
    path = raw.result(raw.ok("save_weights", model_id=model, seq_id=1, path="good")["request_id"])["path"]
    first = raw.result(raw.forward_backward(model, 2).json()["request_id"])
    raw.forward_backward(model, 3, weight=3e38)
    failed = raw.result(raw.step(model, 4).json()["request_id"])
    assert "diverged" in failed["error"]
    assert failed["category"] in ("user", "server")
    assert "error" in raw.result(raw.forward_backward(model, 5).json()["request_id"]), "the state is spoilt"
    loaded = raw.ok("load_weights", model_id=model, seq_id=6, path=path, optimizer=True)
    assert raw.result(loaded["request_id"])["path"] == path
    assert raw.result(raw.forward_backward(model, 7).json()["request_id"]) == first


def test_a_failure_that_was_read_does_not_stop_the_next_step(live: Live, raw: Raw) -> None:
    model = raw.model()
    path = f"tinker://{model}/weights/none"
    lost = raw.ok("load_weights", model_id=model, seq_id=1, path=path, optimizer=True)
    failed = raw.result(lost["request_id"])
    assert (failed["error"], failed["category"]) == (f"path: there is no {path}", "user")
    raw.forward_backward(model, 2)
    assert "metrics" in raw.result(raw.step(model, 3).json()["request_id"])
    assert steps_of(live, raw, model, 4) == 1


@pytest.mark.parametrize("field", ["model_id", "session_id", "path"])
def test_what_is_anothers_is_as_what_is_not_there(live: Live, raw: Raw, field: str) -> None:
    other = Raw(live.url, live.key("others"))
    session = raw.session()
    model = raw.model(session)
    path = raw.result(raw.ok("save_weights", model_id=model, seq_id=1, path="mine")["request_id"])["path"]
    mine = {"model_id": model, "session_id": session, "path": path}[field]
    missing = mine.replace(session, "0" * len(session))
    for thing in (mine, missing):
        if field == "model_id":
            answers = [other.post("get_info", model_id=thing), other.step(thing, 2)]
            answers.append(other.forward_backward(thing, 2))
            answers.append(other.http.get(f"/training_runs/{thing}"))
            answers.append(other.retrieve(f"{thing}:1"))
        elif field == "session_id":
            body = {"model_seq_id": 5, "base_model": "tiny", "lora_config": {"rank": 2}}
            answers = [other.post("create_model", session_id=thing, **body)]
            answers.append(other.post(f"sessions/{thing}/finish", reason={"type": "success"}))
            answers.append(other.http.get(f"/sessions/{thing}"))
        else:
            answers = [other.post("weights_info", tinker_path=thing)]
            body = {"session_id": other.session(), "model_seq_id": 0, "optimizer": True}
            answers.append(other.post("load_weights", path=thing, **body))
            answers.append(other.http.delete(f"/training_runs/{thing[9:].replace('/', '/checkpoints/', 1)}"))
        for answer in answers:
            assert answer.status_code == 404, answer.text
            assert answer.json()["detail"].count(thing) >= 1
    assert "metrics" in raw.result(raw.step(model, 2).json()["request_id"]), "nothing of it had an effect"
