"""What is left when the server is killed: everything that was saved, and a word of where to go on from."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.programs import Program
from tests.servers import free_port
from tests.service.processes import command, serve
from tests.service.raw import Raw
from tests.service.test_training_sdk import loss

pytestmark = pytest.mark.processes


@dataclass
class Server:
    """A server of its own process."""

    url: str
    key: str
    process: Program

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)


@contextmanager
def served(home: Path, port: int, key: str = "", *settings: str) -> Iterator[Server]:
    with serve(home, "models=[{model: tiny}]", f"port={port}", *settings) as server:
        yield Server(server.url, server.said["key"] or key, server.process)


def test_a_killed_server_keeps_what_was_saved_and_says_where_to_go_on_from(tmp_path: Path) -> None:
    home, port = tmp_path / "home", free_port()
    home.mkdir()
    with served(home, port) as first:
        client = tinker.ServiceClient(base_url=first.url, api_key=first.key)
        training = client.create_lora_training_client("tiny", rank=4, seed=7).result(60)
        for _ in range(3):
            loss(training)
        path = training.save_state("three").result(60).path
        raw = Raw(first.url, first.key)
        done = raw.ok("optim_step", model_id=training.model_id, seq_id=8, adam_params={"learning_rate": 0.0})
        result = raw.result(done["request_id"])
        time.sleep(1)  # results are written behind
        early = raw.step(training.model_id, 10).json()["request_id"]  # waits for number 9
        first.kill()
    with served(home, port, first.key) as second:
        again = Raw(second.url, first.key)
        runs = json.loads(command(home, "runs", "--json").stdout)["runs"]
        assert [(run["status"], run["error"]) for run in runs] == [("failed", "the server ended")]
        assert again.result(done["request_id"]) == result
        lost = again.result(early)
        assert lost["category"] == "user"
        assert "the server was restarted" in lost["error"]
        assert path in lost["error"]
        with pytest.raises(tinker.RequestFailedError, match=path) as failed:
            training.optim_step(types.AdamParams()).result(60)
        assert failed.value.category == "user"
        resumed = client.create_training_client_from_state_with_optimizer(path).result(60)
        fresh = tinker.ServiceClient(base_url=second.url, api_key=second.key)
        other = fresh.create_training_client_from_state_with_optimizer(path).result(60)
        assert [loss(resumed) for _ in range(2)] == [loss(other) for _ in range(2)]
        run = (
            tinker.RestClient(base_url=second.url, api_key=second.key)
            .get_training_run(training.model_id)
            .result(60)
        )
        assert run.last_checkpoint is not None
        assert run.last_checkpoint.tinker_path == path


def test_the_server_makes_checkpoints_by_itself_and_keeps_the_last_two(tmp_path: Path) -> None:
    home, port = tmp_path / "home", free_port()
    home.mkdir()
    with served(home, port, "", "auto_checkpoint_steps=2") as first:
        client = tinker.ServiceClient(base_url=first.url, api_key=first.key)
        training = client.create_lora_training_client("tiny", rank=4, seed=7).result(60)
        losses = [loss(training) for _ in range(7)]
        rest = tinker.RestClient(base_url=first.url, api_key=first.key)
        deadline = time.monotonic() + 20
        while True:
            found = rest.list_checkpoints(training.model_id).result(60).checkpoints
            names = [one.checkpoint_id for one in found]
            if names == ["weights/auto-000006", "weights/auto-000004"]:
                break
            assert time.monotonic() < deadline, names
            time.sleep(0.1)
        first.kill()
    with served(home, port, first.key) as second:
        fresh = tinker.ServiceClient(base_url=second.url, api_key=first.key)
        with pytest.raises(tinker.RequestFailedError, match="auto-000006"):
            training.optim_step(types.AdamParams()).result(60)
        path = f"tinker://{training.model_id}/weights/auto-000006"
        resumed = fresh.create_training_client_from_state_with_optimizer(path).result(60)
        assert loss(resumed) == losses[6]
