"""Very much at once: thousands of samples; a model's requests out of order and twice, from many threads."""

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.service.held import nothing_kept
from tests.service.live import Live
from tests.service.raw import Raw
from tests.waiting import PATIENCE_S

THREADS = 16
STEPS = 12


def sampled(raw: Raw, sampler: str, seq: int, samples: int) -> list[list[int]]:
    """Ask for samples, and wait for them."""
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "num_samples": samples,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5]}]},
        "sampling_params": {"max_tokens": 2, "stop": [], "seed": seq},
    }
    return raw.samples(raw.ok("asample", **body)["request_id"], PATIENCE_S)


@pytest.mark.parametrize(
    ("tenants", "requests", "samples"),
    [(1, 1, 2048), (1, 256, 8), (4, 8, 64)],
    ids=["one", "many", "tenants"],
)
def test_2048_samples_at_once_all_come_and_are_what_each_would_be_alone(
    live: Live, tenants: int, requests: int, samples: int
) -> None:
    raws = [Raw(live.url, live.key(f"throng-{tenant}")) for tenant in range(tenants)]
    with nothing_kept(live), ThreadPoolExecutor(THREADS) as pool:
        sessions = [raw.session() for raw in raws]
        base = {"sampling_session_seq_id": 0, "base_model": "tiny"}
        samplers = [
            raw.ok("create_sampling_session", session_id=session, **base)["sampling_session_id"]
            for raw, session in zip(raws, sessions, strict=True)
        ]
        alone = sampled(raws[0], samplers[0], requests + 1, 4)
        asked = [(raw, sampler) for raw, sampler in zip(raws, samplers, strict=True) for _ in range(requests)]
        seqs = [1 + index % requests for index in range(len(asked))]
        got = list(pool.map(lambda one, seq: sampled(*one, seq, samples), asked, seqs))
        assert [len(sequences) for sequences in got] == [samples] * len(asked)
        assert all(len(tokens) == 2 for sequences in got for tokens in sequences)
        for other in range(1, tenants):
            assert got[other * requests : (other + 1) * requests] == got[:requests], "the same seeds"
        assert sampled(raws[0], samplers[0], requests + 1, 4) == alone
        for raw, session in zip(raws, sessions, strict=True):
            raw.post(f"sessions/{session}/finish", reason={"type": "success"})


def test_what_comes_twice_and_out_of_order_from_many_threads_is_done_once_in_order(live: Live) -> None:
    raw = Raw(live.url, live.key("throng"))
    with nothing_kept(live), ThreadPoolExecutor(THREADS) as pool:
        session = raw.session()
        expected = trained(pool, raw, raw.model(session, 0), range(1, 2 * STEPS + 1))
        shuffled = [*range(1, 2 * STEPS + 1)] * 3
        random.Random(7).shuffle(shuffled)
        model = raw.model(session, 1)
        assert trained(pool, raw, model, shuffled) == expected
        made = raw.ok("save_weights", model_id=model, seq_id=2 * STEPS + 1, path="end")
        raw.result(made["request_id"])
        found = live.service.checkpoints.resolve("throng", f"tinker://{model}/weights/end")
        assert found.version.step == STEPS
        raw.post(f"sessions/{session}/finish", reason={"type": "success"})


def trained(pool: ThreadPoolExecutor, raw: Raw, model: str, order: Iterable[int]) -> list[Any]:
    """Send passes (odd numbers) and steps (even ones) in an order, all at once; gives results by number."""

    def send(seq: int) -> tuple[int, str]:
        answer = raw.forward_backward(model, seq) if seq % 2 else raw.step(model, seq)
        assert answer.status_code == 200, answer.text
        return seq, answer.json()["request_id"]

    promises = sorted(set(pool.map(send, order)))
    assert len(promises) == 2 * STEPS, "a repetition has the promise of the first"
    return [raw.result(promise) for _, promise in promises]
