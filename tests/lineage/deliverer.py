"""Delivers what is pending below a home, and is killed at an exact call. Run as a program.

    python -m tests.lineage.deliverer HOME CALL COUNT

The process dies after the COUNT-th of the calls named; of `mark_delivered`, before it: between a delivery and
its record.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.tracing.client import TracingClient
from mlflow.tracking._model_registry.client import ModelRegistryClient

from opentinker_core.config.settings import Settings
from opentinker_core.lineage.outbox import open_dispatcher
from opentinker_core.policies.catalog import Catalog
from opentinker_core.runtime.workspace import Workspace


def die_at(name: str, count: int) -> None:
    """Kill this process at the `count`-th call of a method."""
    owners = (Catalog, ModelRegistryClient, TracingClient, MlflowClient)
    owner: Any = next(one for one in owners if hasattr(one, name))
    original, calls = getattr(owner, name), 0

    def call_or_die(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if name == "mark_delivered" and calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, call_or_die)


if __name__ == "__main__":
    die_at(sys.argv[2], int(sys.argv[3]))
    open_dispatcher(Workspace(Settings(home=Path(sys.argv[1])))).deliver_pending()
