"""Train several policies at once: the flow of each in a thread of its own, over shared engines."""

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import typer

from flows.execution import (
    failures_of,
    flow_of,
    print_result,
    result_of,
    stdout_kept_for_json,
    tell_of_earlier_versions,
    warnings_on_stderr,
)
from flows.orchestrator import Orchestrator, orchestrator, without_heartbeat
from flows.plan import engine_line, engines
from flows.watching import Watcher, watching
from opentinker_core.config.schema import TrainConfig
from opentinker_core.config.settings import Settings
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.runtime.workspace import Workspace


@dataclass(frozen=True, eq=False)
class _Member:
    """One of the runs, and what shows it."""

    config: TrainConfig
    watcher: Watcher

    @property
    def name(self) -> str:
        return self.config.name


def run_together(configs: Sequence[TrainConfig], settings: Settings, *, as_json: bool, verbose: bool) -> None:
    """Train as `configs`, of different policies, say; print the result of each.

    Where a run fails the others go on. Ctrl-C stops each at the end of what it is doing; a second one
    ends the process at once.

    Raises:
        typer.Exit: 1: a run failed; 130: they were interrupted. stderr says how to go on with each.
    """
    settings.home.mkdir(parents=True, exist_ok=True)
    with (
        stdout_kept_for_json(as_json) as emit,
        orchestrator(settings.home, verbose=verbose) as prefect,
        watching(configs) as watchers,
    ):
        members = [_Member(*pair) for pair in zip(configs, watchers, strict=True)]
        flows = [flow_of(config) for config in configs]  # the imports, while the server starts
        prefect.wait()
        workspace = Workspace(settings)
        _tell_beforehand(workspace, configs)
        jobs = [_job(member, flow, prefect) for member, flow in zip(members, flows, strict=True)]
        with without_heartbeat(), warnings_on_stderr():
            ended, interrupted = _run_all(members, jobs)
        watchers[0].close()
        results = [_result(workspace, *pair) for pair in zip(members, ended, strict=True)]
        if emit is not None:
            emit(results)
        else:
            for result in results:
                if "error" not in result:
                    print_result(result)
        for member, future in zip(members, ended, strict=True):
            _tell_failure(member, future.exception())
        if any(future.exception() for future in ended):
            raise typer.Exit(130 if interrupted else 1)


def _tell_beforehand(workspace: Workspace, configs: Sequence[TrainConfig]) -> None:
    for config, engine in zip(configs, engines(configs), strict=True):
        tell_of_earlier_versions(workspace, config)
        if engine["differs"]:
            print(f"{config.name}: engine {engine_line(engine)}", file=sys.stderr)


def _job(member: _Member, flow: Callable[..., str], prefect: Orchestrator) -> Callable[[], str]:
    """What the thread of `member` does; gives the id of the completed run."""

    def job() -> str:
        member.watcher.say("loading")
        try:
            with failures_of(prefect):
                run_id = flow(member.config)
        except BaseException as error:
            member.watcher.end(f"stopped: {_message(error)}")
            raise
        member.watcher.end("done")
        return run_id

    return job


def _run_all(members: Sequence[_Member], jobs: Sequence[Callable[[], str]]) -> tuple[list[Future[str]], bool]:
    """Run all jobs to their ends; gives them, ended, and whether Ctrl-C came."""
    threads = ThreadPoolExecutor(len(jobs), thread_name_prefix="run")
    with _stopping_on_request() as stop:
        ended = [threads.submit(copy_context().run, job) for job in jobs]
        try:
            wait(ended)
            return ended, False
        except KeyboardInterrupt:
            stop.set()
        try:
            members[0].watcher.note("stopping each run after what it is doing; Ctrl-C again ends all now")
            wait(ended)
        except KeyboardInterrupt:
            _end_at_once(members, ended)
        return ended, True


@contextmanager
def _stopping_on_request() -> Iterator[threading.Event]:
    """An event; once it is set, each run is interrupted when it next tells of its progress.

    Only the main thread gets Ctrl-C. A run that stops between two operations leaves nothing half done.
    """
    from tasks.progress import Progress, listening

    stop = threading.Event()

    def listener(_: Progress) -> None:
        if stop.is_set():
            raise KeyboardInterrupt

    with listening(listener):
        yield stop


def _end_at_once(members: Sequence[_Member], ended: Sequence[Future[str]]) -> None:
    """End the process without waiting for its threads, as a kill does, which costs a run a step at most."""
    members[0].watcher.close()
    for member, future in zip(members, ended, strict=True):
        _tell_failure(member, future.exception() if future.done() else KeyboardInterrupt())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)


def _result(workspace: Workspace, member: _Member, ended: Future[str]) -> dict[str, Any]:
    """What came of a run; of one that failed, why, and the id to go on with (None: it was not opened)."""
    error = ended.exception()
    if error is None:
        return result_of(workspace, workspace.catalog.run(ended.result()))
    return {
        "run": member.watcher.run_id,
        "name": member.name,
        "status": "failed",
        "policy": member.config.policy.name,
        "error": _message(error),
    }


def _tell_failure(member: _Member, error: BaseException | None) -> None:
    """Say on stderr why a run ended, if it failed, and how to go on with it."""
    if error is None:
        return
    what = "interrupted"
    if not isinstance(error, KeyboardInterrupt):
        what = "stopped"
        if not isinstance(error, OpenTinkerError | OSError):  # a mistake of ours
            traceback.print_exception(error)
        print(f"opentinker: {member.name}: {_message(error)}", file=sys.stderr)
    if not isinstance(error, UsageError):  # the same request would be wrong again
        run_id = member.watcher.run_id
        go_on = f"; go on with: opentinker resume {run_id}" if run_id else " before it began"
        print(f"opentinker: {member.name}: {what}{go_on}", file=sys.stderr)


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, OpenTinkerError) else f"{type(error).__name__}: {error}"
