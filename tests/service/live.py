"""A server of the tiny model in this process, for tests that use the official SDK."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinker
import torch
import uvicorn

from opentinker_core.config.serving import ServeConfig
from opentinker_core.config.settings import Settings
from opentinker_core.service.app import make_app
from opentinker_core.service.core import Service
from opentinker_core.service.principal import Role
from opentinker_core.service.server import listen
from tests.servers import free_port


@dataclass
class Live:
    """A server that runs."""

    url: str
    service: Service
    app: Any

    def key(self, tenant: str = "default", role: Role = Role.ADMIN) -> str:
        """A new key of a tenant."""
        return str(self.app.state.keys.create(tenant, "test", role)[0])

    def client(self, tenant: str = "default", **arguments: Any) -> tinker.ServiceClient:
        """A new client of a tenant."""
        return tinker.ServiceClient(base_url=self.url, api_key=self.key(tenant), **arguments)


@contextmanager
def serving(home: Path, *, send_buffer: int | None = None, **config: Any) -> Iterator[Live]:
    """A server with its state below `home`, until the end of the block.

    Args:
        send_buffer: bytes that the kernel takes of an answer that is not read, about; None: megabytes.
    """
    torch.set_num_threads(1)
    port = config.get("port") or free_port()
    settings = Settings(home=home)
    config = {"models": [{"model": "tiny"}], "port": port, **config}
    service = Service(ServeConfig.model_validate(config), settings)
    app = make_app(service)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
    listener = listen(service.config)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not server.started:
            assert thread.is_alive(), "the server ended"
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.02)
        yield Live(f"http://127.0.0.1:{port}", service, app)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server does not stop"
