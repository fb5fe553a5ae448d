"""The progress bar of a run on stderr; plain lines where stderr is no terminal."""

from collections.abc import Iterator
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

_SHOWN = {"reward_mean": "reward", "loss": "loss"}
"""The first of these that a step has: the on-policy loss of RL is zero up to its gradient."""


class Watcher:
    """Shows where a run stands, from what its tasks tell."""

    def __init__(self, steps: int) -> None:
        self.run_id: str | None = None
        """Known once the run is open."""
        self._console = Console(stderr=True)
        self._steps = steps
        self._done = -1
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeElapsedColumn(),
            TextColumn("[dim]left[/]"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=steps, metrics="")
        self._bar.start()

    def say(self, doing: str) -> None:
        """Show what goes on."""
        self._bar.update(self._task, description=doing)

    def step(self, run_id: str, step: int, doing: str, metrics: dict[str, float]) -> None:
        """Show that `step` steps are done."""
        if self.run_id is None:
            self._console.print(f"[dim]run {run_id}[/]")
        self.run_id = run_id
        shown = ((label, metrics[name]) for name, label in _SHOWN.items() if name in metrics)
        text = next((f"{label} {value:.3g}" for label, value in shown), "")
        if text:
            self._bar.update(self._task, metrics=text)
        self._bar.update(self._task, description=doing, completed=step)
        self._line(step, doing, text)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()

    def _line(self, step: int, doing: str, text: str) -> None:
        """Without a terminal: a line for every tenth of the steps."""
        tenth = step * 10 // self._steps
        if not self._console.is_terminal and text and tenth > self._done:
            self._done = tenth
            self._console.print(f"{doing} step {step}/{self._steps}  {text}", highlight=False)


@contextmanager
def watching(steps: int) -> Iterator[Watcher]:
    """A watcher of the run that starts in this process."""
    from tasks.progress import Progress as Told
    from tasks.progress import listening

    watcher = Watcher(steps)

    def listener(told: Told) -> None:
        watcher.step(told.run_id, told.step, told.doing, dict(told.metrics))

    try:
        with listening(listener):
            yield watcher
    finally:
        watcher.close()
