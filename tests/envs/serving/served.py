"""`opentinker env serve` as a process, and what tests ask it."""

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import httpx

from tests.envs.serving.environments import KEYS
from tests.programs import ROOT
from tests.waiting import PATIENCE_S, wait_until


@dataclass
class Served:
    """A server that takes sessions."""

    process: "subprocess.Popen[str]"
    url: str
    shards: list[int]
    """Process ids, as they were at the start."""
    log: Path

    def http(self, key: str | None = None) -> httpx.Client:
        """A client by hand."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # reading the certificates that an http:// server has not takes long
        tls = self.url.startswith("https")
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S, verify=tls)

    def metric(self, name: str) -> float:
        """The value of a metric; 0 where it is not there yet."""
        with urlopen(f"{self.url}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
        found = re.search(rf"^{re.escape(f'opentinker_env_{name}')} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def until(self, name: str, value: float) -> None:
        """Wait until a metric has a value."""
        wait_until(lambda: self.metric(name) == value, f"{name} = {value}")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; gives the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@contextmanager
def serving(
    log: Path, *arguments: str, keys: Sequence[str] = (), port: int = 0, ends_with: int | None = 0
) -> Iterator[Served]:
    """A server, until the end of the block.

    Args:
        log: where its stderr goes.
        arguments: ids and options.
        ends_with: the exit code it must have; None: it was killed.
    """
    command = [sys.executable, "-m", "flows.cli", "env", "serve", *arguments, "--port", str(port), "--json"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(KEYS)}
    with (
        log.open("a") as stderr,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables | {"OPENTINKER_ENV_KEYS": " ".join(keys)},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said, log.read_text()
            yield Served(process, **json.loads(said), log=log)
        finally:
            if process.poll() is None:
                process.terminate()
            try:
                code = process.wait(PATIENCE_S)
            finally:
                process.kill()
        assert ends_with is None or code == ends_with, log.read_text()


class ByHand:
    """A session by bare requests: for clients that repeat themselves, or count wrongly."""

    def __init__(self, http: httpx.Client, id: str, **args: Any) -> None:
        self.http, self.making = http, {"id": id, "args": args}
        self.path = f"/v1/sessions/{uuid.uuid4().hex}"

    def open(self, seed: int = 1) -> httpx.Response:
        return self.http.put(self.path, json={**self.making, "seed": seed})

    def call(self, number: int, do: str = "step", **fields: Any) -> httpx.Response:
        fields = {"text": "go"} if do == "step" and not fields else fields
        return self.http.post(f"{self.path}/calls", json={"call": {"number": number, "do": do, **fields}})

    def close(self) -> httpx.Response:
        return self.http.delete(self.path)


def refused(answer: httpx.Response, status: int, code: str, *parts: str) -> None:
    """An error of ours, with a message and nothing of our insides."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code, error
    assert "Traceback" not in answer.text
    for part in parts:
        assert part in answer.text, answer.text
