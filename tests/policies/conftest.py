"""Catalogs on SQLite, and on PostgreSQL where its server programs are installed.

Tests share one database and have a tenant each, except those about opening one.
"""

from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, make_url, text

from opentinker_core.policies.catalog import Catalog
from tests.servers import postgres_binaries, postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL's server programs (initdb, pg_ctl) are not installed")
    with postgres_server(binaries) as url:
        yield url


@pytest.fixture(scope="session", params=["sqlite", pytest.param("postgres", marks=pytest.mark.servers)])
def new_database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], str]:
    """Makes the URL of a database that no catalog was opened in yet."""
    if request.param == "sqlite":
        return lambda: f"sqlite:///{tmp_path_factory.mktemp('home') / 'state' / 'catalog.db'}"
    server = make_url(request.getfixturevalue("postgres"))

    def create() -> str:
        name = f"catalog_{uuid4().hex[:12]}"
        engine = create_engine(server.set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return server.set(database=name).render_as_string(hide_password=False)

    return create


@pytest.fixture
def empty_url(new_database: Callable[[], str]) -> str:
    """The URL of a database of the test's own, empty."""
    return new_database()


@pytest.fixture(scope="session")
def url(new_database: Callable[[], str]) -> str:
    """The URL of the database that tests share."""
    return new_database()


@pytest.fixture
def tenant() -> str:
    """A tenant of the test's own."""
    return f"tenant-{uuid4().hex[:12]}"


@pytest.fixture
def open_catalog(url: str) -> Iterator[Callable[[str], Catalog]]:
    """Opens the shared database as a tenant, as often as asked."""
    opened: list[Catalog] = []

    def open_(tenant: str) -> Catalog:
        opened.append(Catalog(url, tenant))
        return opened[-1]

    yield open_
    for catalog in opened:
        catalog.close()


@pytest.fixture
def catalog(open_catalog: Callable[[str], Catalog], tenant: str) -> Catalog:
    return open_catalog(tenant)
