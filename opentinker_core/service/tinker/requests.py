"""What the routes of the Tinker API share: checks of numbers and texts, digests, consumed numbers."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from opentinker_core.digests import digest_json
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.policies.scope import check_json
from opentinker_core.service.core import Service
from opentinker_core.service.errors import Forbidden, QuotaError, ServiceError
from opentinker_core.service.principal import Principal, Role
from opentinker_core.service.tinker.wire import ContentError

LARGEST_SEQ = 2**31 - 1
_LONGEST_TEXT = 4096
_LARGEST_METADATA = 65536
_DEEPEST_METADATA = 32


def digest_of(request: BaseModel) -> str:
    """The digest of a request's content.

    Raises:
        UsageError: it holds a number that JSON has no form for, or is too deep.
    """
    try:
        return digest_json(request.model_dump(mode="json"))
    except (ValueError, UnicodeError, RecursionError) as error:
        raise UsageError(f"the request cannot be kept as JSON: {error}") from error


def check_seq(field: str, value: int | None) -> int:
    """Return a sequence number.

    Raises:
        UsageError: it is missing, negative or too large.
    """
    if value is None or not 0 <= value <= LARGEST_SEQ:
        raise UsageError(f"{field}: {value}; accepted: 0 to {LARGEST_SEQ}")
    return value


def check_text(field: str, value: str | None, longest: int = _LONGEST_TEXT) -> str | None:
    """Return a text that a database can keep.

    Raises:
        UsageError: it is too long, or has characters that are no text.
    """
    if value is None:
        return None
    if len(value) > longest or "\0" in value or not _is_utf8(value):
        raise UsageError(f"{field}: {value[:40]!r}; accepted: up to {longest} characters of text")
    return value


async def check_may_change(service: Service, who: Principal, session_id: str) -> None:
    """Leave sessions in which somebody trains to those who may train.

    Raises:
        Forbidden: a reader asks for a change of such a session.
    """
    if not who.may(Role.MEMBER) and await service.training.trains(who.tenant, session_id):
        raise Forbidden(
            f"session_id: {session_id:.80} trains models; this call needs the role {Role.MEMBER.value!r} for "
            f"it; the key has {who.role!r}"
        )


def check_metadata(
    field: str, value: Mapping[str, Any] | None, largest: int = _LARGEST_METADATA
) -> dict[str, Any]:
    """Return metadata that can be kept.

    Raises:
        UsageError: it is too large or too deep, or JSON has no form for it.
    """
    level: list[Any] = [value]
    for _ in range(_DEEPEST_METADATA):  # what is deeper might not be readable where it is needed
        level = [inner for one in level for inner in _inside(one)]
    if level:
        raise UsageError(f"{field}: too deep; accepted: up to {_DEEPEST_METADATA} levels")
    checked = check_json(field, dict(value or {}))
    if len(repr(checked)) > largest:
        raise UsageError(f"{field}: too large; accepted: up to {largest} characters")
    return checked


def refused(error: ValidationError) -> UsageError:
    """What pydantic found, as our error."""
    parts = [
        f"{'.'.join(map(str, one['loc'])) or 'value'}: {one['input']!r:.60}: {one['msg']}"
        for one in error.errors()[:5]
    ]
    return UsageError("; ".join(parts))


class NumberedRoute(APIRoute):
    """A route whose requests have a model's next number: one that is refused for good consumes it.

    The SDK goes on with the next number after an answer 4xx that it does not retry.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                body = error.body if isinstance(error.body, dict) else {}
                seq = body.get("seq_id")
                if isinstance(seq, int) and not isinstance(seq, bool):
                    consume(
                        request, body.get("model_id"), seq, UsageError(f"seq_id: {seq} was refused before")
                    )
                raise
            except ContentError as error:
                consume(request, error.model_id, error.seq_id, error)
                raise
            except (UsageError, ServiceError) as error:
                numbered: tuple[str, int] | None = getattr(request.state, "numbered", None)
                if numbered is not None and _is_final(error):
                    consume(request, numbered[0], numbered[1], error)
                raise

        return handler


def consume(request: Request, model_id: Any, seq: int, error: OpenTinkerError) -> None:
    """Note that a request of a model was refused for good."""
    who = getattr(request.state, "principal", None)
    if isinstance(who, Principal) and isinstance(model_id, str):
        request.app.state.service.training.refuse(who.tenant, model_id, seq, error)


def _is_final(error: OpenTinkerError) -> bool:
    if isinstance(error, QuotaError):
        return False
    return not isinstance(error, ServiceError) or error.status in (400, 403, 404, 413, 422)


def _inside(value: Any) -> list[Any]:
    """What a mapping or a list holds."""
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []


def _is_utf8(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
