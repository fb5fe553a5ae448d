"""How sessions end that nobody closes: expired leases, killed and wedged shards, servers that stop."""

import contextlib
import gc
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from envs.protocol import Action
from envs.registry import make
from envs.serving.errors import SessionLostError
from tests.envs.serving.environments import CANARY, OBEDIENT
from tests.envs.serving.served import ByHand, Served, refused, serving
from tests.servers import free_port
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.processes

LONG = ("--lease-s", "3600")
"""Nothing ends here but what a test ends."""
SHORT_CALLS = ("--call-s", "4")
"""Longer than any call that does not hang, on a busy machine as well."""


def remote(server: Served, notes: Path | None = None, **args: Any) -> Any:
    args = args | ({"notes": str(notes)} if notes else {})
    return make("remote", url=server.url, id=OBEDIENT, args=args)


def ends(notes: Path) -> dict[str, int]:
    """How often each instance that was reset has been closed."""
    lines = [line.split() for line in notes.read_text().splitlines()]
    closed = Counter(name for what, name in lines if what == "close")
    return {name: closed[name] for what, name in lines if what == "reset"}


def lost(environment: Any, order: str = "go") -> str:
    """Take a step that must fail with the session; gives why."""
    with pytest.raises(SessionLostError) as error:
        environment.step(Action(order))
    return error.value.reason


def pid_of(environment: Any) -> int:
    return int(environment.step(Action("go")).info["pid"])


@contextmanager
def half_open(server: Served, id: str, **args: Any) -> Iterator[ByHand]:
    """A client that opens a session and is not heard of again; its connection stays open."""
    parts = urlsplit(server.url)
    with server.http() as http, socket.create_connection((parts.hostname, parts.port)) as connection:
        session = ByHand(http, id, **args)
        body = json.dumps({**session.making, "seed": 1}).encode()
        head = f"PUT {session.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
        yield session


def test_a_half_open_client_loses_its_lease_and_its_environment_is_closed_once(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    expired = 'sessions_ended_total{reason="lease_expired"}'
    with serving(tmp_path / "log", OBEDIENT, "--lease-s", "0.5") as server:
        with half_open(server, OBEDIENT, notes=str(notes)) as session:
            server.until(expired, 1)
            server.until("closing", 0)
            assert list(ends(notes).values()) == [1]
            refused(session.call(1), 410, "session_lost", '"reason": "lease_expired"')
            assert session.close().status_code == 204
        assert server.metric("sessions") == 0
        assert server.metric(expired) == 1
    assert list(ends(notes).values()) == [1]


def test_a_client_that_is_there_keeps_its_lease_without_any_step(tmp_path: Path) -> None:
    with serving(tmp_path / "log", OBEDIENT, "--lease-s", "3") as server:
        mine = remote(server)
        mine.reset(1)
        for others in (1, 2):  # two leases, one after the other
            with half_open(server, OBEDIENT):
                server.until('sessions_ended_total{reason="lease_expired"}', others)
        assert mine.step(Action("go")).observation.text == "step 1"
        mine.close()


def test_an_environment_that_is_dropped_is_closed(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with serving(tmp_path / "log", OBEDIENT, "--lease-s", "4") as server:
        dropped, kept = remote(server, notes), remote(server)
        dropped.reset(1)
        kept.reset(1)
        del dropped
        gc.collect()
        server.until('sessions_ended_total{reason="closed"}', 1)
        server.until("closing", 0)
        assert list(ends(notes).values()) == [1]
        assert kept.step(Action("go")).observation.text == "step 1"
        kept.close()


def test_a_lease_does_not_run_out_while_a_call_runs(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    options = ("--lease-s", "0.5", "--shards", "2")
    with (
        serving(tmp_path / "log", OBEDIENT, *options) as server,
        ThreadPoolExecutor() as threads,
        server.http() as http,
    ):
        slow = ByHand(http, OBEDIENT)
        slow.open()
        answer = threads.submit(slow.call, 1, text=f"wait_for {gate}")
        for others in (1, 2):
            with half_open(server, OBEDIENT):
                server.until('sessions_ended_total{reason="lease_expired"}', others)
        gate.touch()
        assert answer.result(PATIENCE_S).json()["observation"] == [["user", "step 1"]]


def test_a_killed_shard_takes_only_its_own_sessions_and_is_replaced(tmp_path: Path) -> None:
    with serving(tmp_path / "log", OBEDIENT, *LONG) as server:
        environments = [remote(server) for _ in range(6)]
        for seed, environment in enumerate(environments):
            environment.reset(seed)
        pids = [pid_of(environment) for environment in environments]
        assert Counter(pids) == dict.fromkeys(server.shards, 3)
        os.kill(server.shards[0], signal.SIGKILL)
        server.until("sessions", 3)
        for environment, pid in zip(environments, pids, strict=True):
            if pid == server.shards[0]:
                assert lost(environment) == "shard_ended"
            else:
                assert environment.step(Action("go")).observation.text == "step 2"
        server.until("shards", 2)
        for environment in environments:
            environment.reset(7)
        found = Counter(pid_of(environment) for environment in environments)
        assert sorted(found.values()) == [3, 3]
        assert server.shards[0] not in found
        assert server.metric("shard_restarts_total") == 1
        for environment in environments:
            environment.close()


@pytest.mark.parametrize("order", ["die", "sleep", "spin"])
def test_a_call_that_ends_or_wedges_its_shard_fails_by_its_reason(tmp_path: Path, order: str) -> None:
    with serving(tmp_path / "log", OBEDIENT, *LONG, *SHORT_CALLS) as server:
        environments = [remote(server) for _ in range(4)]
        for environment in environments:
            environment.reset(1)
        pids = [pid_of(environment) for environment in environments]
        assert lost(environments[0], order) == ("shard_ended" if order == "die" else "call_timed_out")
        neighbours = [one for one, pid in zip(environments, pids, strict=True) if pid == pids[0]]
        others = [one for one, pid in zip(environments, pids, strict=True) if pid != pids[0]]
        assert [len(neighbours), len(others)] == [2, 2]
        assert lost(neighbours[1]) == "shard_ended"
        assert [one.step(Action("go")).observation.text for one in others] == ["step 2", "step 2"]
        server.until("shards", 2)
        assert not psutil.pid_exists(pids[0])
        environments[0].reset(2)
        assert environments[0].step(Action("go")).observation.text == "step 1"
        for environment in environments:
            environment.close()


def test_a_session_whose_shard_ends_at_its_opening_is_opened_once_more(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with serving(tmp_path / "log", OBEDIENT, *LONG) as server:
        with pytest.raises(SessionLostError) as error:
            remote(server, notes, on_reset="die").reset(1)
        assert error.value.reason == "shard_ended"
        assert list(ends(notes).values()) == [0, 0], "there was nothing left to close"
        server.until("shards", 2)


def test_an_environment_that_wedges_in_reset_or_close_costs_its_shard_and_no_more(tmp_path: Path) -> None:
    with serving(tmp_path / "log", OBEDIENT, *LONG, *SHORT_CALLS, "--shards", "1") as server:
        with server.http() as http:
            wedged = ByHand(http, OBEDIENT, on_reset="hold")
            refused(wedged.open(), 410, "session_lost", '"reason": "call_timed_out"')
            server.until("shards", 1)
            wedging = ByHand(http, OBEDIENT, on_close="sleep")
            assert wedging.open().status_code == 200
            assert wedging.close().status_code == 204
            server.until("shard_restarts_total", 2)
            server.until("shards", 1)
            assert http.get("/healthz").json() == {"status": "ok", "shards": 1}
        again = remote(server)
        again.reset(1)
        again.close()


def test_a_server_that_is_told_to_stop_closes_every_environment_once(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with serving(tmp_path / "log", OBEDIENT, *LONG) as server:
        environments = [remote(server, notes) for _ in range(5)]
        for environment in environments:
            environment.reset(1)
        environments[0].close()
        assert server.end() == 0
    assert list(ends(notes).values()) == [1] * 5
    assert not any(map(psutil.pid_exists, server.shards))


def test_a_wedged_shard_does_not_keep_a_server_from_stopping(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with serving(tmp_path / "log", OBEDIENT, *LONG) as server, server.http() as http:
        wedged = ByHand(http, OBEDIENT, notes=str(notes))
        wedged.open()
        pids = server.shards
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(wedged.call, 1, text="hold")
            wait_until(lambda: "hold" in notes.read_text(), "the call that wedges")
            assert server.end(signal.SIGINT) == 0
            assert isinstance(answer.exception(PATIENCE_S), httpx.TransportError | None)
    assert not any(map(psutil.pid_exists, pids))


def test_shards_end_with_a_server_that_is_killed_even_wedged_ones(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with serving(tmp_path / "log", OBEDIENT, *LONG, ends_with=None) as server, server.http() as http:
        wedged = ByHand(http, OBEDIENT, notes=str(notes))
        wedged.open()
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(wedged.call, 1, text="hold")
            wait_until(lambda: "hold" in notes.read_text(), "the call that wedges")
            server.end(signal.SIGKILL)
            assert isinstance(answer.exception(PATIENCE_S), httpx.TransportError)
        wait_until(lambda: not any(map(psutil.pid_exists, server.shards)), "the end of the shards")


def test_a_server_that_starts_again_knows_no_session_and_takes_new_ones(tmp_path: Path) -> None:
    port = free_port()
    with serving(tmp_path / "log", OBEDIENT, *LONG, port=port, ends_with=None) as first:
        environment = remote(first)
        environment.reset(1)
        first.end(signal.SIGKILL)
    with serving(tmp_path / "log", OBEDIENT, *LONG, port=port):
        assert lost(environment) == "unknown"
        environment.reset(1)
        assert environment.step(Action("go")).observation.text == "step 1"
        environment.close()


def test_connections_without_a_whole_request_are_closed(tmp_path: Path) -> None:
    sent = (b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    with serving(tmp_path / "log", CANARY, "--idle-s", "2") as server, contextlib.ExitStack() as open_ones:
        parts = urlsplit(server.url)
        address = (parts.hostname, parts.port)
        connections = [socket.create_connection(address, timeout=PATIENCE_S) for _ in sent]
        for connection, said in zip(connections, sent, strict=True):
            open_ones.enter_context(connection)
            connection.sendall(said)
        heard = [b"".join(iter(lambda own=one: own.recv(1 << 16), b"")) for one in connections]
        assert [answer[:12] for answer in heard] == [b"", b"", b"HTTP/1.1 200"]
