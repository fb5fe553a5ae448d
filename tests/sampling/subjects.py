"""What the conformance suite tests a sampler with: published adapters, broken snapshots, a reference."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from opentinker_core.config.schema import LoRAConfig
from opentinker_core.sampling.conformance import Published, Subject
from opentinker_core.sampling.protocol import BASE, Sampler
from opentinker_core.snapshots.protocol import SnapshotKind, SnapshotStore
from opentinker_core.snapshots.store import open_snapshot_store
from opentinker_core.training.trainer import Trainer
from opentinker_core.trajectories.types import Datum

TEXTS = ("1+1=", "12+34=", "7*8+9-1=")


def store_at(folder: Path) -> SnapshotStore:
    """A store on local disk."""
    return open_snapshot_store((folder / "store").as_uri(), folder / "cache")


def published(
    trainer: Trainer, store: SnapshotStore, folder: Path, policy: str, number: int = 1
) -> Published:
    """The state of `policy` as a version in the store."""
    directory = folder / f"{policy}-{number}"
    trainer.publish_snapshot(policy, directory)
    snapshot = store.publish((policy, f"v{number:06d}"), SnapshotKind.SAMPLER, directory)
    return Published(f"{policy}@{number}", snapshot.uri, snapshot.digest)


def subject_with(
    open_sampler: Callable[[SnapshotStore], Sampler],
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    lora: LoRAConfig,
    spread: float,
    texts: Sequence[str] = TEXTS,
    context: int | None = None,
    tolerance: float = 1e-4,
    rounding: float = 0.0,
) -> Subject:
    """Two policies whose factors are random by `spread`, with the trainer as the reference.

    `open_sampler` gets the store that the versions are in; everything is below `folder`.
    """
    store = store_at(folder)
    for seed, policy in enumerate(("p", "q", "damaged")):
        _random_policy(trainer, policy, lora, seed, spread)
    damaged = published(trainer, store, folder, "damaged")
    weights = store.fetch(damaged.uri) / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(bytes(content))
    missing = Published("p@2", f"{store.uri}/p/v000002/{'0' * 16}", "0" * 64)

    def score(version: str, datums: Sequence[Datum]) -> list[np.ndarray]:
        return trainer.forward(None if version == BASE else version.partition("@")[0], datums)

    return Subject(
        open_sampler(store),
        versions=tuple(published(trainer, store, folder, policy) for policy in ("p", "q")),
        prompts=tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts),
        broken=(missing, damaged),
        decode=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
        score=score,
        context=context,
        tolerance=tolerance,
        rounding=rounding,
    )


def _random_policy(trainer: Trainer, policy: str, lora: LoRAConfig, seed: int, spread: float) -> None:
    trainer.create(policy, lora, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in trainer.state_of(policy).adapter.parameters():
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
