"""How mirroring an event to MLflow can fail."""

from opentinker_core.errors import OpenTinkerError


class MirrorOutageError(OpenTinkerError):
    """MLflow cannot be reached or written just now; the event itself is fine and is to be sent again."""


class EventError(OpenTinkerError):
    """This event cannot be mirrored, for a reason of its own; others can."""
