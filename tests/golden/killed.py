"""The `opentinker` command, killed with SIGKILL at an exact point of a phase. Run as a program.

    python -m tests.golden.killed POINT COUNT train CONFIG ...

`POINT` names a call below; the process dies around the COUNT-th of them.
"""

import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def _die_around(owner: Any, name: str, count: int, *, after: bool) -> None:
    """Kill this process at the `count`-th call of `owner.name`: before it begins, or once it returned."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = itertools.count(1)  # of several threads

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = next(calls)
        if call == count and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if call == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, wrapped)


def _arm(point: str, count: int) -> None:
    from opentinker_core.policies.catalog import Catalog
    from opentinker_core.runtime import joint, session
    from opentinker_core.runtime.policy_states import PolicyStates
    from opentinker_core.snapshots.store import BlobSnapshotStore
    from opentinker_core.training.trainer import Trainer
    from opentinker_core.trajectories.store import TrajectoryStore

    owner, name, after = {
        "rollout": (session, "play", True),  # sampled, nothing stored
        "stored": (TrajectoryStore, "save", True),  # stored, not yet in the catalog
        "update": (Trainer, "optim_step", True),  # weights stepped in memory, nothing published
        "snapshot": (BlobSnapshotStore, "publish", True),  # one of two snapshots published
        "record": (Catalog, "publish_version", False),  # both published, no version recorded
        "recorded": (PolicyStates, "publish", True),  # recorded, the sampler not refreshed
        "evaluation": (session.RunSession, "evaluate", False),  # the version is all there, not evaluated
        "joint evaluation": (joint.JointSession, "evaluate", False),
    }[point]
    _die_around(owner, name, count, after=after)


def main() -> None:
    from flows import cli

    _arm(sys.argv[1], int(sys.argv[2]))
    sys.argv = ["opentinker", *sys.argv[3:]]
    cli.main()
