"""Who calls: Principal and Role, and what a route demands of its caller.

Every request is authenticated before a route is looked for (`service/app.py`). A route says what it needs
by the type of a parameter: `who: Who` (any key), `who: Member` or `who: Admin`; one that says nothing fails
a test.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from fastapi import Depends, Request

from opentinker_core.service.errors import Forbidden, Unauthenticated


class Role(StrEnum):
    """What a key may do, the least first."""

    READER = "reader"
    """Sample, and read what the tenant has."""
    MEMBER = "member"
    """Train, save and delete as well."""
    ADMIN = "admin"
    """Everything of the tenant, its audit log included."""


_ORDER = tuple(Role)


@dataclass(frozen=True)
class Principal:
    """A caller: the tenant whose objects exist for it, the role, and the key that was shown."""

    tenant: str
    role: str
    key_id: str

    def may(self, role: Role) -> bool:
        """Whether the caller's role is `role` or more."""
        return _ORDER.index(Role(self.role)) >= _ORDER.index(role)


async def principal(request: Request) -> Principal:
    """The caller of a request, whatever the role.

    Raises:
        Unauthenticated: there is none, which only a route that needs no key could see.
    """
    found = getattr(request.state, "principal", None)
    if not isinstance(found, Principal):
        raise Unauthenticated("this call needs an API key")
    return found


def needs(role: Role) -> Callable[[Request], Awaitable[Principal]]:
    """A dependency that gives the caller if its role is at least `role`, else raises Forbidden."""

    async def caller(request: Request) -> Principal:
        who = await principal(request)
        if not who.may(role):
            raise Forbidden(f"this call needs the role {role.value!r}; the key has {who.role!r}")
        return who

    caller.__name__ = f"needs_{role.value}"
    return caller


reader = needs(Role.READER)
member = needs(Role.MEMBER)
admin = needs(Role.ADMIN)
CALLERS = frozenset({principal, reader, member, admin})
"""Dependencies one of which every route has that is not public."""

Who = Annotated[Principal, Depends(principal)]
Member = Annotated[Principal, Depends(member)]
Admin = Annotated[Principal, Depends(admin)]
