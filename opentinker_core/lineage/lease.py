"""Who may deliver a catalog's outbox: one process at a time, and never a dead one.

The lease is held by the operating system (SQLite: a lock on a file beside the database) or by the database
session (Postgres: an advisory lock), so that it is free the moment its holder dies.
"""

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from opentinker_core.errors import OpenTinkerError

if TYPE_CHECKING:
    from sqlalchemy import URL


@contextmanager
def delivery_lease(catalog_url: str, tenant: str) -> Iterator[bool]:
    """Try to become the one who delivers the tenant's events; gives, without waiting, whether one is.

    Raises:
        OpenTinkerError: the catalog's database cannot be reached.
    """
    from sqlalchemy.engine import make_url

    url = make_url(catalog_url)
    if url.get_backend_name() == "sqlite":
        with _file_lock(Path(f"{url.database}.outbox-{tenant}.lock")) as held:
            yield held
    else:
        with _advisory_lock(url.set(drivername="postgresql+psycopg"), tenant) as held:
            yield held


@contextmanager
def _file_lock(path: Path) -> Iterator[bool]:
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True  # closing the file gives the lock back


@contextmanager
def _advisory_lock(url: "URL", tenant: str) -> Iterator[bool]:
    from sqlalchemy import create_engine, text
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.pool import NullPool

    name = hashlib.sha256(f"opentinker-outbox/{tenant}".encode()).digest()
    key = int.from_bytes(name[:8], "big", signed=True)
    engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    try:
        connection = engine.connect()
    except DBAPIError as error:
        raise OpenTinkerError(f"catalog: {error.orig}") from error
    with connection:  # closing it gives the lock back
        yield bool(connection.execute(text("SELECT pg_try_advisory_lock(:key)"), {"key": key}).scalar())
