"""What a run tells whoever watches it in the same process, such as the progress bar of `train`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Progress:
    """Where a run stands: `step` of `steps` is done (0: it was opened)."""

    run_id: str
    run_name: str
    step: int
    steps: int
    doing: str
    """What comes next or goes on, in a word or two."""
    metrics: Mapping[str, float] = field(default_factory=dict)


Listener = Callable[[Progress], None]
_listeners: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` with everything that runs of this process tell."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(progress: Progress) -> None:
    """Pass `progress` on to all listeners."""
    for listener in _listeners:
        listener(progress)
