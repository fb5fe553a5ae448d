"""`opentinker train`, `resume` and `evaluate`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from opentinker_core.config.agents import AgentsConfig
from opentinker_core.config.any import load_any
from opentinker_core.config.schema import TrainConfig
from opentinker_core.config.settings import Settings
from opentinker_core.errors import UsageError

Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG|KEY=VALUE",
        help="YAML file of the run (examples lie in deployments/configs), or several to train at once; and "
        "settings that replace those of every file, such as rl.steps=50.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's, such as rl.steps=50."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON value on stdout, and nothing else there.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show Prefect's log too.")]


def train(
    arguments: Arguments,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the config and print the plan, without training.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train a policy as a config says: SFT, RL, or both in turn.

    Several configs train their policies at the same time. Those with one base model and
    equal `runtime` settings share the model. A config with `policies` trains all of them in
    one environment. `--json` then prints a list, an object a run.
    """
    from flows.plan import check, check_apart, show

    files, overrides = configs_and_overrides(arguments)
    settings = Settings()
    loaded = [load_any(file, overrides) for file in files]
    joint = next((config for config in loaded if isinstance(config, AgentsConfig)), None)
    if joint is not None and len(loaded) > 1:
        raise UsageError(f"{joint.name}: a joint run is trained alone; accepted: this config and no other")
    configs = [config for config in loaded if isinstance(config, TrainConfig)]
    if joint is not None:
        configs = list(joint.members().values())
    else:
        check_apart(files, configs)
    for config in configs:
        check(config, settings)
    if dry_run:
        show(configs, settings, as_json=as_json)
    elif joint is not None:
        from flows.joint import run_joint

        run_joint(joint, None, configs, settings, as_json=as_json, verbose=verbose)
    elif len(configs) == 1:
        from flows.execution import run_and_report

        run_and_report(configs[0], None, settings, as_json=as_json, verbose=verbose)
    else:
        from flows.together import run_together

        run_together(configs, settings, as_json=as_json, verbose=verbose)


def configs_and_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The config files, which have no `=` in them, and the settings that replace theirs.

    Where all have one, the first is the file: directories may be named like settings.
    """
    files = [argument for argument in arguments if "=" not in argument]
    if not files:
        return [arguments[0]], list(arguments[1:])
    return files, [argument for argument in arguments if "=" in argument]


def resume(
    run: Annotated[str, typer.Argument(help="Id of the run (its start is enough), or its name.")],
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Go on with a run that was stopped or failed, from its last published version.

    The result is the same as that of an undisturbed run. A completed run is only summed up again.
    """
    from flows.execution import resume_and_report

    resume_and_report(run, Settings(), as_json=as_json, verbose=verbose)


def evaluate(
    subject: Annotated[str, typer.Argument(metavar="POLICY[@VERSION]|base", help="What to evaluate.")],
    overrides: Overrides = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", help="Config with the environment; default: that of the version's run."
        ),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Evaluate a version, or the base model, on held-out problems: its mean reward, with an interval.

    Without overrides these are the problems of the run; `evaluation.episodes=500` takes more of them, and
    `environment.args.digits=2` others.
    """
    from flows.execution import evaluate_and_report
    from flows.plan import check, evaluation_config

    settings = Settings()
    training = evaluation_config(subject, config, overrides or (), settings)
    check(training, settings)
    evaluate_and_report(training, subject, settings, as_json=as_json, verbose=verbose)
