"""What every training flow does around its phases: open the run, and record how it ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from opentinker_core.config.schema import TrainConfig
from opentinker_core.errors import UsageError
from opentinker_core.policies.types import RunStatus
from opentinker_core.sampling.protocol import BASE
from tasks.evaluate import evaluate
from tasks.open_run import OpenRun, open_run
from tasks.report import link_lineage
from tasks.sessions import end_session, session_of

Phase = Literal["sft", "rl"]


@contextmanager
def training_run(config: TrainConfig, run_id: str | None) -> Iterator[OpenRun]:
    """Open the run; at the end record it as completed, or as failed with the reason.

    A kill leaves it `running`; resumed, it goes on from its last published version.
    """
    run = open_run(config, run_id)
    session = session_of(run.run_id)
    try:
        evaluate(run.run_id, BASE)
        if run.next_step > 1 and evaluates_at(run, run.next_step - 1):
            evaluate(run.run_id, run.version)  # a kill may have come between it and its version
        link_lineage(run.run_id)
        yield run
        link_lineage(run.run_id)
        session.finish(RunStatus.COMPLETED)
    except Exception as error:
        session.finish(RunStatus.FAILED, f"{type(error).__name__}: {error}")
        raise
    except BaseException:  # Ctrl-C, or Prefect cancels the flow run
        session.finish(RunStatus.FAILED, "interrupted")
        raise
    finally:
        end_session(run.run_id)


def check_phases(flow: str, config: TrainConfig, *expected: Phase) -> None:
    """Refuse a config with other phases than `flow` runs.

    Raises:
        UsageError: names the flow, the phases it runs and those of the config.
    """
    given = [name for name in ("sft", "rl") if getattr(config, name) is not None]
    if given != list(expected):
        raise UsageError(
            f"{flow}: the config has the phases {' and '.join(given)}; accepted: {' and '.join(expected)}"
        )


def evaluates_at(run: OpenRun, step: int) -> bool:
    """Whether the version of `step` is evaluated."""
    return session_of(run.run_id).evaluates_at(step)
