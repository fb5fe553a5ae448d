"""Errors that the service answers with: their status, who is at fault, and the body a client gets.

The official SDK asks again after 408, 409, 429 and 5xx, for minutes; so what will not change by asking again
has another status, and 409 is never used.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from opentinker_core.errors import NotFoundError, OpenTinkerError, UsageError
from opentinker_core.policies.database import DatabaseError

_LOG = logging.getLogger(__name__)

NO_DATABASE = "the server's database does not answer; ask again in a moment"
"""What clients are told instead of where it is and what it said."""
Category = Literal["user", "server", "unknown"]


class ServiceError(OpenTinkerError):
    """A call is not served: `status` of HTTP, and `category` as the Tinker API has it."""

    status = 500
    category: Category = "server"
    retry_after: float | None = None
    """Seconds after which the call may succeed."""


class Refused(ServiceError):  # noqa: N818 - what it says of the call
    """The call is wrong and stays wrong."""

    status = 400
    category: Category = "user"


class RefusedAgain(ServiceError):  # noqa: N818 - what it says of the call
    """What was refused for good before; without the first error, whose traceback holds the whole request."""

    def __init__(self, answer: "Answer") -> None:
        super().__init__(answer.message)
        self.status, self.category = answer.status, answer.category


class Unauthenticated(ServiceError):  # noqa: N818 - what it says of the call
    """There is no key, or it is not a valid one."""

    status = 401
    category: Category = "user"


class Forbidden(ServiceError):  # noqa: N818 - what it says of the call
    """The key's role does not allow it, or a quota is used up that does not fill again by itself."""

    status = 403
    category: Category = "user"


class NotFound(ServiceError):  # noqa: N818 - what it says of the call
    """There is no such thing; or it is another tenant's, which is the same."""

    status = 404
    category: Category = "user"


class Gone(ServiceError):  # noqa: N818 - what it says of the call
    """It was there and is no more: a session that ended, a result that a restart lost."""

    status = 410
    category: Category = "user"


class TooLarge(ServiceError):  # noqa: N818 - what it says of the call
    """The body is larger than the server takes."""

    status = 413
    category: Category = "user"


class UnsupportedMedia(ServiceError):  # noqa: N818 - what it says of the call
    """The body is encoded in a way that the server does not read."""

    status = 415
    category: Category = "user"


class Unprocessable(ServiceError):  # noqa: N818 - what it says of the call
    """The call is well formed, but its fields do not make sense."""

    status = 422
    category: Category = "user"


class QuotaError(ServiceError):
    """A tenant's rate is used up; it may be asked again after `retry_after` seconds."""

    status = 429
    category: Category = "user"

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(ServiceError):  # noqa: N818 - what it says of the call
    """The server cannot do it now: it is stopping, or its database does not answer."""

    status = 503
    retry_after = 2.0


@dataclass(frozen=True)
class Answer:
    """What a client gets for an error."""

    status: int
    message: str
    category: Category
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, request_id: str) -> dict[str, Any]:
        """JSON that clients of both APIs read: OpenAI's take `error`, people `detail`."""
        kind = "invalid_request_error" if self.category == "user" else "server_error"
        error = {"message": self.message, "type": kind, "param": None, "code": None}
        return {"error": error, "detail": self.message, "category": self.category, "request_id": request_id}


def answer_for(error: Exception) -> Answer:
    """The answer for an error that a route raised; what is not expected tells nothing of itself."""
    match error:
        case ServiceError():
            after = error.retry_after
            headers = {} if after is None else {"Retry-After": str(max(1, round(after + 0.5)))}
            return Answer(error.status, str(error), error.category, headers)
        case NotFoundError():
            return Answer(404, str(error), "user")
        case UsageError():
            return Answer(400, str(error), "user")
        case DatabaseError():
            _LOG.warning("answered with 503: %s", error)
            return Answer(503, NO_DATABASE, "server", {"Retry-After": "2"})
        case OpenTinkerError():
            return Answer(503, str(error), "server", {"Retry-After": "2"})
        case _:
            return Answer(500, "the server failed; its log has the reason under this request's id", "server")
