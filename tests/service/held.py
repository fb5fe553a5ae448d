"""What a server holds for its clients, down to the engine: as much when they are gone as before they came."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opentinker_core.service.holdings import Holdings
from tests.service.live import Live
from tests.waiting import wait_until


@dataclass(frozen=True)
class Held:
    """Counts at one moment."""

    holdings: Holdings
    queued: int
    """Operations that wait for the engine, or run."""
    states: int
    """Policies' states in memory."""
    pinned_slots: int
    sequences: int
    """That are sampled or wait for it."""
    open_requests: int
    busy: int
    """Requests that a stopping server waits for."""
    body_bytes: int
    """Room that bodies take."""

    @classmethod
    def of(cls, live: Live) -> "Held":
        """What `live` holds now."""
        engine: Any = live.service.engine("tiny", "default").shared
        executor = engine.scheduler._executor
        generation = executor._sampler._generation
        kinds = engine.scheduler.statistics().kinds.values()
        metrics = live.app.state.metrics.registry
        room = _room(live)
        return cls(
            holdings=Holdings.of(live.service),
            queued=sum(kind.waiting + kind.running for kind in kinds),
            states=len(executor._trainer._states.resident()),
            pinned_slots=sum(one.pins for one in executor._trainer._pool._occupants.values()),
            sequences=len(generation._waiting) + len(generation._running) + len(executor._tickets),
            open_requests=int(metrics.get_sample_value("opentinker_http_requests_open")),
            busy=live.app.state.gate.busy,
            body_bytes=room._size - room._free,
        )


@contextmanager
def nothing_kept(live: Live) -> Iterator[None]:
    """Hold as much as before, soon after the block.

    Raises:
        AssertionError: something is left, and stays.
    """
    before = Held.of(live)
    yield
    try:
        wait_until(lambda: Held.of(live) == before)
    except AssertionError as error:
        raise AssertionError(f"left behind: {Held.of(live)}\nbefore: {before}") from error


def _room(live: Live) -> Any:
    layer = live.app.middleware_stack
    while not hasattr(layer, "_room"):
        layer = getattr(layer, "app", None) or layer._app
    return layer._room
