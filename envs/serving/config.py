"""Settings of an environment server."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envs.arguments import require

REMOTE = "remote"
"""The id of the client's environment; a server does not serve it, or clients could send it anywhere."""


@dataclass(frozen=True)
class ServerConfig:
    """What is served, where, to whom, and within which limits.

    Raises:
        ValueError: a value is not accepted; the message names it and what is accepted.
    """

    environments: Sequence[str]
    """Ids, as `envs.registry.make_any` knows them; clients choose the arguments."""
    host: str = "127.0.0.1"
    port: int = 8010
    """0: any free one."""
    keys: Sequence[str] = ()
    """Who may call; none: everybody who can reach the server, which then listens on loopback only."""
    shards: int = 2
    """Processes that environments run in."""
    lease_s: float = 60.0
    """How long a session lasts without a word of its client."""
    call_s: float = 60.0
    """How long one call of an environment may take; then its shard is killed."""
    idle_s: float = 75.0
    """How long a connection may stay open without a whole request on it."""
    max_sessions: int = 4096
    max_sessions_per_key: int = 4096
    max_body_bytes: int = 4 << 20
    max_answer_bytes: int = 16 << 20
    tls_certificate: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        require("environments", self.environments, bool(self.environments), "one id or more")
        require("environments", REMOTE, REMOTE not in self.environments, "environments that run here")
        require("port", self.port, 0 <= self.port < 2**16, "0 to 65535")
        require("shards", self.shards, 1 <= self.shards <= 256, "1 to 256")
        for name in ("lease_s", "call_s", "idle_s"):
            value = getattr(self, name)
            require(name, value, 0 < value <= 86_400, "more than 0, at most 86400 seconds")
        for name in ("max_sessions", "max_sessions_per_key", "max_body_bytes", "max_answer_bytes"):
            require(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        both = (self.tls_certificate is None) == (self.tls_key is None)
        require("tls_key", self.tls_key, both, "a certificate and its key, or none of the two")
