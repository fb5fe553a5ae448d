"""One database, SQLite or PostgreSQL: opened at the newest schema, one writer at a time, clear errors.

Writers are serialized, on SQLite by `BEGIN IMMEDIATE` and on PostgreSQL by an advisory lock a tenant,
so a transaction may read, decide and write without a race. The catalog is written a few times a
training step; a commit takes milliseconds.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from opentinker_core.errors import OpenTinkerError, UsageError

HEAD = "0006"
"""The schema revision that this code knows: the last of `migrations/versions`."""
VERSION_TABLE = "ot_schema"
MIGRATIONS = Path(__file__).parent / "migrations"

_ACCEPTED = "accepted: 'sqlite:///file' or 'postgresql://user@host/database'"
_BUSY_SECONDS = 30
_MIGRATION_LOCK = 0x6F70656E74696E6B  # "opentink"
_alembic_lock = threading.Lock()  # alembic's environment is global to the process


class DatabaseError(OpenTinkerError):
    """The database does not do what it was asked for; the message names it, as its owner may know."""


class Database:
    """Transactions on the database at a URL.

    Raises:
        UsageError: the URL is not one of SQLite or PostgreSQL.
        OpenTinkerError: the database cannot be opened, or its schema is newer than this code.
    """

    def __init__(self, url: str) -> None:
        self._engine = _engine(url)
        self._writer = self._engine.execution_options(writes=True)
        self._label = self._engine.url.render_as_string(hide_password=True)
        try:
            self._migrate()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A transaction that sees one state of the database."""
        with self._translated(), Session(self._engine) as session, session.begin():
            yield session

    @contextmanager
    def write(self, tenant: str) -> Iterator[Session]:
        """The only writing transaction of the tenant; committed at the end, or else without effect."""
        with self._translated(), Session(self._writer) as session, session.begin():
            if self._engine.dialect.name == "postgresql":
                lock = text("SELECT pg_advisory_xact_lock(hashtext('opentinker'), hashtext(:tenant))")
                session.execute(lock, {"tenant": tenant})
            yield session

    def _migrate(self) -> None:
        with self._translated():
            with self._engine.connect() as connection:
                if _revision(connection) == HEAD:
                    return
            with (
                _alembic_lock,
                self._writer.connect() as connection,
                _unenforced_references(connection),
                connection.begin(),
            ):
                if connection.dialect.name == "postgresql":
                    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
                _upgrade(connection, self._label)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (IntegrityError, ProgrammingError):
            raise  # a defect of this code, not of the database
        except (DBAPIError, sqlite3.Error, PoolTimeoutError) as error:
            reason = " ".join(str(getattr(error, "orig", None) or error).split())
            raise DatabaseError(f"catalog {self._label}: {reason}") from error


def _engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgres", "postgresql"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() == "sqlite":
            return _sqlite_engine(parsed)
        if parsed.get_backend_name() == "postgresql":
            return create_engine(parsed, pool_pre_ping=True, connect_args={"connect_timeout": 10})
    except (ArgumentError, NoSuchModuleError) as error:
        raise UsageError(f"catalog URL: {url!r:.200}; {_ACCEPTED} ({error})") from error
    except ModuleNotFoundError as error:
        raise UsageError(
            f"catalog URL: {error}; install it with: pip install 'opentinker[postgres]'"
        ) from error
    raise UsageError(f"catalog URL: {parsed.drivername!r:.80} is not known; {_ACCEPTED}")


def _sqlite_engine(url: URL) -> Engine:
    if url.database in (None, "", ":memory:"):
        raise UsageError(f"catalog URL: a catalog needs a file; {_ACCEPTED}")
    folder = Path(str(url.database)).absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OpenTinkerError(f"catalog: cannot create {folder}: {error.strerror or error}") from error
    engine = create_engine(url, connect_args={"timeout": _BUSY_SECONDS})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    connection.isolation_level = None  # we begin transactions ourselves
    connection.execute("PRAGMA foreign_keys = ON")
    deadline = time.monotonic() + _BUSY_SECONDS
    while connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            # SQLite does not wait here when several processes create the same file.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def _unenforced_references(connection: Connection) -> Iterator[None]:
    """While SQLite makes a table anew to change its constraints, others refer to one that is not there.

    That has to be allowed before the transaction begins (https://sqlite.org/lang_altertable.html, 7).
    """
    raw = connection.connection.dbapi_connection
    if connection.dialect.name != "sqlite" or raw is None:
        yield
        return
    cursor = raw.cursor()
    cursor.execute("PRAGMA foreign_keys = OFF")
    try:
        yield
    finally:
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    revision: str | None = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608
    return revision


def _upgrade(connection: Connection, label: str) -> None:
    """Bring the schema to `HEAD` within the caller's transaction."""
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    known = {script.revision for script in ScriptDirectory(MIGRATIONS).walk_revisions()}
    current = _revision(connection)
    if current is not None and current not in known:
        raise OpenTinkerError(
            f"catalog {label}: its schema revision {current!r} is newer than this version of opentinker, "
            f"which knows up to {HEAD!r}; upgrade opentinker"
        )
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    if connection.dialect.name == "sqlite":
        lost = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
        if lost:
            raise OpenTinkerError(f"catalog {label}: its rows refer to others that are not there: {lost[:3]}")
