"""Run the flow of a joint run in this process, with a bar a policy, and report the result of each."""

from collections.abc import Sequence

from flows.execution import (
    failures_of,
    how_to_go_on,
    print_result,
    result_of,
    stdout_kept_for_json,
    tell_of_earlier_versions,
    warnings_on_stderr,
)
from flows.orchestrator import orchestrator, without_heartbeat
from flows.watching import watching
from opentinker_core.config.agents import AgentsConfig
from opentinker_core.config.schema import TrainConfig
from opentinker_core.config.settings import Settings
from opentinker_core.policies.types import Run, RunStatus
from opentinker_core.runtime.workspace import Workspace


def run_joint(
    config: AgentsConfig | None,
    joint_id: str | None,
    members: Sequence[TrainConfig],
    settings: Settings,
    *,
    as_json: bool,
    verbose: bool,
) -> None:
    """Train the policies of `config` together, or go on with `joint_id`; print the result of each.

    `members`: their training configs, for what is shown.

    Raises:
        OpenTinkerError: the run failed; if it was opened, stderr says how to go on with it.
    """
    settings.home.mkdir(parents=True, exist_ok=True)
    with (
        stdout_kept_for_json(as_json) as emit,
        orchestrator(settings.home, verbose=verbose) as prefect,
        watching(members) as watchers,
    ):
        for watcher in watchers:
            watcher.say("loading")
        from flows.train_agents import train_agents  # the imports, while the server starts

        prefect.wait()
        workspace = Workspace(settings)
        for member in members if joint_id is None else ():
            tell_of_earlier_versions(workspace, member)
        with how_to_go_on(watchers[0]), failures_of(prefect), without_heartbeat(), warnings_on_stderr():
            run_ids = train_agents(config, joint_id)
        watchers[0].close()
        results = [result_of(workspace, workspace.catalog.run(run_id)) for run_id in run_ids]
        if emit is not None:
            emit(results)
        else:
            for result in results:
                print_result(result)


def resume_joint(run: Run, settings: Settings, *, as_json: bool, verbose: bool) -> None:
    """Go on with the joint run that `run` belongs to; a completed one is only reported."""
    workspace = Workspace(settings)
    runs = workspace.catalog.joint_runs(run.config["joint"]["joint_id"])
    if all(one.status is RunStatus.COMPLETED for one in runs):
        results = [result_of(workspace, one) for one in runs]
        with stdout_kept_for_json(as_json) as emit:
            if emit is not None:
                emit(results)
                return
        for result in results:
            print_result(result)
        return
    members = [TrainConfig.model_validate(one.config) for one in runs]
    run_joint(None, run.config["joint"]["joint_id"], members, settings, as_json=as_json, verbose=verbose)
