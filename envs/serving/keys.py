"""API keys of an environment server: who calls."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

KEYS_VARIABLE = "OPENTINKER_ENV_KEYS"
"""Keys of a server, separated by blanks or commas."""
KEY_VARIABLE = "OPENTINKER_ENV_KEY"
"""The key of a client, unless its environment names another variable."""
SHORTEST = 16

Owner = int
"""A key, by its place; 0 where a server has no keys."""


class Keys:
    """The keys that a server knows; without any, everybody is the same owner.

    Raises:
        ValueError: a key is too short, or there twice; the message says which one, by its place.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests: list[bytes] = []
        for place, key in enumerate(keys, 1):
            if len(key) < SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError(
                    f"keys: number {place} is not accepted; accepted: {SHORTEST} or more printable ASCII "
                    "characters without blanks"
                )
            digest = _digest(key)
            if digest in self._digests:
                raise ValueError(f"keys: number {place} is there twice; accepted: different keys")
            self._digests.append(digest)

    def __len__(self) -> int:
        return len(self._digests)

    def owner(self, authorization: str) -> Owner | None:
        """Who shows this `Authorization` header; None: nobody who is known.

        Takes the same time for every wrong key: digests of one length are compared, all of them.
        """
        if not self._digests:
            return 0
        scheme, _, key = authorization.partition(" ")
        shown = _digest(key.strip() if scheme.lower() == "bearer" else "")
        found = None
        for place, digest in enumerate(self._digests, 1):
            if hmac.compare_digest(shown, digest):
                found = place
        return found


def read_keys(file: Path | None, variables: Mapping[str, str]) -> list[str]:
    """The keys of a file (one a line; `#` begins a comment) and of `OPENTINKER_ENV_KEYS`.

    Raises:
        ValueError: the file cannot be read, or has no key.
    """
    keys = variables.get(KEYS_VARIABLE, "").replace(",", " ").split()
    if file is None:
        return keys
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(f"key-file: {file}: {reason}; accepted: a text file of one key a line") from error
    found = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not found:
        raise ValueError(f"key-file: {file}: there is no key in it; accepted: one key a line")
    return keys + found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
