"""Open a run: create it, or find where it stands."""

from dataclasses import dataclass

from prefect.runtime import flow_run

from opentinker_core.config.schema import TrainConfig
from tasks.phase import phase
from tasks.progress import Progress, tell
from tasks.sessions import start_session


@dataclass(frozen=True)
class OpenRun:
    """What a flow needs to know of its run to put the phases in order."""

    run_id: str
    name: str
    config: TrainConfig
    version: str
    """The version the run goes on from."""
    next_step: int

    @property
    def sft_chunks(self) -> list[tuple[int, int]]:
        """The remaining SFT steps as (first, last), each ending where a version is published."""
        sft = self.config.sft
        if sft is None:
            return []
        ends = [*range(sft.publish_every, sft.steps, sft.publish_every), sft.steps]
        starts = [1, *(end + 1 for end in ends)]
        return [(start, end) for start, end in zip(starts, ends, strict=False) if end >= self.next_step]

    @property
    def rl_steps(self) -> range:
        """The remaining RL steps; they are counted after those of the SFT phase."""
        first = self.config.steps - (self.config.rl.steps if self.config.rl else 0) + 1
        return range(max(first, self.next_step), self.config.steps + 1)


@phase("open-run")
def open_run(config: TrainConfig | None, run_id: str | None = None) -> OpenRun:
    """Start the run, or go on with `run_id`, or with the run of this flow run when it is retried."""
    session = start_session(config, run_id, flow_run.get_id())
    run = session.run
    tell(Progress(run.run_id, run.name, session.version.step, session.config.steps, "starting"))
    return OpenRun(run.run_id, run.name, session.config, session.version.ref, session.next_step)
