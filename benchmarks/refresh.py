"""A new version to the sampler: publishing and refreshing an adapter, against the checkpoint of a full model.

The adapter (r = 8, all linears) takes the way of a training run: the trainer writes a PEFT directory, the
snapshot store publishes it, the sampler is refreshed from there; files are flushed to disk and their
digests checked. The full model is handed over in two ways: `published` takes the same store, so it is as
durable and as checked, and its verified file is read into another model (`adapter_vs_full`); `saved` is
one safetensors file written and read into another model, neither flushed nor checked: little more than a
copy in memory (`adapter_vs_full_saved`). Weights change in each turn. A turn measures one way after the
other; ratios are medians over turns.

    python benchmarks/refresh.py [--json] [--models smollm2 tiny] [--stores local s3] [--turns N]

`--stores s3` is a moto server in this process: it shows what the protocol costs, not what a network does,
and takes half a minute for a full model.
"""

import argparse
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import benchmarks  # noqa: F401  before transformers, see there

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line does, before torch is imported

import torch
from safetensors.torch import load_model, save_model

from benchmarks.report import show
from benchmarks.subjects import MODELS, Subject
from opentinker_core.config.schema import LoRAConfig
from opentinker_core.sampling.native import NativeSampler
from opentinker_core.snapshots.protocol import SnapshotKind, SnapshotStore
from opentinker_core.snapshots.store import open_snapshot_store
from opentinker_core.training.trainer import Trainer

POLICY = "p"
Seconds = tuple[float, float]
"""To hand a version out, and to take it in."""


class Arms:
    """The three ways; each gives seconds of both halves."""

    def __init__(self, subject: Subject, store: SnapshotStore, scratch: Path) -> None:
        self._store, self._scratch = store, scratch
        self._turn = 0
        decoder, pool = subject.fused()
        self._trainer = Trainer(decoder, pool, subject.name)
        self._trainer.create(POLICY, LoRAConfig(rank=8, alpha=16.0), 0)
        self._sampler = NativeSampler(decoder, pool, None, store.fetch, self._trainer.read_adapter)
        self._full, self._target = subject.plain(), subject.plain()
        self.adapter_bytes = self.full_bytes = 0

    def next_version(self) -> None:
        """Change all weights that will be handed out, as an update does."""
        self._turn += 1
        with torch.no_grad():
            for _, parameter in self._trainer.state_of(POLICY).adapter.parameters():
                parameter.add_(0.001)
            next(self._full.parameters()).add_(0.001)

    def adapter(self) -> Seconds:
        """Publish and refresh."""
        started = time.perf_counter()
        with TemporaryDirectory(dir=self._scratch) as written:
            self._trainer.publish_snapshot(POLICY, Path(written))
            snapshot = self._store.publish(self._key("adapter"), SnapshotKind.SAMPLER, Path(written))
        halfway = time.perf_counter()
        self._sampler.refresh(f"{POLICY}@{self._turn}", snapshot.uri, snapshot.digest)
        self.adapter_bytes = snapshot.size
        return halfway - started, time.perf_counter() - halfway

    def saved(self) -> Seconds:
        """Write one file, read it into another model."""
        with TemporaryDirectory(dir=self._scratch) as written:
            path = Path(written) / "model.safetensors"
            started = time.perf_counter()
            save_model(self._full, str(path))
            halfway = time.perf_counter()
            load_model(self._target, path)
            ended = time.perf_counter()
            self.full_bytes = path.stat().st_size
        return halfway - started, ended - halfway

    def published(self) -> Seconds:
        """The same by way of the snapshot store."""
        started = time.perf_counter()
        with TemporaryDirectory(dir=self._scratch) as written:
            save_model(self._full, str(Path(written) / "model.safetensors"))
            snapshot = self._store.publish(self._key("full"), SnapshotKind.CHECKPOINT, Path(written))
        halfway = time.perf_counter()
        load_model(self._target, self._store.fetch(snapshot.uri, snapshot.digest) / "model.safetensors")
        ended = time.perf_counter()
        self._store.delete(snapshot.uri)
        return halfway - started, ended - halfway

    def _key(self, name: str) -> tuple[str, ...]:
        return (name, f"v{self._turn:06}")


@contextmanager
def opened(kind: str, scratch: Path) -> Iterator[SnapshotStore]:
    """A new store: `local`, or `s3` with a server of its own."""
    if kind == "local":
        yield open_snapshot_store((scratch / "store").as_uri(), scratch / "cache")
        return
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else it tells of every request
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ[name] = "testing"
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="bench")
        yield open_snapshot_store("s3://bench/snapshots", scratch / "cache", endpoint)
    finally:
        server.stop()


def measure(arms: Arms, turns: int) -> dict[str, list[Seconds]]:
    """Seconds of each way, of each turn; the first turn, which warms up, is dropped."""
    ways: dict[str, Callable[[], Seconds]] = {
        "adapter": arms.adapter,
        "full, published": arms.published,
        "full, saved": arms.saved,
    }
    taken: dict[str, list[Seconds]] = {name: [] for name in ways}
    for _ in range(turns + 1):
        arms.next_version()
        for name, way in ways.items():
            taken[name].append(way())
    return {name: own[1:] for name, own in taken.items()}


def main() -> None:
    """Measure, and print the table or the object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["smollm2"])
    parser.add_argument("--stores", nargs="+", choices=["local", "s3"], default=["local"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    rows: list[tuple[str, float, str]] = []
    ratios: dict[str, float] = {}
    for name in arguments.models:
        for kind in arguments.stores:
            with TemporaryDirectory() as scratch, opened(kind, Path(scratch)) as store:
                arms = Arms(MODELS[name](getattr(torch, arguments.dtype)), store, Path(scratch))
                taken = measure(arms, arguments.turns)
            where = f"{name} {kind}"
            for way, own in taken.items():
                rows.append((f"{where}: {way}, out", 1000 * median(out for out, _ in own), "ms"))
                rows.append((f"{where}: {way}, in", 1000 * median(into for _, into in own), "ms"))
            rows.append((f"{where}: adapter", arms.adapter_bytes / 1e6, "MB"))
            rows.append((f"{where}: full", arms.full_bytes / 1e6, "MB"))
            suffix = ("" if name == "smollm2" else f"_{name}") + ("" if kind == "local" else f"_{kind}")
            ratios[f"adapter_vs_full{suffix}"] = _times(taken["full, published"], taken["adapter"])
            ratios[f"adapter_vs_full_saved{suffix}"] = _times(taken["full, saved"], taken["adapter"])
            ratios[f"bytes_adapter_vs_full{suffix}"] = arms.full_bytes / arms.adapter_bytes
    show("refresh", rows, ratios, as_json=arguments.json)


def _times(slower: list[Seconds], faster: list[Seconds]) -> float:
    """By which factor the one way takes longer, the median over turns."""
    return median(sum(s) / sum(f) for s, f in zip(slower, faster, strict=True))


if __name__ == "__main__":
    main()
