"""A fresh catalog on SQLite, and on PostgreSQL where its server programs are installed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, text

from opentinker_core.policies.catalog import Catalog
from tests.servers import postgres_binaries, postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL's server programs (initdb, pg_ctl) are not installed")
    with postgres_server(binaries) as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.servers)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'home' / 'catalog.db'}"
    server: str = request.getfixturevalue("postgres")
    name = f"catalog_{uuid4().hex[:12]}"
    engine = create_engine(server.replace("postgresql", "postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return f"{server.rpartition('/')[0]}/{name}"


@pytest.fixture
def open_catalog(url: str) -> Iterator[Callable[..., Catalog]]:
    """Opens the catalog as one tenant, as often as asked."""
    opened: list[Catalog] = []

    def open_(tenant: str = "default") -> Catalog:
        opened.append(Catalog(url, tenant))
        return opened[-1]

    yield open_
    for catalog in opened:
        catalog.close()


@pytest.fixture
def catalog(open_catalog: Callable[..., Catalog]) -> Catalog:
    return open_catalog()
