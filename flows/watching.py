"""The progress bars of runs on stderr, one a run; plain lines where stderr is no terminal."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from opentinker_core.config.schema import TrainConfig

_SHOWN = {"reward_mean": "reward", "loss": "loss"}
"""The first of these that a step has: the on-policy loss of RL is zero up to its gradient."""


class Watcher:
    """Shows where a run stands, from what its tasks tell, on a display that it may share with others.

    Args:
        label: What stands before everything that is shown of this run.
    """

    def __init__(self, bar: Progress, steps: int, label: str = "") -> None:
        self.run_id: str | None = None
        """Known once the run is open."""
        self._bar = bar
        self._console = bar.console
        self._steps = steps
        self._label = label
        self._done = -1
        self._task = bar.add_task(f"{label}starting", total=steps, metrics="")

    def say(self, doing: str) -> None:
        """Show what goes on."""
        self._bar.update(self._task, description=f"{self._label}{doing}")

    def note(self, text: str) -> None:
        """Print a line beside the bars."""
        self._console.print(text, highlight=False, markup=False)

    def end(self, how: str) -> None:
        """Show that this run is over, while others go on."""
        self.say(how)
        self._bar.stop_task(self._task)
        self.note(f"{self._label}{how}")

    def step(self, run_id: str, step: int, doing: str, metrics: dict[str, float]) -> None:
        """Show that `step` steps are done."""
        if self.run_id is None:
            self._console.print(f"[dim]{self._label}run {run_id}[/]")
        self.run_id = run_id
        shown = ((label, metrics[name]) for name, label in _SHOWN.items() if name in metrics)
        text = next((f"{label} {value:.3g}" for label, value in shown), "")
        if text:
            self._bar.update(self._task, metrics=text)
        self._bar.update(self._task, description=f"{self._label}{doing}", completed=step)
        self._line(step, doing, text)

    def close(self) -> None:
        """Take the display away."""
        self._bar.stop()

    def _line(self, step: int, doing: str, text: str) -> None:
        """Without a terminal: a line for every tenth of the steps."""
        tenth = step * 10 // self._steps
        if not self._console.is_terminal and text and tenth > self._done:
            self._done = tenth
            line = f"{self._label}{doing} step {step}/{self._steps}  {text}"
            self._console.print(line, highlight=False)


@contextmanager
def watching(configs: Sequence[TrainConfig]) -> Iterator[list[Watcher]]:
    """A watcher for each of the runs, of different names, that start in this process."""
    from tasks.progress import Progress as Told
    from tasks.progress import listening

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[metrics]}"),
        TimeElapsedColumn(),
        TextColumn("[dim]left[/]"),
        TimeRemainingColumn(),
    )
    several = len(configs) > 1
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        watchers = {
            config.name: Watcher(bar, config.steps, f"{config.name}: " if several else "")
            for config in configs
        }

        def listener(told: Told) -> None:
            watchers[told.run_name].step(told.run_id, told.step, told.doing, dict(told.metrics))

        with listening(listener):
            yield list(watchers.values())
