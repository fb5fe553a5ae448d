"""Run a training flow in this process, with a progress bar, and report its result."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from flows.orchestrator import Orchestrator, orchestrator, without_heartbeat
from flows.summary import evaluation_object, print_summary, save_curve, summarize
from flows.watching import Watcher, watching
from opentinker_core.config.schema import TrainConfig
from opentinker_core.config.settings import Settings
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.policies.types import Run, RunStatus
from opentinker_core.runtime.workspace import Workspace

Emit = Callable[[Any], None]
"""Prints the value that `--json` promises."""


def run_and_report(
    config: TrainConfig, run_id: str | None, settings: Settings, *, as_json: bool, verbose: bool
) -> None:
    """Train as `config` says, or go on with `run_id`; print the result.

    Raises:
        OpenTinkerError: the run failed; if it was opened, stderr says how to go on with it.
    """
    settings.home.mkdir(parents=True, exist_ok=True)
    with (
        stdout_kept_for_json(as_json) as emit,
        orchestrator(settings.home, verbose=verbose) as prefect,
        watching([config]) as (watcher,),
    ):
        watcher.say("loading")
        run_flow = flow_of(config)  # the imports, while the server starts
        prefect.wait()
        workspace = Workspace(settings)
        if run_id is None:
            tell_of_earlier_versions(workspace, config)
        with how_to_go_on(watcher), failures_of(prefect), without_heartbeat(), warnings_on_stderr():
            run_id = run_flow(config, run_id=run_id)
        watcher.close()
        report(workspace, workspace.catalog.run(run_id), emit)


def tell_of_earlier_versions(workspace: Workspace, config: TrainConfig) -> None:
    """Say that the policy has versions already, from which a run from the base model does not go on."""
    name = config.policy.name
    known = {policy.name for policy in workspace.catalog.policies()}
    latest = workspace.catalog.aliases(name).get("latest") if name in known else None
    if latest is not None and config.policy.start == "base":
        text = f"{name}@{latest} exists; this run begins anew from the base model, with the numbers after it"
        print(
            f"{text} (policy.start=latest goes on from it, policy.name=... keeps them apart)", file=sys.stderr
        )


def resume_and_report(reference: str, settings: Settings, *, as_json: bool, verbose: bool) -> None:
    """Go on with a run by id, start of id, or name; a completed one is only reported.

    Of a joint run, by its name or that of a member, all members go on.

    Raises:
        NotFoundError: there is no such run.
    """
    workspace = Workspace(settings)
    together = workspace.catalog.joint_runs(reference)  # by the name of a joint run, or its id
    run = together[0] if together else workspace.catalog.run(reference)
    if run.config.get("joint"):
        from flows.joint import resume_joint

        resume_joint(run, settings, as_json=as_json, verbose=verbose)
        return
    if run.status is RunStatus.COMPLETED:
        with stdout_kept_for_json(as_json) as emit:
            report(workspace, run, emit)
        return
    config = TrainConfig.model_validate(run.config)
    run_and_report(config, run.run_id, settings, as_json=as_json, verbose=verbose)


def evaluate_and_report(
    config: TrainConfig, subject: str, settings: Settings, *, as_json: bool, verbose: bool
) -> None:
    """Evaluate `subject` as `config` says, and print the result.

    Raises:
        OpenTinkerError: it could not be evaluated.
    """
    settings.home.mkdir(parents=True, exist_ok=True)
    with (
        stdout_kept_for_json(as_json) as emit,
        orchestrator(settings.home, verbose=verbose) as prefect,
        Console(stderr=True).status(f"evaluating {subject}"),
    ):
        from flows.evaluate import evaluate_policy

        prefect.wait()
        with failures_of(prefect), without_heartbeat(), warnings_on_stderr():
            evaluation = evaluate_policy(config, subject)
        result = evaluation_object(evaluation)
    if emit is not None:
        emit(result)
    else:
        low, high = result["interval"]
        text = f"[bold]{evaluation.subject}[/] in {evaluation.environment}: [bold]{evaluation.mean:.3f}[/]"
        Console().print(f"{text} ({low:.3f} to {high:.3f} at 95 %, n = {evaluation.episodes})")


def report(workspace: Workspace, run: Run, emit: Emit | None) -> None:
    """Save the curve, then print the result: as JSON through `emit`, else for people."""
    result = result_of(workspace, run)
    if emit is not None:
        emit(result)
    else:
        print_result(result)


def result_of(workspace: Workspace, run: Run) -> dict[str, Any]:
    """What came of `run`, with the path of its curve, which is saved."""
    summary = summarize(workspace, run)
    png = save_curve(workspace.home / "runs" / run.run_id / "reward.png", summary)
    return summary | {"curve": str(png) if png else None}


def print_result(result: dict[str, Any]) -> None:
    """Print a `result_of` a run for people."""
    print_summary(Console(), result, Path(result["curve"]) if result["curve"] else None)


@contextmanager
def stdout_kept_for_json(as_json: bool) -> Iterator[Emit | None]:
    """For `--json`: a function that prints the one value; whatever else is printed goes to stderr."""
    if not as_json:
        yield None
        return
    stdout = sys.stdout

    def emit(value: Any) -> None:
        print(json.dumps(value), file=stdout, flush=True)

    with redirect_stdout(sys.stderr):
        yield emit


@contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Show the library's own warnings; Prefect's console handler is silent here."""
    from rich.logging import RichHandler

    handler = RichHandler(logging.WARNING, Console(stderr=True), show_path=False, show_time=False)
    logger = logging.getLogger("opentinker_core")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def failures_of(prefect: Orchestrator) -> Iterator[None]:
    """Tell failures of Prefect, and of the way to it, as such.

    A full disk fails the run and then Prefect's record of the failure: the first of them is told.
    """
    import httpx
    from prefect.exceptions import PrefectException

    logging.raiseExceptions = False  # else Prefect writes to stderr when its log cannot be sent
    try:
        yield
    except (httpx.HTTPError, PrefectException) as error:
        if (first := _first_failure(error)) is not None:
            raise first from error
        text = str(error).splitlines()[0] if str(error) else ""
        raise OpenTinkerError(f"Prefect at {prefect.api_url}: {type(error).__name__}: {text}") from error


def _first_failure(error: BaseException) -> Exception | None:
    """The failure that was being handled when `error` came, if it was not Prefect's."""
    found = None
    while (context := error.__context__) is not None:
        error = context
        if isinstance(error, OpenTinkerError) or (isinstance(error, OSError) and error.filename):
            found = error
    return found


@contextmanager
def how_to_go_on(watcher: Watcher) -> Iterator[None]:
    """Say how to resume a run that was opened and then stopped."""
    try:
        yield
    except KeyboardInterrupt:
        _hint(watcher, "interrupted")
        raise typer.Exit(130) from None
    except OpenTinkerError as error:
        if not isinstance(error, UsageError):  # the same request would be wrong again
            _hint(watcher, "stopped")
        raise


def _hint(watcher: Watcher, what: str) -> None:
    watcher.close()
    go_on = f"; go on with: opentinker resume {watcher.run_id}" if watcher.run_id else ""
    print(f"opentinker: {what}{go_on}", file=sys.stderr)


def flow_of(config: TrainConfig) -> Callable[..., str]:
    """The flow for the phases of `config`."""
    if config.sft is None:
        from flows.train_rl import train_rl

        return train_rl
    if config.rl is None:
        from flows.train_sft import train_sft

        return train_sft
    from flows.warm_up_then_rl import warm_up_then_rl

    return warm_up_then_rl
