"""Signed URLs: whoever has one may read the one path that it is of, without a key, until it expires."""

import hashlib
import hmac
import secrets
from datetime import UTC, datetime
from urllib.parse import parse_qs, quote, urlencode

from starlette.types import Scope

from opentinker_core.policies.tables import utc_now
from opentinker_core.service.principal import Principal, Role

SIGNED_URL = "signed-url"
"""What logs call the key of a caller that has none but such a URL."""


class Signer:
    """Signs URLs and knows its own signatures; those of another server, or of the last one, are none."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def sign(self, tenant: str, path: str, expires: datetime) -> str:
        """The path with a query that lets anyone `GET` it as a reader of the tenant, until it expires."""
        until = str(int(expires.timestamp()))
        # "sig" is a name whose value tracing leaves out.
        query = {"tenant": tenant, "expires": until, "sig": self._signature(tenant, path, until)}
        return f"{quote(path)}?{urlencode(query)}"

    def principal(self, scope: Scope) -> Principal | None:
        """Who calls by a signed URL; None: the request has no valid signature."""
        if scope["method"] != "GET":
            return None
        query = parse_qs(scope["query_string"].decode("latin-1"))
        tenant, until, given = (query.get(name, [""])[0] for name in ("tenant", "expires", "sig"))
        expected = self._signature(tenant, scope["path"], until)
        if not hmac.compare_digest(given.encode(), expected.encode()):
            return None
        if datetime.fromtimestamp(int(until), UTC) <= utc_now():
            return None
        return Principal(tenant, Role.READER, SIGNED_URL)

    def _signature(self, tenant: str, path: str, until: str) -> str:
        signed = "\n".join((tenant, path, until)).encode("utf-8", "surrogatepass")
        return hmac.new(self._secret, signed, hashlib.sha256).hexdigest()
