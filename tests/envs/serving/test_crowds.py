"""Many sessions: one after the other without growth, and at the same time without a leak between them."""

import json
import socket
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from envs.draws import stable_hash
from envs.protocol import Action
from envs.registry import make
from envs.serving.errors import SessionLostError
from tests.envs.serving.environments import CANARY
from tests.envs.serving.served import Served, serving
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.processes

PATIENT = 100
"""Retries of clients that wait for shards to start, on a busy machine as well."""
ROUND = 100
LOST = 410
"""On a machine that is busy enough, leases run out before the first step."""
GROWTH_BYTES = 6 << 20
"""A thousand bytes that stay of each session would be more."""


class Pipeline:
    """A connection over which many requests go before the first answer is read: it costs little."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._answers = connection.makefile("rb")

    def ask(self, requests: Sequence[tuple[str, str, Any]], *accepted: int) -> None:
        """Send requests of method, path and body; every answer must have one of these statuses."""
        sent = bytearray()
        for method, path, body in requests:
            content = b"" if body is None else json.dumps(body).encode()
            sent += f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
            sent += content
        self._connection.sendall(sent)
        for _ in requests:
            head = self._answers.readline()
            assert int(head.split()[1]) in accepted, head
            length = 0
            while (line := self._answers.readline()) != b"\r\n":
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            self._answers.read(length)

    def close(self) -> None:
        self._answers.close()


@contextmanager
def pipeline(server: Served) -> Iterator[Pipeline]:
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S) as connection:
        line = Pipeline(connection)
        yield line
        line.close()


def come_and_go(line: Pipeline, rounds: int) -> None:
    """Rounds of sessions, of which most are closed, some are left, and some never take a step."""
    for number in range(rounds):
        names = [uuid.uuid4().hex for _ in range(ROUND)]
        opening = {"id": CANARY, "seed": number}
        step = {"call": {"number": 1, "do": "step", "text": "hello"}}
        line.ask([("PUT", f"/v1/sessions/{name}", opening) for name in names], 200)
        line.ask([("POST", f"/v1/sessions/{name}/calls", step) for name in names[10:]], 200, LOST)
        line.ask([("DELETE", f"/v1/sessions/{name}", None) for name in names[:50]], 204)
        line.ask([("POST", "/v1/leases", {"renew": names[90:], "close": names[50:80]})], 200)


def test_ten_thousand_sessions_come_and_go_without_growth(tmp_path: Path) -> None:
    with serving(tmp_path / "log", CANARY, "--lease-s", "2", "--shards", "2") as server:
        processes = [psutil.Process(pid) for pid in (server.process.pid, *server.shards)]

        def after(rounds: int) -> list[tuple[int, int, int]]:
            """Memory, descriptors and threads of each process, when all sessions have gone."""
            with pipeline(server) as line:
                come_and_go(line, rounds)
            server.until("sessions", 0)
            server.until("closing", 0)
            return [(one.memory_info().rss, one.num_fds(), one.num_threads()) for one in processes]

        before, now = after(20), after(100)
        for (rss, descriptors, threads), (rss_now, descriptors_now, threads_now) in zip(
            before, now, strict=True
        ):
            assert rss_now - rss < GROWTH_BYTES
            assert descriptors_now <= descriptors + 4, "more than connections that have just been closed"
            assert threads_now == threads
        assert server.metric("sessions_opened_total") == 12_000
        closed = server.metric('sessions_ended_total{reason="closed"}')
        expired = server.metric('sessions_ended_total{reason="lease_expired"}')
        assert closed + expired == 12_000
        assert expired >= 2_400
        assert server.metric("sessions_remembered") == 1024
        times = [one.cpu_times() for one in processes]
        print("RSS, fds, threads:", before, now, "CPU s:", [one.user + one.system for one in times])


def episode(server: Served, seed: int, turns: int) -> None:
    """Play one with words of its own; what it is shown must be its own, and all of it."""
    args = {"turns": turns}
    environment: Any = make("remote", url=server.url, id=CANARY, args=args, retries=PATIENT)
    said: list[str] = []
    try:
        assert environment.reset(seed).text == f"canary-{seed}"
        for turn in range(turns):
            said.append(f"word-{seed}-{turn}-{stable_hash(seed, turn)}")
            result = environment.step(Action(said[-1]))
            assert result.observation.text == f"canary-{seed}: {' '.join(said)}"
            assert result.done == (turn == turns - 1)
    finally:
        environment.close()


def test_64_concurrent_episodes_keep_their_secrets(tmp_path: Path) -> None:
    with serving(tmp_path / "log", CANARY) as server, ThreadPoolExecutor(64) as threads:
        list(threads.map(lambda seed: episode(server, seed, 8), range(192)))
        server.until("sessions", 0)
        assert server.metric("sessions_opened_total") == 192


def test_shards_that_are_killed_all_the_time_fail_episodes_and_mix_none_up(tmp_path: Path) -> None:
    """An episode is right to its end, or fails with a typed error; nothing is left of either."""
    with serving(tmp_path / "log", CANARY, "--lease-s", "3600") as server:

        def outcome(seed: int) -> str:
            try:
                episode(server, seed, 12)
            except SessionLostError as lost:
                return lost.reason
            return "right"

        server_process = psutil.Process(server.process.pid)
        with ThreadPoolExecutor(32) as threads:
            played = [threads.submit(outcome, seed) for seed in range(160)]
            for ended in (20, 60, 100):
                wait_until(
                    lambda ended=ended: sum(one.done() for one in played) >= ended, f"{ended} episodes"
                )
                for shard in server_process.children():
                    shard.kill()
            outcomes = Counter(one.result() for one in played)
        assert set(outcomes) <= {"right", "shard_ended"}
        assert outcomes["right"] >= 40
        server.until("sessions", 0)
        server.until("closing", 0)
        server.until("shards", 2)
        episode(server, 1, 2)
