"""An engine that is a service elsewhere; nothing but the tokenizer is loaded here."""

import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.models.loading import load_tokenizer
from opentinker_core.models.source import resolve
from opentinker_core.runtime.remote.adapters import tinker_lora
from opentinker_core.runtime.remote.connection import Connection
from opentinker_core.runtime.remote.reference import read_reference
from opentinker_core.runtime.remote.sampler import FetchSnapshot, RemoteSampler
from opentinker_core.runtime.remote.trainer import RemoteTrainer
from opentinker_core.runtime.served_versions import ServedVersions


@dataclass(frozen=True, eq=False)
class RemoteEngine:
    """See `runtime.protocol.RunEngine`."""

    connection: Connection
    fetch: FetchSnapshot
    trainer: RemoteTrainer
    sampler: RemoteSampler
    tokenizer: PreTrainedTokenizerBase
    max_context: int
    versions: ServedVersions = field(default_factory=ServedVersions)
    dtype: str = "bfloat16"
    """A service does not say which, so the coarser one is reckoned with."""
    attempt: str = field(default_factory=lambda: f"-{uuid4().hex[:8]}")
    """Snapshots say where the service has them, which is a new place for each session."""

    def forget(self, snapshot_uri: str, digest: str) -> None:
        """Delete the service's copy of a checkpoint too, unless another service has it or it is gone."""
        with suppress(OpenTinkerError):
            directory = self.fetch(snapshot_uri, digest)
            self.connection.delete(read_reference(directory, self.connection, snapshot_uri))

    def check_targets(self, lora: LoRAConfig) -> None:
        """Raise UsageError if the service makes no such adapters."""
        tinker_lora(lora)


def open_remote_engine(base_model: str, url: str, home: Path, fetch: FetchSnapshot) -> RemoteEngine:
    """An engine for `base_model` at the service `url`, with the key in `TINKER_API_KEY`.

    Args:
        fetch: gives the verified local directory of a snapshot, from its URI and digest.

    Raises:
        UsageError: there is no key, no such service, or it does not serve the model.
    """
    connection = Connection(url)
    names = [name for name in (base_model, Path(base_model).name) if name in connection.models]
    if not names:
        raise UsageError(
            f"policy.base_model: {base_model!r} is not served by {url}; "
            f"accepted: {', '.join(sorted(connection.models)) or 'none'}"
        )
    max_context = connection.models[names[0]]
    if max_context is None:
        raise OpenTinkerError(f"{url} does not say how long the context of {names[0]} is")
    sampler = RemoteSampler(connection, names[0], fetch)
    trainer = RemoteTrainer(connection, names[0], sampler)
    tokenizer = load_tokenizer(resolve(base_model, home))
    engine = RemoteEngine(connection, fetch, trainer, sampler, tokenizer, max_context)
    weakref.finalize(engine, _close, connection)
    return engine


def _close(connection: Connection) -> None:
    with suppress(OpenTinkerError):  # a service that is gone has nothing to free
        connection.close()
