"""Running baselines: what episodes of a role brought in the steps before."""

from collections.abc import Mapping
from dataclasses import dataclass

from opentinker_core.errors import UsageError

_PREFIX = "baseline/"
_MEAN, _STEPS = "/mean", "/steps"


@dataclass(frozen=True)
class RunningMean:
    """A moving average over steps: the newest weighs most, each earlier one `momentum` times the next."""

    mean: float
    steps: int
    """How many it is made of; those without a known reward of the role do not count."""

    def after(self, value: float, momentum: float) -> "RunningMean":
        """With the value of one more step; the weights of all steps sum to 1 from the first on."""
        # As Adam's moments (arXiv:1412.6980) with their correction: without it the first steps
        # would be drawn to a zero that nobody observed.
        share = (1 - momentum) / (1 - momentum ** (self.steps + 1))
        return RunningMean(self.mean + share * (value - self.mean), self.steps + 1)


def to_metrics(running: Mapping[str, RunningMean]) -> dict[str, float]:
    """Role → running baseline as metrics of a version, to be read back with `from_metrics`."""
    result: dict[str, float] = {}
    for role, one in running.items():
        result[f"{_PREFIX}{role}{_MEAN}"] = one.mean
        result[f"{_PREFIX}{role}{_STEPS}"] = float(one.steps)
    return result


def from_metrics(metrics: Mapping[str, float]) -> dict[str, RunningMean]:
    """The running baselines among the metrics of a version, to the bit; other metrics are ignored.

    Raises:
        UsageError: a baseline without its number of steps.
    """
    result = {}
    for name, value in metrics.items():
        if name.startswith(_PREFIX) and name.endswith(_MEAN):
            role = name.removeprefix(_PREFIX).removesuffix(_MEAN)
            steps = metrics.get(f"{_PREFIX}{role}{_STEPS}")
            if steps is None:
                raise UsageError(f"metrics: {name!r} is there without {_PREFIX}{role}{_STEPS}")
            result[role] = RunningMean(value, int(steps))
    return result
