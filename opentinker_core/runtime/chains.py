"""What a failure means for what comes behind it on the same policy.

The client of a policy submits ahead: a `forward_backward`, the `optim_step` that uses its gradients,
the next `forward_backward`. When one that trains (`operations.TRAINS`) fails or is cancelled:

1. What waits behind it on that policy fails with `DependencyError`, up to the next `create` or
   `load`: it was submitted in the belief that all before it would work. (The scheduler does this.)
2. Whenever it comes, the next `optim_step` is not taken but fails with `DependencyError` and discards
   the gradients: some of those it was to use are missing. Then training goes on as usual.
3. If the state itself is spoilt (an `optim_step` failed midway) or is not the one that was asked for
   (a `create` or `load` failed), everything fails until a `create` or `load` succeeds.

A client that has seen a failure and goes on from there says so (`acknowledge`); then 2 does not
apply, and the next `optim_step` uses the gradients of those that succeeded. `Scheduler.call` does it
by itself, because its caller got the error before it could submit anything else.
"""

from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

from opentinker_core.errors import UsageError
from opentinker_core.runtime.operations import REPLACES_STATE, TRAINS, DependencyError, Kind, Lane, Operation


@dataclass(frozen=True)
class _Break:
    """Why a policy cannot go on as if nothing had happened."""

    cause: Operation[Any]
    error: BaseException
    spoilt: bool
    """The state is damaged, not just gradients missing or a request refused."""

    @property
    def blocks_all(self) -> bool:
        return self.spoilt or self.cause.kind in REPLACES_STATE


class Chains:
    """The policies on which something failed. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._broken: dict[Lane, _Break] = {}

    def refusal(self, operation: Operation[Any]) -> DependencyError | None:
        """The error of `operation` if it must not be run."""
        broken = self._broken.get(operation.lane)
        if broken is None or operation.kind in REPLACES_STATE:
            return None
        if broken.blocks_all:
            return DependencyError(operation, broken.cause, broken.error, "accepted now: create or load")
        if operation.kind is Kind.OPTIM_STEP:
            return DependencyError(operation, broken.cause, broken.error, "its gradients are discarded")
        return None

    def failed(self, operation: Operation[Any], error: BaseException) -> bool:
        """Note that `operation` failed, was cancelled or was not run.

        Returns:
            Whether the gradients of its policy are to be discarded.
        """
        lane, broken = operation.lane, self._broken.get(operation.lane)
        if operation.kind not in TRAINS or (broken is not None and broken.blocks_all):
            return False
        if isinstance(error, DependencyError):
            if operation.kind is Kind.OPTIM_STEP:
                self._broken.pop(lane, None)
                return True
            self._broken[lane] = _Break(error.cause, error.error, spoilt=False)
        else:
            untouched = operation.kind is Kind.FORWARD_BACKWARD or isinstance(
                error, UsageError | CancelledError
            )
            self._broken[lane] = _Break(operation, error, spoilt=not untouched)
        return False

    def spoilt(self, operation: Operation[Any], error: BaseException) -> None:
        """Note that the gradients could not be discarded after `operation` was not run."""
        self._broken[operation.lane] = _Break(operation, error, spoilt=True)

    def succeeded(self, operation: Operation[Any]) -> None:
        """Note that `operation` was run: a whole new state mends everything."""
        if operation.kind in REPLACES_STATE:
            self._broken.pop(operation.lane, None)

    def acknowledge(self, operation: Operation[Any]) -> None:
        """Note that the client knows that `operation` failed; does not mend a spoilt state."""
        broken = self._broken.get(operation.lane)
        if broken is not None and broken.cause is operation and not broken.spoilt:
            del self._broken[operation.lane]
