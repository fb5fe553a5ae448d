"""What every request passes: keys and roles, ids and logs, bodies of bounded size, answers to errors."""

import io
import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import zstandard

from opentinker_core.service.keys import REVOKED_AFTER_S
from opentinker_core.service.logs import JsonLines
from opentinker_core.service.principal import Role
from tests.service.live import Live, serving

KEYS = "/api/v1/admin/keys"
MB = 10**6


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that takes bodies of up to 1 MB, and pieces of them within a second."""
    limits = {"request_mb": 1, "body_timeout_s": 1, "buffered_mb": 3}
    with serving(tmp_path_factory.mktemp("home"), limits=limits) as live:
        yield live


@pytest.fixture
def client(small: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=small.url, headers={"X-API-Key": small.key()}, timeout=30) as client:
        yield client


# keys and roles


@pytest.mark.parametrize("path", [KEYS, "/api/v1/create_session", "/v1/models", "/nothing", "/", "//livez"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-API-Key": "tml-no"},
        {"Authorization": "Bearer tml-000000000000-" + "a" * 43},
        {"X-API-Key": "é"},
    ],
)
def test_nobody_gets_in_without_a_key(small: Live, path: str, headers: dict[str, str]) -> None:
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    for method in ("GET", "POST", "DELETE", "PUT", "OPTIONS"):
        answer = httpx.request(method, small.url + path, headers=raw)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "key" in answer.json()["detail"]


@pytest.mark.parametrize(
    "path", ["/livez", "/readyz", "/healthz", "/api/v1/healthz", "/openapi.json", "/metrics"]
)
def test_what_says_that_the_server_is_there_needs_no_key(small: Live, path: str) -> None:
    assert httpx.get(small.url + path).status_code == 200


def test_both_ways_to_show_a_key_are_taken(small: Live) -> None:
    key = small.key("acme", Role.READER)
    for headers in (
        {"X-API-Key": key},
        {"Authorization": f"Bearer {key}"},
        {"Authorization": f"bearer {key}"},
    ):
        answer = httpx.get(f"{small.url}/api/v1/admin/whoami", headers=headers)
        assert answer.json() | {"key_id": ""} == {"tenant": "acme", "role": "reader", "key_id": ""}


@pytest.mark.parametrize("role", [Role.READER, Role.MEMBER])
def test_a_role_that_is_too_low_is_refused(small: Live, role: Role) -> None:
    headers = {"X-API-Key": small.key("acme", role)}
    answer = httpx.post(small.url + KEYS, headers=headers, json={"name": "mine", "role": "admin"})
    assert answer.status_code == 403
    assert f"'admin'; the key has '{role.value}'" in answer.json()["detail"]


def test_a_revoked_key_stops_working_within_seconds(small: Live, client: httpx.Client) -> None:
    made = client.post(KEYS, json={"name": "soon-gone"}).json()
    mine = {"X-API-Key": made["key"]}
    assert httpx.get(f"{small.url}/api/v1/admin/whoami", headers=mine).status_code == 200
    revoked = client.delete(f"{KEYS}/{made['key_id']}")
    assert revoked.json()["revoked_at"]
    deadline = time.monotonic() + REVOKED_AFTER_S + 3
    while httpx.get(f"{small.url}/api/v1/admin/whoami", headers=mine).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_an_admin_cannot_see_or_revoke_keys_of_another_tenant(small: Live) -> None:
    theirs = httpx.post(small.url + KEYS, headers={"X-API-Key": small.key("one")}, json={"name": "k"}).json()
    mine = {"X-API-Key": small.key("two")}
    assert theirs["key_id"] not in httpx.get(small.url + KEYS, headers=mine).text
    other = httpx.delete(f"{small.url}{KEYS}/{theirs['key_id']}", headers=mine)
    unknown = httpx.delete(f"{small.url}{KEYS}/ffffffffffff", headers=mine)
    assert (other.status_code, unknown.status_code) == (404, 404)
    assert other.json()["detail"].replace(theirs["key_id"], "") == unknown.json()["detail"].replace(
        "f" * 12, ""
    )


def test_a_client_with_a_large_body_and_no_valid_key_gets_to_read_why(small: Live) -> None:
    for _ in range(3):
        answer = httpx.post(small.url + KEYS, content=bytes(20 * MB), headers={"X-API-Key": "tml-revoked"})
        assert answer.status_code == 401


# ids, logs, answers


def test_each_answer_has_the_id_of_its_request(client: httpx.Client) -> None:
    assert client.get("/livez", headers={"X-Request-Id": "my-id.1"}).headers["x-request-id"] == "my-id.1"
    for bad in ("a b", "x" * 65, 'a"}'):
        given = client.get("/livez", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert len(given) == 32
    error = client.get("/nothing", headers={"X-Request-Id": "lost"})
    assert (error.status_code, error.json()["request_id"]) == (404, "lost")


def test_logs_are_json_lines_with_the_id_of_the_request(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("opentinker_core")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        client.get("/nothing", headers={"X-Request-Id": "seen"})
    finally:
        logger.removeHandler(handler)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    line = next(line for line in lines if line.get("request_id") == "seen")
    assert (line["status"], line["path"], line["tenant"], line["level"]) == (
        404,
        "/nothing",
        "default",
        "info",
    )
    assert str(client.headers["x-api-key"]) not in stream.getvalue()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 422, "JSON"),
        (b"[]", 422, "dictionary"),
        (b'{"name": 3}', 422, "name: 3: Input should be a valid string"),
        (b'{"name": "\\ud800"}', 400, "name"),
        (b'{"name": "a/b"}', 400, "name: 'a/b' is not a name; accepted"),
        (b'{"name": "x", "role": "king"}', 422, "role: 'king'"),
        (b'{"name": "x", "expires_in_days": NaN}', 422, "expires_in_days"),
        (b"[" * 100_000, 400, ""),
        (b"\xff\xfe", 400, ""),
    ],
)
def test_a_wrong_body_is_answered_by_a_typed_error(
    client: httpx.Client, body: bytes, status: int, message: str
) -> None:
    answer = client.post(KEYS, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (status, 422)
    error = answer.json()
    assert message in error["detail"]
    assert error["error"]["message"] == error["detail"]
    assert (error["error"]["type"], error["category"]) == ("invalid_request_error", "user")


def test_a_defect_tells_the_client_nothing_but_the_id(
    small: Live, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(small.app.state.keys, "listed", broken)
    answer = client.get(KEYS, headers={"X-Request-Id": "defect"})
    assert (answer.status_code, answer.json()["request_id"]) == (500, "defect")
    assert "secret" not in answer.text
    assert client.get("/livez").status_code == 200


# bodies


def test_a_body_that_says_it_is_too_large_is_refused(client: httpx.Client) -> None:
    answer = client.post(KEYS, content=b" " * (MB + 1))
    assert answer.status_code == 413
    assert "accepted: up to 1000000 bytes" in answer.json()["detail"]
    assert client.get("/livez").status_code == 200


def test_a_chunked_body_that_grows_too_large_is_refused(client: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(21):
            yield b" " * 50_000

    assert client.post(KEYS, content=pieces()).status_code == 413


def test_an_endless_body_is_not_read_for_ever(small: Live) -> None:
    with _connected(small, "Transfer-Encoding: chunked") as connection:
        sent, piece = 0, b"10000\r\n" + b" " * 65536 + b"\r\n"
        with suppress(OSError):
            while sent < 128 * MB:
                connection.sendall(piece)
                sent += 65536
        assert sent < 128 * MB


def test_a_body_that_stops_coming_is_given_up(small: Live) -> None:
    with _connected(small, "Content-Length: 100") as connection:
        connection.sendall(b"{")
        assert b"408" in connection.recv(100)


def test_a_client_that_leaves_in_its_body_does_no_harm(small: Live, client: httpx.Client) -> None:
    for _ in range(20):
        with _connected(small, "Content-Length: 100") as connection:
            connection.sendall(b"{")
    assert client.get("/livez").status_code == 200


def test_a_compressed_body_is_read(client: httpx.Client) -> None:
    body = zstandard.compress(json.dumps({"name": "packed"}).encode())
    headers = {"Content-Encoding": "zstd", "Content-Type": "application/json"}
    assert client.post(KEYS, content=body, headers=headers).json()["name"] == "packed"
    spaces = zstandard.compress(b" " * 900_000 + b'{"name": "wide"}')
    assert client.post(KEYS, content=spaces, headers=headers).json()["name"] == "wide"


@pytest.mark.parametrize("frames", [1, 40])
def test_a_decompression_bomb_is_refused_before_it_is_unpacked(client: httpx.Client, frames: int) -> None:
    compressor = zstandard.ZstdCompressor(level=1)
    bomb = compressor.compress(bytes(2000 * MB // frames)) * frames
    assert len(bomb) < MB
    answer = client.post(KEYS, content=bomb, headers={"Content-Encoding": "zstd"})
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("zstd", b"no zstd", 400),
        ("zstd", zstandard.compress(bytes(1000))[:-3], 400),
        ("gzip", b"", 415),
        ("br, zstd", b"", 415),
        ("identity", b'{"name": "plain"}', 201),
    ],
)
def test_other_encodings_and_broken_ones_are_refused(
    client: httpx.Client, encoding: str, body: bytes, status: int
) -> None:
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    assert client.post(KEYS, content=body, headers=headers).status_code == status


def test_many_large_bodies_wait_for_room_and_are_all_read(small: Live, client: httpx.Client) -> None:
    body = b" " * 990_000 + b'{"name": "large"}'
    head = f"Content-Length: {len(body) + 100_000}"
    with _connected(small, "Transfer-Encoding: chunked"), _connected(small, head):
        for _ in range(6):
            answer = client.post(KEYS, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 201


def _connected(live: Live, header: str) -> socket.socket:
    """A connection on which the head of a request is sent."""
    host, _, port = live.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST {KEYS} HTTP/1.1\r\nHost: x\r\nX-API-Key: {live.key()}\r\n{header}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


def test_no_request_leaves_room_taken(small: Live) -> None:
    layer: Any = small.app.middleware_stack
    while not hasattr(layer, "_room"):
        layer = getattr(layer, "app", None) or layer._app
    deadline = time.monotonic() + 10
    while layer._room._free != layer._room._size:
        assert time.monotonic() < deadline, "room is left taken"
        time.sleep(0.1)
