"""Clients that read slowly, or not at all: others are served, and memory and a stop do not depend on them."""

import asyncio
import io
import tarfile
from collections.abc import Awaitable, Iterator, MutableMapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from opentinker_core.service.outgoing import PIECE, send_in_pieces
from opentinker_core.service.server import _drain
from opentinker_core.service.types import StoredResult
from tests.service.held import Held, nothing_kept
from tests.service.live import Live, serving
from tests.service.raw import Raw
from tests.service.sockets import Line, line
from tests.waiting import PATIENCE_S, wait_until

API = "/api/v1"
MB = 1 << 20
SMALL = 4096
"""Bytes that the kernel buffers for a connection at either end, about."""
STREAM = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 60, "n": 16, "ignore_eos": True, "seed": 1}
STREAM |= {"stream": True, "logprobs": 5}
"""More than is buffered."""
Result = TypeVar("Result")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that waits for its clients for as long as they like."""
    limits = {"request_mb": 2, "buffered_mb": 2, "answer_timeout_s": PATIENCE_S}
    with serving(tmp_path_factory.mktemp("home"), send_buffer=SMALL, limits=limits) as live:
        yield live


@pytest.fixture(scope="module")
def key(live: Live) -> str:
    return live.key("slow")


def on_loop(live: Live, work: Awaitable[Result]) -> Result:
    """Do something on the server's event loop."""
    sweeper = live.service._sweeper
    assert sweeper is not None

    async def done() -> Result:
        return await work

    return asyncio.run_coroutine_threadsafe(done(), sweeper.get_loop()).result(PATIENCE_S)


def keep(live: Live, request_id: str, body: bytes) -> None:
    """Let the server have a result of a tenant."""

    async def work() -> StoredResult:
        return StoredResult(body, "application/octet-stream")

    async def submit() -> None:
        live.service.futures.submit("slow", request_id, "sample", "digest", work)

    on_loop(live, submit())


def begin_stream(connection: Line) -> None:
    """Ask for a stream, and read its head alone."""
    connection.request("POST", "/v1/completions", STREAM)
    connection.head_of_answer()


def test_a_stream_that_is_not_read_holds_nobody_up_and_is_whole_in_the_end(live: Live, key: str) -> None:
    raw = Raw(live.url, key)
    with nothing_kept(live), line(live.url, key, window=SMALL) as stuck, line(live.url, key) as quick:
        begin_stream(stuck)
        begin_stream(quick)
        events = quick.read(b"data: [DONE]")
        assert raw.post("get_info", model_id="none").status_code == 404
        wait_until(lambda: Held.of(live).holdings.work_running == 0, "an end of the sampling")
        held = Held.of(live)
        assert (held.sequences, held.open_requests) == (0, 1), "it is sampled, and not sent"
        assert held.busy == 0, "a server that stops does not wait for it"
        assert texts(stuck.read(b"data: [DONE]")) == texts(events)


def texts(events: bytes) -> bytes:
    """What a stream says; not when it was made, under which id, and where the pieces of HTTP end."""
    return b"".join(piece.partition(b'"')[0] for piece in events.split(b'"text": "')[1:])


def test_an_archive_can_be_read_byte_by_byte(live: Live, key: str) -> None:
    raw = Raw(live.url, key)
    with nothing_kept(live):
        session = raw.session()
        model = raw.model(session)
        raw.result(raw.ok("save_weights", model_id=model, seq_id=1, path="kept")["request_id"])
        path = f"{API}/training_runs/{model}/checkpoints/weights/kept/archive"
        whole = raw.http.get(path.removeprefix(API)).content
        with line(live.url, key, window=SMALL) as slow:
            slow.request("GET", path)
            slow.head_of_answer()
            read = bytearray()
            while len(read) < len(whole):
                read += slow.socket.recv(1)
                if len(read) == len(whole) // 2:
                    assert raw.http.get(path.removeprefix(API)).content == whole, "others are served"
        assert bytes(read) == whole
        with tarfile.open(fileobj=io.BytesIO(read)) as archive:
            assert archive.getnames()
        raw.post(f"sessions/{session}/finish", reason={"type": "success"})


def test_a_large_result_that_many_ask_for_and_none_reads_is_in_memory_once(live: Live, key: str) -> None:
    clients, size = 24, 8 * MB
    before = psutil.Process().memory_info().rss
    with nothing_kept(live), ExitStack() as opened:
        body = bytes(range(256)) * (size // 256)
        keep(live, "s:sample:0:1", body)
        lines = [opened.enter_context(line(live.url, key, window=SMALL)) for _ in range(clients)]
        for one in lines:
            one.request("POST", f"{API}/retrieve_future", {"request_id": "s:sample:0:1"})
            one.head_of_answer()
        assert psutil.Process().memory_info().rss - before < clients * size / 2
        read = bytearray()
        while len(read) < size:
            read += lines[0].socket.recv(MB)
        assert read == body, "who reads at last gets all of it"
        live.service.futures.forget("s:sample:0")


def test_a_long_poll_takes_no_room_for_bodies(live: Live, key: str) -> None:
    """A body that is sent in chunks is given room for the largest; only until it is read."""
    raw = Raw(live.url, key)
    with nothing_kept(live):
        session = raw.session()
        model = raw.model(session)
        raw.step(model, 2)
        with line(live.url, key) as polling:
            body = f'{{"request_id": "{model}:2"}}'.encode()
            polling.head("POST", f"{API}/retrieve_future", None)
            polling.send(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
            wait_until(lambda: Held.of(live).open_requests == 1)
            large = raw.post("telemetry", events=[], session_id="x" * 1_500_000)
            assert large.status_code == 200, large.text
            assert Held.of(live).open_requests == 1, "it polls still"
        raw.post(f"sessions/{session}/finish", reason={"type": "success"})


def test_a_client_that_takes_nothing_is_given_up(tmp_path: Path) -> None:
    with serving(tmp_path, send_buffer=SMALL, limits={"answer_timeout_s": 0.5}) as live:
        key = live.key("slow")
        with nothing_kept(live), line(live.url, key, window=SMALL) as stuck:
            begin_stream(stuck)
            wait_until(lambda: Held.of(live).open_requests == 0, "an end of the request")
            assert stuck.ended()


def test_a_stop_does_not_wait_for_a_client_that_does_not_read(tmp_path: Path) -> None:
    with (
        serving(tmp_path, send_buffer=SMALL) as live,
        line(live.url, live.key("slow"), window=SMALL) as stuck,
    ):
        begin_stream(stuck)
        on_loop(live, _drain(live.app, live.service, asyncio.Event(), 10 * PATIENCE_S))
        assert Held.of(live).open_requests == 1


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 3 * PIECE])
@pytest.mark.parametrize("more", [False, True])
def test_bodies_are_sent_in_pieces(size: int, more: bool) -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    body = bytes(index % 251 for index in range(size))
    asyncio.run(send_in_pieces({"type": "http.response.body", "body": body, "more_body": more}, send))
    assert b"".join(one["body"] for one in sent) == body
    assert all(len(one["body"]) <= PIECE for one in sent)
    assert [one["more_body"] for one in sent] == [True] * (len(sent) - 1) + [more]
