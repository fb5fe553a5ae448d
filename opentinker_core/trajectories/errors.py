"""What goes wrong on the trajectory path: an invariant does not hold, or a call comes at the wrong time."""

from opentinker_core.errors import OpenTinkerError


class TrajectoryError(OpenTinkerError):
    """An invariant of a trajectory, datum or batch does not hold."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field = field
        self.value = value
        self.accepted = accepted
        super().__init__(f"{field}: {value!r:.120} is not accepted; accepted: {accepted}")


class TransitionError(TrajectoryError):
    """A call that the builder's state does not allow."""


class TrajectoryStoreError(OpenTinkerError):
    """A stored set is not what its digest or its format says."""
