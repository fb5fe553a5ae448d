"""Calls: asked again, out of order, wrong, too large; by whom."""

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from envs.protocol import Action
from envs.registry import make
from envs.serving.errors import (
    EnvironmentRaisedError,
    EnvironmentValueError,
    RefusedError,
    SessionLostError,
    UnreachableError,
)
from tests.envs.serving.environments import CANARY, OBEDIENT
from tests.envs.serving.served import ByHand, Served, refused, serving
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.processes

FIRST, SECOND = "first-key-of-this-test", "second-key-of-this-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("served") / "log"
    with serving(log, CANARY, OBEDIENT, "--max-body-bytes", "50000", keys=[FIRST, SECOND]) as served:
        yield served


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with server.http(FIRST) as client:
        yield client


@contextmanager
def session(http: httpx.Client, id: str = OBEDIENT, **args: Any) -> Iterator[ByHand]:
    made = ByHand(http, id, **args)
    assert made.open().status_code == 200
    yield made
    made.close()


def remote(server: Served, monkeypatch: pytest.MonkeyPatch, id: str = OBEDIENT, **options: Any) -> Any:
    monkeypatch.setenv("OPENTINKER_ENV_KEY", FIRST)
    return make("remote", url=options.pop("url", server.url), id=id, **options)


def _shown(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["observation"][0][1])


def test_a_call_that_is_repeated_is_answered_again_and_not_taken_again(http: httpx.Client) -> None:
    with session(http) as one:
        assert _shown(one.call(1)) == "step 1"
        assert _shown(one.call(1)) == "step 1"
        assert _shown(one.call(2)) == "step 2"


def test_a_number_out_of_order_is_refused_and_changes_nothing(http: httpx.Client) -> None:
    with session(http) as one:
        refused(one.call(2), 409, "out_of_order", "the last call was 0")
        one.call(1)
        refused(one.call(1, text="something else"), 409, "out_of_order", "was another call")
        refused(one.call(3), 409, "out_of_order", "the last call was 1")
        one.call(2)
        refused(one.call(1), 409, "out_of_order")
        refused(one.open(), 409, "out_of_order")
        assert _shown(one.call(3)) == "step 3"


def test_a_call_that_is_repeated_while_it_runs_is_taken_once(http: httpx.Client, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with session(http) as one, ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(one.call, 1, text=f"wait_for {gate}") for _ in range(4)]
        while (
            one.call(2).json()["error"]["message"]
            != "number: 2 is not accepted; the last call was 1, which still runs"
        ):
            pass
        gate.touch()
        assert {_shown(one.result(PATIENCE_S)) for one in asked} == {"step 1"}
        assert _shown(one.call(2)) == "step 2"


def test_an_opening_that_is_repeated_makes_one_environment(http: httpx.Client, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with session(http, notes=str(notes)) as one:
        assert one.open().json() == one.open().json()
        refused(one.open(seed=2), 409, "out_of_order")
    assert notes.read_text().count("reset") == 1


@contextmanager
def losing_answers(url: str, lost: set[int]) -> Iterator[str]:
    """A way to a server on which answers, by their number from 0, get lost after they were given."""
    parts = urlsplit(url)
    count = 0

    def carry(client: socket.socket) -> None:
        nonlocal count
        with client, socket.create_connection((parts.hostname, parts.port)) as server:
            threading.Thread(target=pump, args=(client, server), daemon=True).start()
            with server.makefile("rb") as answers:
                while answer := whole(answers):
                    count += 1
                    if count - 1 in lost:
                        client.shutdown(socket.SHUT_RDWR)
                        return
                    client.sendall(answer)

    def pump(client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := client.recv(1 << 16):
                server.sendall(piece)
            server.shutdown(socket.SHUT_RDWR)

    def whole(answers: Any) -> bytes:
        lines = [answers.readline()]
        while lines[-1].strip():
            lines.append(answers.readline())
        head = b"".join(lines)
        length = re.search(rb"content-length: (\d+)", head.lower())
        return head + answers.read(int(length[1]) if length else 0)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=carry, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def test_lost_answers_are_asked_for_again_and_no_step_is_taken_twice(
    server: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    with losing_answers(server.url, {1, 3, 4, 7}) as url:  # 0 describes
        environment = remote(server, monkeypatch, url=url, args={"notes": str(notes)})
        environment.reset(1)
        steps = [environment.step(Action("go")).observation.text for _ in range(6)]
        assert steps == [f"step {number}" for number in range(1, 7)]
        environment.reset(2)
        assert environment.step(Action("go")).observation.text == "step 1"
        environment.close()
        server.until("closing", 0)
    described, *played = [line.split() for line in notes.read_text().splitlines()]
    assert described[0] == "close"
    assert [what for what, _ in played] == ["reset", "reset", "close"]
    assert len({name for _, name in played}) == 1


def test_a_client_that_gives_up_says_so_and_begins_anew(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with losing_answers(server.url, {2, 3}) as url:
        environment = remote(server, monkeypatch, url=url, retries=1)
        environment.reset(1)
        with pytest.raises(UnreachableError, match="asked 2 times"):
            environment.step(Action("go"))
        with pytest.raises(RuntimeError, match="no episode is running"):
            environment.step(Action("go"))
        environment.reset(2)
        assert environment.step(Action("go")).observation.text == "step 1"
        environment.close()


def test_a_session_is_closed_once_and_remembered(http: httpx.Client, server: Served, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with session(http, notes=str(notes)) as one:
        assert one.close().status_code == 204
        assert one.close().status_code == 204
        refused(one.call(1), 410, "session_lost", '"reason": "closed"')
        server.until("closing", 0)
        assert [line.split()[0] for line in notes.read_text().splitlines()] == ["reset", "close"]
    refused(ByHand(http, OBEDIENT).call(1), 410, "session_lost", '"reason": "unknown"')


def test_keys_see_only_their_own_sessions(http: httpx.Client, server: Served, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with server.http(SECOND) as other, session(http, notes=str(notes)) as mine:
        theirs = ByHand(other, OBEDIENT, notes=str(notes))
        theirs.path = mine.path
        name = mine.path.rsplit("/", 1)[1]
        refused(theirs.call(1), 410, "session_lost", '"reason": "unknown"')
        assert other.post("/v1/leases", json={"renew": [name]}).json() == {"lost": {name: "unknown"}}
        other.post("/v1/leases", json={"close": [name]})
        theirs.close()
        assert theirs.open().status_code == 200, "a name is not taken by another key's session"
        assert _shown(mine.call(1)) == "step 1"
        assert _shown(theirs.call(1)) == "step 1"
        theirs.close()
        assert _shown(mine.call(2)) == "step 2"
        assert http.post("/v1/leases", json={"renew": [name]}).json() == {"lost": {}}


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
@pytest.mark.parametrize("key", [None, "a-key-that-nobody-knows"], ids=["no key", "wrong key"])
def test_nobody_gets_in_without_a_key(server: Served, method: str, key: str | None) -> None:
    path = {"PUT": "/v1/sessions/" + "0" * 32, "POST": "/v1/describe", "DELETE": "/v1/sessions/" + "0" * 32}[
        method
    ]
    with server.http(key) as stranger:
        refused(stranger.request(method, path, content=b"{"), 401, "unauthorized")


def test_keys_are_in_no_log_and_no_environment(
    server: Served, monkeypatch: pytest.MonkeyPatch, http: httpx.Client
) -> None:
    environment = remote(server, monkeypatch)
    environment.reset(1)
    assert environment.step(Action("go")).info["keys"] == []
    environment.close()
    with server.http("a-key-that-nobody-knows") as stranger:
        stranger.post("/v1/describe", json={})
    said = server.log.read_text() + httpx.get(f"{server.url}/metrics").text + repr(vars(environment))
    for key in (FIRST, SECOND, "a-key-that-nobody-knows"):
        assert key not in said


def test_sessions_are_counted_by_key_and_in_all(tmp_path: Path) -> None:
    limits = ("--max-sessions", "6", "--max-sessions-per-key", "4", "--shards", "1")
    with (
        serving(tmp_path / "log", CANARY, *limits, keys=[FIRST, SECOND]) as server,
        server.http(FIRST) as http,
        server.http(SECOND) as other,
    ):
        mine = [ByHand(http, CANARY) for _ in range(5)]
        assert [one.open().status_code for one in mine] == [200, 200, 200, 200, 429]
        theirs = [ByHand(other, CANARY) for _ in range(3)]
        assert [one.open().status_code for one in theirs] == [200, 200, 429]
        refused(theirs[2].open(), 429, "too_many_sessions", "6 sessions are open")
        for one in [*mine, *theirs]:
            one.close()
        server.until("closing", 0)
        assert mine[0].open().status_code == 200
        mine[0].close()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "body: "),
        (b"[]", "body: "),
        (b'{"call": {"number": 1}}', "call: "),
        (b'{"call": {"number": 0, "do": "step", "text": "x"}}', "call.step.number"),
        (b'{"call": {"number": "1", "do": "step", "text": "x"}}', "call.step.number"),
        (b'{"call": {"number": 1, "do": "step", "text": 7}}', "call.step.text"),
        (b'{"call": {"number": 1, "do": "step", "text": "x", "more": 1}}', "call.step.more"),
        (b'{"call": {"number": 1, "do": "__class__"}}', "call: "),
        (b'{"call": {"number": 1, "do": "reset", "seed": -1}}', "call.reset.seed"),
        (b'{"call": {"number": 1, "do": "reset", "seed": 9223372036854775808}}', "call.reset.seed"),
        (
            b'{"call": {"number": 1, "do": "step_together", "actions": {"a": 1}}}',
            "call.step_together.actions.a",
        ),
        (b'{"call": {"number": 1, "do": "step", "text": "\\ud800"}}', "body: "),
        (b"[" * 20000, "body: "),
        (b"\xff", "body: "),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value[:60]),
)
def test_bodies_that_are_not_accepted_are_refused_and_named(
    http: httpx.Client, body: bytes, said: str
) -> None:
    with session(http) as one:
        refused(http.post(f"{one.path}/calls", content=body), 400, "bad_request", said)
        assert _shown(one.call(1)) == "step 1"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/describe", 405),
        ("PUT", "/v1/sessions/abc", 400),
        ("PUT", f"/v1/sessions/{'g' * 32}", 400),
        ("POST", f"/v1/sessions/{'0' * 32}", 405),
    ],
)
def test_paths_that_are_not_there(http: httpx.Client, method: str, path: str, status: int) -> None:
    refused(http.request(method, path, json={}), status, "bad_request")


@pytest.mark.parametrize(
    "content", [b"x" * 60_000, (b"x" * 10_000 for _ in range(6))], ids=["whole", "chunked"]
)
def test_bodies_that_are_too_large_are_refused(http: httpx.Client, content: Any) -> None:
    refused(http.post("/v1/describe", content=content), 413, "too_large", "50000 bytes")


def test_what_is_not_served_cannot_be_made(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for id in ("arithmetic", "os:system", "remote"):
        with pytest.raises(ValueError, match=f"environment: '{id}' does not exist"):
            remote(server, monkeypatch, id)
    with pytest.raises(ValueError, match="argument: 'turn' does not exist; did you mean turns"):
        remote(server, monkeypatch, CANARY, args={"turn": 1})
    with pytest.raises(ValueError, match="turns: 'x' is not accepted; accepted: int"):
        remote(server, monkeypatch, CANARY, args={"turns": "x"})
    with pytest.raises(ValueError, match="multiple values"):
        remote(server, monkeypatch, CANARY, args={"split": "train"})


def test_a_wrong_key_is_said_when_the_environment_is_made(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "a-key-that-nobody-knows")
    with pytest.raises(ValueError, match="the key is missing or unknown"):
        make("remote", url=server.url, id=CANARY, key_env="MY_KEY")
    monkeypatch.setenv("MY_KEY", SECOND)
    make("remote", url=server.url, id=CANARY, key_env="MY_KEY").reset(1)


def test_what_an_environment_raises_is_told_and_the_episode_goes_on(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = remote(server, monkeypatch)
    environment.reset(1)
    with pytest.raises(EnvironmentRaisedError, match="KeyError: 'as told'"):
        environment.step(Action("raise KeyError"))
    with pytest.raises(EnvironmentValueError, match="ValueError: as told"):
        environment.step(Action("raise ValueError"))
    with pytest.raises(EnvironmentRaisedError, match="SystemExit: 1"):
        environment.step(Action("exit"))
    for order, said in (
        ("tuple", "step returned tuple"),
        ("nan", "cannot be sent"),
        ("large", "cannot be sent"),
    ):
        with pytest.raises(EnvironmentRaisedError, match=said):
            environment.step(Action(order))
    assert environment.step(Action("print")).observation.text == "step 7"
    environment.close()


def test_an_action_that_is_too_large_is_a_typed_error(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = remote(server, monkeypatch)
    environment.reset(1)
    with pytest.raises(RefusedError, match="too large"):
        environment.step(Action("x" * 60_000))
    environment.reset(1)
    environment.close()


def test_an_environment_that_fails_at_its_reset_is_closed(
    http: httpx.Client, server: Served, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    made = ByHand(http, OBEDIENT, notes=str(notes), on_reset="raise KeyError")
    refused(made.open(), 422, "environment_raised", "KeyError")
    refused(made.call(1), 410, "session_lost", '"reason": "not_opened"')
    server.until("closing", 0)
    assert [line.split()[0] for line in notes.read_text().splitlines()] == ["reset", "close"]


def test_an_environment_whose_first_observation_cannot_be_sent_is_closed(
    http: httpx.Client, server: Served, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    made = ByHand(http, OBEDIENT, notes=str(notes), on_reset="large")
    refused(made.open(), 422, "environment_broken", "cannot be sent")
    server.until("closing", 0)
    assert [line.split()[0] for line in notes.read_text().splitlines()] == ["reset", "close"]


def test_a_forked_process_leaves_its_parents_session_alone(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = remote(server, monkeypatch)
    environment.reset(1)
    environment.step(Action("go"))
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                environment.step(Action("go"))
            except SessionLostError:
                environment.reset(1)
                code = int(environment.step(Action("go")).observation.text != "step 1")
                environment.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert environment.step(Action("go")).observation.text == "step 2"
    environment.close()
