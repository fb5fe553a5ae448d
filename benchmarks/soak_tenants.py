"""Clients for `soak.py`, as bad as real ones: crowds of tenants that go on until they are killed."""

import contextlib
import json
import logging
import random
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import tinker

TOKENS = 24
VOCABULARY = 90
STUCK_S = 20
"""How long a client that reads nothing stays connected."""


class Rude:
    """One tenant's requests by bare sockets, none of which is read to its end."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self._address, self._key = (str(parts.hostname), int(parts.port or 80)), key

    def headers_only(self) -> None:
        """Announce a body that never comes."""
        self._leave(self._sent("POST", "/api/v1/forward_backward", b"", length=5000))

    def half_a_body(self) -> None:
        """Send the first half of a body."""
        self._leave(self._sent("POST", "/api/v1/asample", b"{" * 3000, length=6000))

    def poll(self, request_id: str) -> None:
        """Leave in the middle of a long poll."""
        body = json.dumps({"request_id": request_id}).encode()
        sent = self._sent("POST", "/api/v1/retrieve_future", body)
        time.sleep(0.2)
        self._leave(sent)

    def stream(self, model: str, *, stuck: bool) -> None:
        """Leave after the first bytes of a stream, or read nothing more of it for a while."""
        body = {"model": model, "prompt": [3, 4, 5], "max_tokens": 60, "n": 8, "logprobs": 5}
        sent = self._sent(
            "POST", "/v1/completions", json.dumps({**body, "stream": True, "ignore_eos": True}).encode()
        )
        sent.recv(100)
        if stuck:
            time.sleep(STUCK_S)
        self._leave(sent)

    def archive(self, path: str) -> None:
        """Leave in the middle of a download."""
        run, kind, name = path.removeprefix("tinker://").split("/")
        sent = self._sent("GET", f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive", b"")
        sent.recv(100)
        self._leave(sent)

    def _sent(self, method: str, path: str, body: bytes, length: int | None = None) -> socket.socket:
        sent = socket.create_connection(self._address, timeout=60)
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: soak\r\nX-API-Key: {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length or len(body)}\r\n\r\n"
        )
        sent.sendall(head.encode() + body)
        return sent

    @staticmethod
    def _leave(sent: socket.socket) -> None:
        """Break the connection: the other side gets a reset."""
        sent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sent.close()


class Tenant:
    """One tenant: session after session, most of which end badly."""

    def __init__(self, url: str, key: str, draw: random.Random, log: Path) -> None:
        self._url, self._key, self._draw, self._log = url, key, draw, log
        self._rude = Rude(url, key)

    def sessions(self) -> None:
        """Go on until the process ends; what fails is told, and tried again."""
        while True:
            try:
                self._session()
            except Exception as error:  # noqa: BLE001 - a server under test may do anything
                with self._log.open("a") as log:
                    log.write(f"{type(error).__name__}: {error!s:.300}".replace("\n", " ") + "\n")
                time.sleep(1)

    def _session(self) -> None:
        draw = self._draw
        service = tinker.ServiceClient(base_url=self._url, api_key=self._key)
        training = service.create_lora_training_client(
            base_model="tiny", rank=draw.choice((2, 4, 8)), user_metadata={"policy": "soak"}
        ).result()
        for _ in range(draw.randint(1, 3)):
            update = training.forward_backward(self._data(), "cross_entropy")
            step = training.optim_step(tinker.AdamParams(learning_rate=1e-3))
            update.result()
            step.result()
        path = training.save_state("kept", ttl_seconds=3600).result().path
        sampler = training.save_weights_and_get_sampling_client().result()
        self._sample(sampler, 4).result()
        for _ in range(draw.randint(0, 3)):  # nobody waits for these
            self._sample(sampler, 16)
            training.forward_backward(self._data(), "cross_entropy")
        self._be_rude(training.model_id, path)
        self._leave(service)

    def _be_rude(self, model_id: str, path: str) -> None:
        rude, draw = self._rude, self._draw
        acts = (
            rude.headers_only,
            rude.half_a_body,
            lambda: rude.poll(f"{model_id}:1"),
            lambda: rude.stream("tiny", stuck=False),
            lambda: rude.stream("tiny", stuck=draw.random() < 0.3),
            lambda: rude.archive(path),
        )
        for act in draw.sample(acts, 2):
            with contextlib.suppress(OSError):
                act()

    def _leave(self, service: tinker.ServiceClient) -> None:
        """End the session, or stop its heartbeat, which the server finds out by itself."""
        if self._draw.random() < 0.5:
            service.close("success").result()
        else:
            service.holder.close()

    @staticmethod
    def _sample(sampler: Any, samples: int) -> Any:
        params = tinker.SamplingParams(max_tokens=16, temperature=1.0, stop=[])
        return sampler.sample(
            prompt=tinker.ModelInput.from_ints([3, 4, 5]), num_samples=samples, sampling_params=params
        )

    def _data(self) -> list[tinker.Datum]:
        tokens = np.array([self._draw.randrange(1, VOCABULARY) for _ in range(TOKENS + 1)])
        inputs = {
            "target_tokens": tinker.TensorData.from_numpy(tokens[1:]),
            "weights": tinker.TensorData.from_numpy(np.ones(TOKENS, np.float32)),
        }
        return [
            tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)
        ] * 2


def crowd(url: str, keys: Sequence[str], seed: str, log: Path) -> None:
    """Let one tenant a key live, each on a thread of its own; what fails is written to `log`."""
    logging.disable()  # the SDK tells of everything that is done to it on purpose
    tenants = [Tenant(url, key, random.Random(f"{seed}/{index}"), log) for index, key in enumerate(keys)]
    threads = [threading.Thread(target=tenant.sessions, daemon=True) for tenant in tenants]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
