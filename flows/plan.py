"""What a config would do: checked and told without loading a model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentinker_core.agents.making import check_environments
from opentinker_core.config.loading import load_config, validate_config
from opentinker_core.config.schema import TrainConfig
from opentinker_core.config.settings import Settings
from opentinker_core.errors import UsageError
from opentinker_core.models.bundled import BUNDLED
from opentinker_core.models.source import resolve


def check(config: TrainConfig, settings: Settings) -> None:
    """Refuse a config that cannot run, before anything is started or stored.

    Raises:
        UsageError: unknown model, environment or argument, or SFT data that is not there.
    """
    _check_model(config.policy.base_model, settings)
    check_environments(config)
    if config.sft and config.sft.data != "environment" and not Path(config.sft.data).is_file():
        accepted = "'environment' or the path of a JSONL file"
        raise UsageError(f"sft.data: {config.sft.data!r} is not a file; accepted: {accepted}")


def check_apart(files: Sequence[str], configs: Sequence[TrainConfig]) -> None:
    """Refuse configs that cannot train at the same time: runs of one policy would compete for its versions.

    Raises:
        UsageError: two of them have the same `name`, or the same `policy.name`.
    """
    for field, names in (
        ("policy.name", [config.policy.name for config in configs]),
        ("name", [config.name for config in configs]),
    ):
        for position, name in enumerate(names):
            first = names.index(name)
            if first != position:
                raise UsageError(
                    f"{field}: {name!r} in {files[first]} and again in {files[position]}; accepted: "
                    f"configs of different {field}s (a KEY=VALUE on the command line is for all of them)"
                )


def engine_differences(one: TrainConfig, other: TrainConfig) -> list[str]:
    """The fields for which the runs of two configs need an engine each; none: one process shares one."""
    model = [] if one.policy.base_model == other.policy.base_model else ["policy.base_model"]
    return model + [
        f"runtime.{field}" for field, value in one.runtime if value != getattr(other.runtime, field)
    ]


def engines(configs: Sequence[TrainConfig]) -> list[dict[str, Any]]:
    """For each config: which others, by name, share its engine, and for which fields the rest do not."""
    found = []
    for config in configs:
        differs = {o.name: engine_differences(config, o) for o in configs if o is not config}
        found.append(
            {
                "shared_with": [name for name, fields in differs.items() if not fields],
                "differs": {name: fields for name, fields in differs.items() if fields},
            }
        )
    return found


def _check_model(name: str, settings: Settings) -> None:
    """Refuse an unknown base model, without fetching a known one."""
    on_the_hub = name.count("/") == 1 and not Path(name).expanduser().exists()
    if name not in BUNDLED and not on_the_hub:
        resolve(name, settings.home)


def plan(config: TrainConfig, settings: Settings) -> dict[str, Any]:
    """The steps, episodes and places of a run."""
    phases = []
    if config.sft:
        phases.append({"phase": "sft", "steps": config.sft.steps, "examples_a_step": config.sft.batch_size})
    if config.rl:
        episodes = config.rl.groups * config.rl.group_size
        phases.append({"phase": "rl", "steps": config.rl.steps, "episodes_a_step": episodes})
    evaluation = config.evaluation
    return {
        "name": config.name,
        "policy": config.policy.name,
        "base_model": config.policy.base_model,
        "start": config.policy.start,
        "environment": config.environment.model_dump(),
        "phases": phases,
        "steps": config.steps,
        "evaluation": {
            "problems": evaluation.episodes,
            "episodes": evaluation.episodes * evaluation.samples,
            "times": 2 + (max(0, config.steps - 1) // evaluation.every if evaluation.every else 0),
        },
        "stored_in": {
            "catalog": settings.resolved_catalog_url,
            "snapshots": settings.resolved_snapshot_uri,
            "trajectories": settings.resolved_trajectory_uri,
            "home": str(settings.home.absolute()),
        },
    }


def evaluation_config(
    subject: str, path: Path | None, overrides: Sequence[str], settings: Settings
) -> TrainConfig:
    """The config under which `subject` is evaluated: a file's, or that of the run that made the version.

    Raises:
        UsageError: there is no such version; or it has no run, as `base` has none, and no file is given.
    """
    run = None
    if subject != "base":
        from opentinker_core.runtime.workspace import Workspace

        catalog = Workspace(settings).catalog
        version = catalog.version(subject)
        run = catalog.run(version.run_id) if version.run_id else None
    if path is not None:
        return load_config(path, overrides)
    if run is None:
        raise UsageError(
            f"{subject} belongs to no run; accepted: --config with a file that names the environment"
        )
    return validate_config(run.config, f"config of run {run.run_id}", overrides)


def show(configs: Sequence[TrainConfig], settings: Settings, *, as_json: bool) -> None:
    """Print the plan of a run; of several, also which of them share an engine."""
    planned = [plan(config, settings) for config in configs]
    if len(configs) > 1:
        planned = [one | {"engine": engine} for one, engine in zip(planned, engines(configs), strict=True)]
    if as_json:
        print(json.dumps(planned if len(configs) > 1 else planned[0]))
        return
    for one in planned:
        print(f"{one['name']}: a valid config; nothing was trained")
        for name, value in _rows(one):
            print(f"{name:<14}{value}")


def _rows(planned: dict[str, Any]) -> list[tuple[str, str]]:
    environment = planned["environment"]
    arguments = ", ".join(f"{key}={value!r}" for key, value in environment["args"].items())
    rows = [
        ("policy", f"{planned['policy']} on {planned['base_model']}, from {planned['start']}"),
        ("environment", f"{environment['id']}({arguments})"),
    ]
    for phase in planned["phases"]:
        each = phase.get("episodes_a_step") or phase.get("examples_a_step")
        noun = "episodes" if phase["phase"] == "rl" else "demonstrations"
        rows.append((phase["phase"], f"{phase['steps']} steps of {each} {noun}"))
    evaluation = planned["evaluation"]
    rows.append(("evaluation", f"{evaluation['times']} times {evaluation['episodes']} held-out episodes"))
    if "engine" in planned:
        rows.append(("engine", engine_line(planned["engine"])))
    return rows + [(name, place) for name, place in planned["stored_in"].items()]


def engine_line(engine: dict[str, Any]) -> str:
    """One of `engines` in words."""
    shared = [f"shared with {', '.join(engine['shared_with'])}"] if engine["shared_with"] else []
    differs = [f"not with {name} ({', '.join(fields)} differs)" for name, fields in engine["differs"].items()]
    return "; ".join([*(shared or ["its own"]), *differs])
