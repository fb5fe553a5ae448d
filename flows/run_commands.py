"""`opentinker train`, `resume` and `evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from opentinker_core.config.loading import load_config
from opentinker_core.config.settings import Settings

ConfigPath = Annotated[
    Path, typer.Argument(help="YAML file of the run; examples lie in deployments/configs.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's, such as rl.steps=50."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show Prefect's log too.")]


def train(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the config and print the plan, without training.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train a policy as a config says: SFT, RL, or both in turn."""
    from flows.plan import check, show

    training = load_config(config, overrides or ())
    settings = Settings()
    check(training, settings)
    if dry_run:
        show(training, settings, as_json=as_json)
        return
    from flows.execution import run_and_report

    run_and_report(training, None, settings, as_json=as_json, verbose=verbose)


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
