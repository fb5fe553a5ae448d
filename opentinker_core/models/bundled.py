"""Models that need no hub: built once under `home/models`, the same bytes on every machine."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from opentinker_core.errors import OpenTinkerError
from opentinker_core.models import smollm2, tiny
from opentinker_core.models.progress import Report


@dataclass(frozen=True)
class BundledModel:
    """A model that comes with OpenTinker, or rather the recipe to make it.

    `recipe` is a digest of everything the result depends on; it is part of the directory's name,
    so that a changed recipe never meets an old result. `build(target, scratch, report)` creates
    the directory `target` and may use the directory `scratch`.
    """

    name: str
    description: str
    licence: str
    recipe: str
    build: Callable[[Path, Path, Report], None]

    def directory(self, home: Path) -> Path:
        """Where the model lies once it is built."""
        return home.expanduser().absolute() / "models" / f"{self.name}-{self.recipe[:12]}"


BUNDLED = {
    model.name: model
    for model in (
        BundledModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, 135 M parameters, context 8192; 93 MB to download",
            licence="Apache-2.0",
            recipe=smollm2.RECIPE,
            build=smollm2.build,
        ),
        BundledModel(
            name="tiny",
            description="untrained two-layer character model for tests, built in a second",
            licence="Apache-2.0",
            recipe=tiny.RECIPE,
            build=tiny.build,
        ),
    )
}


def ensure(model: BundledModel, home: Path, report: Report) -> Path:
    """Return the model's directory, building it first if need be; safe to call concurrently.

    Raises:
        OpenTinkerError: the model cannot be fetched, or `home` cannot be written.
    """
    target = model.directory(home)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target.with_name(f".{target.name}.lock")):
            if not target.is_dir():
                _build(model, target, report)
    except OSError as error:
        message = f"base model {model.name!r}: cannot be built in {target.parent}: {error}; "
        raise OpenTinkerError(message + "OPENTINKER_HOME chooses another directory") from error
    return target


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold an advisory lock that ends with the process, however it ends."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _build(model: BundledModel, target: Path, report: Report) -> None:
    prefix = f".{target.name}-building-"
    for abandoned in target.parent.glob(f"{prefix}*"):  # ours is the lock: its builder was killed
        shutil.rmtree(abandoned)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        model.build(scratch / "model", scratch, report)
        os.rename(scratch / "model", target)  # noqa: PTH104 (must fail, not merge, if it exists)
    finally:
        shutil.rmtree(scratch)
