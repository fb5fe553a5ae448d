"""How every phase runs as a Prefect task."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE

P = ParamSpec("P")
R = TypeVar("R")


def phase(name: str, run_name: str = "") -> Callable[[Callable[P, R]], Task[P, R]]:
    """Make a function the task `name`, whose runs are shown as `run_name` (a template over its arguments).

    No cache and no stored result: what a phase brought about is in the catalog, and the session
    looks there first, so that a resumed run repeats nothing that was finished. No retries: an
    optimizer step that failed half-way has changed the weights in memory. A run is retried as a
    whole (`opentinker resume`, or Prefect's retry of the flow run); its new session loads the last
    published state.
    """
    options: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False, "retries": 0}
    return task(name=name, task_run_name=run_name or name, **options)
