"""What goes wrong: codes that server and client share, and the errors that the client raises."""

from enum import StrEnum
from typing import Any


class Code(StrEnum):
    """The `code` of an error's answer."""

    BAD_REQUEST = "bad_request"
    """The body, the path or the method is not accepted."""
    UNAUTHORIZED = "unauthorized"
    """No key, or an unknown one."""
    UNKNOWN_ENVIRONMENT = "unknown_environment"
    """An id that this server does not serve."""
    REFUSED_ARGUMENTS = "refused_arguments"
    """The environment cannot be made so."""
    TOO_LARGE = "too_large"
    """A body is larger than is accepted."""
    TOO_SLOW = "too_slow"
    """The body did not come in time; worth another try."""
    TOO_MANY_SESSIONS = "too_many_sessions"
    """No more can be opened until some end; worth another try."""
    OUT_OF_ORDER = "out_of_order"
    """The number of a call is not the next one."""
    SESSION_LOST = "session_lost"
    """The session has ended, or never was; `reason` says why (see `Reason`)."""
    ENVIRONMENT_RAISED = "environment_raised"
    """The environment's code raised; the session goes on."""
    ENVIRONMENT_BROKEN = "environment_broken"
    """The environment answered something that the protocol does not know, or that is too large."""
    CALL_FAILED = "call_failed"
    """What belongs to no session failed with its shard; worth another try, unless it ran out of time."""
    UNAVAILABLE = "unavailable"
    """The server is stopping, or its shards are starting; worth another try."""
    INTERNAL = "internal"
    """A defect of the server."""


class Reason(StrEnum):
    """Why a session ended."""

    CLOSED = "closed"
    """Its client closed it."""
    LEASE_EXPIRED = "lease_expired"
    """Nothing was heard of its client for longer than the lease."""
    CALL_TIMED_OUT = "call_timed_out"
    """A call took longer than calls may."""
    SHARD_ENDED = "shard_ended"
    """The process that it ran in ended, by itself or for another session's call."""
    NOT_OPENED = "not_opened"
    """Opening it failed."""
    STOPPED = "stopped"
    """The server was stopped."""
    UNKNOWN = "unknown"
    """It ended long ago, in a server that ran before, or was never there."""


STATUS: dict[Code, int] = {
    Code.BAD_REQUEST: 400,
    Code.UNAUTHORIZED: 401,
    Code.UNKNOWN_ENVIRONMENT: 404,
    Code.REFUSED_ARGUMENTS: 400,
    Code.TOO_LARGE: 413,
    Code.TOO_SLOW: 408,
    Code.TOO_MANY_SESSIONS: 429,
    Code.OUT_OF_ORDER: 409,
    Code.SESSION_LOST: 410,
    Code.ENVIRONMENT_RAISED: 422,
    Code.ENVIRONMENT_BROKEN: 422,
    Code.CALL_FAILED: 502,
    Code.UNAVAILABLE: 503,
    Code.INTERNAL: 500,
}
"""HTTP status by code."""

WORTH_ANOTHER_TRY = frozenset({Code.TOO_SLOW, Code.TOO_MANY_SESSIONS, Code.UNAVAILABLE})
"""Codes after which the same request, a little later, may succeed."""


class Refusal(Exception):  # noqa: N818 - an answer, raised
    """In the server: the answer is an error."""

    def __init__(self, code: Code, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.status = STATUS[code]
        self.details = details

    def body(self) -> dict[str, Any]:
        """JSON values."""
        return {"error": {"code": str(self.code), "message": str(self), **self.details}}


class RemoteError(RuntimeError):
    """A remote environment gave no result; the episode that runs on it has failed."""


class UnreachableError(RemoteError):
    """The server gave no answer, however often it was asked."""


class SessionLostError(RemoteError):
    """The session ended on the server; `reason` is a `Reason`. `reset` opens another."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class EnvironmentRaisedError(RemoteError):
    """The environment's own code raised there, or answered what the protocol does not know."""


class EnvironmentValueError(EnvironmentRaisedError, ValueError):
    """The environment's own code raised a ValueError: it does not accept what it was given."""


class RefusedError(RemoteError):
    """The server does not accept the request: its key, its size, or that there are too many sessions."""
