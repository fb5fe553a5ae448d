"""Where the trainer keeps policies' states: some in memory, all others on local disk."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from opentinker_core.errors import NotFoundError, UsageError
from opentinker_core.lora.layout import ModelLayout
from opentinker_core.policies.residency.host import HostTier
from opentinker_core.policies.residency.local_states import LocalStates
from opentinker_core.policies.residency.types import Backing
from opentinker_core.training.state import PolicyState

Result = TypeVar("Result")

UNLIMITED = 1 << 62


def states_in_memory() -> HostTier[PolicyState]:
    """States that stay in memory, however many there are."""
    return HostTier(_NoDisk(), UNLIMITED)


def states_on_disk(
    root: Path, budget: int, model: ModelLayout, device: torch.device, base_model: str
) -> HostTier[PolicyState]:
    """States of which `budget` bytes are in memory, and the others below `root`.

    What does not fit beside other leases is refused at once (`NoRoomError`): a trainer is used by one
    thread, so nobody would end a lease while it waits.
    """
    return HostTier(_LocalDisk(LocalStates(root), model, device, base_model), budget, timeout_s=0)


class _NoDisk(Backing[PolicyState]):
    def expected_bytes(self, key: str) -> int:
        raise _unknown(key)

    def load(self, key: str) -> PolicyState:
        raise _unknown(key)

    def bytes_of(self, value: PolicyState) -> int:
        return value.nbytes


class _LocalDisk(Backing[PolicyState]):
    """Gradients that wait for their step are written with the state; moments can be left on disk alone."""

    def __init__(self, local: LocalStates, model: ModelLayout, device: torch.device, base_model: str) -> None:
        self._local, self._model, self._device, self._base_model = local, model, device, base_model

    def expected_bytes(self, key: str) -> int:
        def size(directory: Path) -> int:
            return sum(path.stat().st_size for path in directory.glob("*.safetensors"))

        return self._read(key, size)

    def load(self, key: str) -> PolicyState:
        return self._read(key, lambda directory: PolicyState.load(directory, self._model, self._device))

    def bytes_of(self, value: PolicyState) -> int:
        return value.nbytes

    def save(self, key: str, value: PolicyState) -> None:
        self._local.save(key, lambda directory: value.save(directory, self._base_model, with_gradient=True))

    def shrink(self, value: PolicyState) -> bool:
        return value.release_moments()

    def restore(self, key: str, value: PolicyState) -> None:
        self._read(key, value.load_moments)

    def forget(self, key: str) -> None:
        self._local.drop(key)

    def _read(self, key: str, read: Callable[[Path], Result]) -> Result:
        try:
            return self._local.load(key, read)
        except NotFoundError as error:
            raise _unknown(key) from error


def _unknown(key: str) -> UsageError:
    return UsageError(f"policy: {key!r} has no resident state; accepted: one that was created or loaded")
