"""An HTTP server that answers as vLLM does, to provoke what the real one cannot be made to do at will."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeVLLM:
    """Completions repeat the request's seed; faults are switched on by setting the fields."""

    def __init__(self, name: str, port: int = 0) -> None:
        self.name = name
        self.adapters: dict[str, str] = {}
        self.bodies: list[dict[str, Any]] = []
        self.unloaded: list[str] = []
        self.failures = 0
        """So many completions end with status 500."""
        self.drops = 0
        """So many completions end without an answer."""
        self.certain_logprob = 0.0
        self.closed = False
        self.gate = threading.Event()
        """Completions wait for it."""
        self.gate.set()
        self.waiting = threading.Semaphore(0)
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if fake.closed:
                    self.close_connection = True
                    return
                self._answer(*fake.get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = None if fake.closed else fake.post(self.path, body)
                if answer is None:
                    self.close_connection = True
                    return
                self._answer(*answer)

            def _answer(self, status: int, content: Any) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True

        self._http = Server(("127.0.0.1", port), Handler)
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._http.shutdown()
        self._http.server_close()

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/health":
            return 200, {}
        cards = [{"id": self.name, "parent": None, "root": "/nowhere", "max_model_len": 64}]
        return 200, {"data": cards + [{"id": name, "parent": self.name} for name in self.adapters]}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        if path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
            return 200, {}
        if path == "/v1/unload_lora_adapter":
            self.unloaded.append(body["lora_name"])
            return (200, {}) if self.adapters.pop(body["lora_name"], None) else (404, {})
        if body["model"] not in (self.name, *self.adapters):
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        self.waiting.release()
        self.gate.wait(10)
        if self.failures:
            self.failures -= 1
            return 500, {"error": {"message": "a planted failure"}}
        if self.drops:
            self.drops -= 1
            return None
        self.bodies.append(body)
        tokens = [body["seed"] % 100 + 1] * body["max_tokens"]
        logprobs = {"token_logprobs": [self.certain_logprob] * len(tokens), "top_logprobs": []}
        choice = {"token_ids": tokens, "logprobs": logprobs, "finish_reason": "length"}
        return 200, {"choices": [choice]}


@contextmanager
def fakes(*names: str) -> Iterator[list[FakeVLLM]]:
    """Fake servers, closed at the end."""
    servers = [FakeVLLM(name) for name in names]
    try:
        yield servers
    finally:
        for server in servers:
            server.gate.set()
            server.close()
