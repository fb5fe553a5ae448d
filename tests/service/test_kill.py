"""Kills amid saves, passes and sampling: what was answered is there, and nothing half done is seen."""

import threading
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from opentinker_core.config.settings import Settings
from opentinker_core.service.keys import Keys
from opentinker_core.service.principal import Role
from tests.servers import free_port
from tests.service.raw import Raw
from tests.service.test_restart import served
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.processes


def test_a_kill_during_saves_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    home, port = tmp_path / "home", free_port()
    home.mkdir()
    answered: list[str] = []
    with served(home, port) as first:
        raw = Raw(first.url, first.key)
        model = raw.model()
        enough = threading.Event()

        def save_always() -> None:
            seq = 1
            try:
                while True:
                    raw.forward_backward(model, seq)
                    raw.step(model, seq + 1)
                    made = raw.ok("save_weights", model_id=model, seq_id=seq + 2, path=f"at-{seq}")
                    answered.append(raw.result(made["request_id"])["path"])
                    seq += 3
                    if len(answered) == 3:
                        enough.set()
            except httpx.TransportError:
                return

        saving = threading.Thread(target=save_always)
        saving.start()
        assert enough.wait(60)
        first.kill()
        saving.join(60)
    with served(home, port, first.key) as second:
        raw = Raw(second.url, first.key)
        found = raw.http.get(f"/training_runs/{model}/checkpoints").json()["checkpoints"]
        paths = {one["tinker_path"] for one in found}
        assert set(answered) <= paths
        session = raw.session()
        for number, path in enumerate(sorted(paths)):
            body = {"session_id": session, "model_seq_id": number, "optimizer": True}
            made = raw.ok("load_weights", path=path, **body)
            assert raw.result(made["request_id"]).get("path") == path
        lost = raw.result(raw.step(model, 1000).json()["request_id"])
        assert any(path in lost["error"] for path in paths)
        assert not list((home / "serve" / "saving").iterdir()), "half-written states are removed"


def test_a_kill_during_a_pass_and_during_sampling_settles_both(tmp_path: Path) -> None:
    home, port = tmp_path / "home", free_port()
    home.mkdir()
    with served(home, port) as first:
        raw, beside = Raw(first.url, first.key), Raw(first.url, key_of(home, "beside"))
        model = raw.model()
        kept = raw.result(raw.ok("save_weights", model_id=model, seq_id=1, path="kept")["request_id"])["path"]
        body = {"session_id": beside.session(), "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = str(beside.ok("create_sampling_session", **body)["sampling_session_id"])
        expected = beside.samples(beside.ok("asample", **sample(sampler, 1, 8))["request_id"])

        def train_always() -> None:
            tokens = tuple(3 + index % 50 for index in range(400))
            own = Raw(first.url, first.key)
            try:
                for seq in count(2):
                    own.forward_backward(model, seq, tokens)
                    if seq > 8:  # it goes on ahead of the results, but not for ever
                        own.result(f"{model}:{seq - 6}", PATIENCE_S)
            except httpx.TransportError:
                return

        def sample_always() -> None:
            own = Raw(first.url, beside.http.headers["X-API-Key"])
            try:
                for seq in count(2):
                    promise = own.ok("asample", **sample(sampler, seq, 400, samples=64))["request_id"]
                    own.samples(promise, PATIENCE_S)
            except httpx.TransportError:
                return

        threads = [threading.Thread(target=work) for work in (train_always, sample_always)]
        for thread in threads:
            thread.start()
        wait_until(lambda: running(first.url) >= {"sample", "forward_backward"}, "both at once", 0.0)
        first.kill()
        for thread in threads:
            thread.join(60)
    with served(home, port, first.key) as second:
        raw, beside = Raw(second.url, first.key), Raw(second.url, beside.http.headers["X-API-Key"])
        lost = raw.result(f"{model}:100000")
        assert (lost["category"], kept in lost["error"]) == ("user", True)
        gone = beside.retrieve(f"{sampler}:2")
        assert (gone.status_code, "ask for it again" in gone.json()["detail"]) == (410, True)
        again = beside.ok("asample", **sample(sampler, 1, 8))
        assert beside.samples(again["request_id"]) == expected, "the sampler is what it was"
        free = beside.ok("asample", **sample(sampler, 2, 8))
        assert len(beside.samples(free["request_id"])) == 1, "a number that was lost can be used again"
        wait_until(lambda: not running(second.url), "an idle engine")


def key_of(home: Path, tenant: str) -> str:
    """A new key of a tenant."""
    with closing(Keys(Settings(home=home).resolved_catalog_url)) as keys:
        return keys.create(tenant, "test", Role.MEMBER)[0]


def sample(sampler: str, seq: int, tokens: int, samples: int = 1) -> dict[str, Any]:
    """The body of a request for samples."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5]}]}
    params = {"max_tokens": tokens, "stop": [], "seed": 1}
    request = {"sampling_session_id": sampler, "seq_id": seq, "num_samples": samples}
    return {**request, "prompt": prompt, "sampling_params": params}


def running(url: str) -> set[str]:
    """The kinds of operations that an engine runs right now."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    counts = [line.rpartition(" ") for line in lines if line.startswith("opentinker_operations_running{")]
    return {labels.partition('kind="')[2].partition('"')[0] for labels, _, count in counts if float(count)}
