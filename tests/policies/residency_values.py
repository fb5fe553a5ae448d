"""Small policy states, and two backings for them: a dictionary, and local disk."""

import hashlib
import json
import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from opentinker_core.errors import NotFoundError
from opentinker_core.policies.residency.local_states import LocalStates
from opentinker_core.policies.residency.types import Backing


@dataclass(eq=False)
class State:
    """Weights, and moments that can be left out of memory."""

    weights: bytes
    moments: bytes | None

    @classmethod
    def of_step(cls, step: int, size: int = 8) -> "State":
        return cls(step.to_bytes(size, "big"), step.to_bytes(size, "big"))

    @property
    def step(self) -> int:
        """Of the weights; the moments must have the same."""
        assert self.moments in (None, self.weights)
        return int.from_bytes(self.weights, "big")


class Shrinking(Backing[State]):
    """What the two backings share."""

    def bytes_of(self, value: State) -> int:
        return len(value.weights) + len(value.moments or b"")

    def shrink(self, value: State) -> bool:
        value.moments = None
        return True

    def restore(self, key: str, value: State) -> None:
        value.moments = self.load(key).moments


class Shelf(Shrinking):
    """Keeps states in a dictionary, counts what is read and written, fails when told to."""

    def __init__(self, **steps: int) -> None:
        self.disk = {key: (state.weights, state.moments) for key, state in _of_steps(steps).items()}
        self.reads: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()
        self.full = False
        self.unreadable = False
        self._states: weakref.WeakSet[State] = weakref.WeakSet()

    def state(self, weights: bytes, moments: bytes | None) -> State:
        """A state of which `live_bytes` knows."""
        state = State(weights, moments)
        self._states.add(state)
        return state

    @property
    def live_bytes(self) -> int:
        """Bytes of all its states that are in memory, whoever holds them."""
        return sum(map(self.bytes_of, self._states))

    def expected_bytes(self, key: str) -> int:
        weights, moments = self._read(key)
        return len(weights) + len(moments or b"")

    def load(self, key: str) -> State:
        self.reads[key] += 1
        return self.state(*self._read(key))

    def save(self, key: str, value: State) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        assert value.moments is not None
        self.writes[key] += 1
        self.disk[key] = (value.weights, value.moments)

    def restore(self, key: str, value: State) -> None:
        self.reads[key] += 1
        value.moments = self._read(key)[1]

    def _read(self, key: str) -> tuple[bytes, bytes | None]:
        if self.unreadable:
            raise OSError(5, "Input/output error")
        if key not in self.disk:
            raise NotFoundError(f"there is no {key!r}")
        return self.disk[key]


class Disk(Shrinking):
    """Keeps states on local disk, in two files and a third that says whether they belong together."""

    def __init__(self, root: Path) -> None:
        self.states = LocalStates(root)

    def expected_bytes(self, key: str) -> int:
        return self.states.load(key, lambda folder: sum((folder / n).stat().st_size for n in ("w", "m")))

    def load(self, key: str) -> State:
        return self.states.load(key, read)

    def save(self, key: str, value: State) -> None:
        self.states.save(key, lambda folder: write(value, folder))


def write(state: State, folder: Path) -> None:
    assert state.moments is not None
    (folder / "w").write_bytes(state.weights)
    (folder / "m").write_bytes(state.moments)
    digest = hashlib.sha256(state.weights + state.moments).hexdigest()
    (folder / "state.json").write_text(json.dumps({"digest": digest}))


def read(folder: Path) -> State:
    """The state; an AssertionError if it is not whole."""
    weights, moments = (folder / "w").read_bytes(), (folder / "m").read_bytes()
    digest = hashlib.sha256(weights + moments).hexdigest()
    assert json.loads((folder / "state.json").read_text()) == {"digest": digest}
    return State(weights, moments)


def _of_steps(steps: dict[str, int]) -> dict[str, State]:
    return {key: State.of_step(step) for key, step in steps.items()}
