"""Another process that keeps policy states on local disk, for tests of death in the middle.

    python -m tests.policies.residency_worker run ROOT SEED
    python -m tests.policies.residency_worker stop ROOT PLACE
    python -m tests.policies.residency_worker save ROOT STEP

`run` changes random states in a small host tier, and prints a state's name and step whenever it is
known to be on disk. `stop` replaces the state `a` (or drops it), prints `stopped` at PLACE and waits to
be killed. `save` replaces the state `a` and prints `saved`.
"""

import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from opentinker_core.policies.residency import local_states
from opentinker_core.policies.residency.host import HostTier
from tests.policies.residency_values import Disk, State, write

NAMES = "abcdef"
SIZE = 20_000


def run(root: Path, seed: str) -> None:
    backing = Disk(root)
    tier = HostTier(backing, 2 * SIZE * 3, timeout_s=0)
    draws = random.Random(seed)
    for name in NAMES:
        if not backing.states.exists(name):
            tier.put(name, State.of_step(0, SIZE))
    while True:
        name = draws.choice(NAMES)
        with tier.lease(name) as state:
            tier.mark_dirty(name)
            state.weights = state.moments = State.of_step(state.step + 1, SIZE).weights
            step = state.step
        if draws.random() < 0.3:
            tier.flush(name)
            print(name, step, flush=True)


def stop(root: Path, place: str) -> None:
    states = local_states.LocalStates(root)
    state = State.of_step(2, SIZE)

    def write_half(folder: Path) -> None:
        (folder / "w").write_bytes(state.weights[: SIZE // 2])
        wait()

    if place == "half written":
        states.save("a", write_half)
    elif place == "dropped":
        _stop_in(shutil, "rmtree", call=1)
        states.drop("a")
    else:
        module: Any = {"flushed": Path, "renamed": local_states, "garbage": shutil}[place]
        name = {"flushed": "rename", "renamed": "_flush", "garbage": "rmtree"}[place]
        # Before the rename `_flush` is called for three files and their folder, `rmtree` with nothing to do.
        _stop_in(module, name, call={"flushed": 1, "renamed": 5, "garbage": 2}[place])
        states.save("a", lambda folder: write(state, folder))


def save(root: Path, step: str) -> None:
    local_states.LocalStates(root).save("a", lambda folder: write(State.of_step(int(step), SIZE), folder))
    print("saved", flush=True)


def wait() -> None:
    print("stopped", flush=True)
    time.sleep(600)


def _stop_in(module: Any, name: str, call: int) -> None:
    """Replace a function by one that waits to be killed at its n-th call; a removal is half done then."""
    original = getattr(module, name)
    calls = 0

    def stopping(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            if name == "rmtree":
                (Path(arguments[0]) / "w").unlink()
            wait()
        return original(*arguments, **options)

    setattr(module, name, stopping)


if __name__ == "__main__":
    {"run": run, "stop": stop, "save": save}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
