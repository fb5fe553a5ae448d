"""SIGTERM: no new work, what runs is finished and fetched, then exit code 0; and all of that in time."""

import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
import tinker

from tests.servers import free_port
from tests.service.processes import Server, serve
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.processes

NEW_SESSION = {"type": "create_session", "tags": [], "user_metadata": None, "sdk_version": "0.38.0"}


def _begin_sampling(server: Server, number: int, tokens: int) -> list[dict[str, str]]:
    """Submit samples that take a while, by plain HTTP, so that each poll is seen."""
    headers = {"X-API-Key": server.said["key"]}
    with httpx.Client(base_url=f"{server.url}/api/v1", headers=headers, timeout=60) as http:
        session = http.post("/create_session", json=NEW_SESSION).json()["session_id"]
        wanted = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = http.post("/create_sampling_session", json=wanted).json()
        return [
            http.post(
                "/asample",
                json={
                    "sampling_session_id": sampler["sampling_session_id"],
                    "seq_id": seq,
                    "num_samples": 16,
                    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
                    "sampling_params": {"max_tokens": tokens, "stop": [], "seed": seq},
                },
            ).json()
            for seq in range(number)
        ]


def _wait_until_stopping(server: Server) -> None:
    deadline = time.monotonic() + 30
    while httpx.get(f"{server.url}/readyz").status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _wait_until_busy(server: Server, operations: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        waiting = [float(line.split()[-1]) for line in lines if line.startswith("opentinker_queue_depth{")]
        if sum(waiting) >= operations:
            return
        assert time.monotonic() < deadline, waiting
        time.sleep(0.05)


def _given_up(server: Server) -> int:
    """What the server says that it did not finish."""
    said = next(line for line in server.lines() if line["message"] == "stopping: drained")
    return int(said["given_up"])


def test_what_runs_is_finished_and_fetched_and_nothing_new_is_begun(tmp_path: Path) -> None:
    with serve(tmp_path, "models=tiny", f"port={free_port()}", "drain_timeout_s=120") as server:
        begun = _begin_sampling(server, number=8, tokens=100)
        headers = {"X-API-Key": server.said["key"]}
        results: dict[str, httpx.Response] = {}

        def fetch(request_id: str) -> None:
            with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http:
                answer = None
                while answer is None or answer.content.startswith(b"{"):
                    body = {"request_id": request_id, "allow_metadata_only": False}
                    answer = http.post("/api/v1/retrieve_future", json=body)
                    if answer.status_code != 200:
                        break
                results[request_id] = answer

        threads = [threading.Thread(target=fetch, args=(one["request_id"],)) for one in begun]
        for thread in threads:
            thread.start()
        server.process.send_signal(signal.SIGTERM)
        _wait_until_stopping(server)
        assert httpx.get(f"{server.url}/livez").status_code == 200
        new = httpx.post(f"{server.url}/api/v1/create_session", headers=headers, json=NEW_SESSION)
        assert (new.status_code, new.json()["category"]) == (503, "server")
        assert float(new.headers["retry-after"]) >= 1
        assert server.process.wait(PATIENCE_S) == 0
        for thread in threads:
            thread.join(PATIENCE_S)
        assert {answer.status_code for answer in results.values()} == {200}
        assert {answer.headers["content-type"] for answer in results.values()} == {"application/x-protobuf"}
        assert len(results) == 8
        assert _given_up(server) == 0


def test_work_that_does_not_end_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    with serve(tmp_path, "models=tiny", f"port={free_port()}", "drain_timeout_s=1") as server:
        training = server.client().create_lora_training_client(base_model="tiny", rank=4).result()
        stuck = {"model_id": training.model_id, "seq_id": 5, "type": "optim_step", "adam_params": {}}
        headers = {"X-API-Key": server.said["key"]}
        waiting = httpx.post(f"{server.url}/api/v1/optim_step", headers=headers, json=stuck)
        assert waiting.status_code == 200
        assert server.end(within=PATIENCE_S) == 0
        assert _given_up(server) >= 1


def test_long_work_does_not_hold_the_process_beyond_the_deadline(tmp_path: Path) -> None:
    with serve(tmp_path, "models=tiny", f"port={free_port()}", "drain_timeout_s=0.5") as server:
        _begin_sampling(server, number=200, tokens=100)
        assert server.end(within=PATIENCE_S) == 0
        assert _given_up(server) > 1


def test_a_long_queue_of_training_does_not_hold_it_either(tmp_path: Path) -> None:
    with serve(tmp_path, "models=tiny", f"port={free_port()}", "drain_timeout_s=0.5") as server:
        training = server.client().create_lora_training_client(base_model="tiny", rank=4).result()
        tokens = [1 + index % 50 for index in range(120)]
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 119},
        )
        for _ in range(60):
            training.forward_backward([datum] * 100, "cross_entropy")
        _wait_until_busy(server, 40)
        assert server.end(within=PATIENCE_S) == 0
        assert _given_up(server) > 1


def test_a_second_signal_ends_the_wait(tmp_path: Path) -> None:
    with serve(tmp_path, "models=tiny", f"port={free_port()}", "drain_timeout_s=3000") as server:
        training = server.client().create_lora_training_client(base_model="tiny", rank=4).result()
        stuck = {"model_id": training.model_id, "seq_id": 5, "type": "optim_step", "adam_params": {}}
        headers = {"X-API-Key": server.said["key"]}
        httpx.post(f"{server.url}/api/v1/optim_step", headers=headers, json=stuck).raise_for_status()
        server.process.send_signal(signal.SIGINT)
        _wait_until_stopping(server)
        assert server.end(signal.SIGINT, within=PATIENCE_S) == 0


def test_an_idle_server_stops_at_once_although_clients_are_connected(tmp_path: Path) -> None:
    arguments = ("models=tiny", f"port={free_port()}", "drain_timeout_s=3000")
    with serve(tmp_path, *arguments) as server, httpx.Client() as http:
        http.get(f"{server.url}/livez")
        server.client()
        assert server.end(within=PATIENCE_S) == 0
