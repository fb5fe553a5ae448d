"""Opening: the schema, and databases that are away, damaged, full, read-only or from the future."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, make_url, text

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.policies import database
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.tables import Base
from opentinker_core.service import key_tables as _key_tables  # noqa: F401 - further tables of `Base`
from opentinker_core.service import tables as _service_tables  # noqa: F401 - they are in the metadata once imported
from tests.disks import make_read_only, small_disk
from tests.policies.builders import new_policy, new_run
from tests.servers import free_port


def execute(url: str, *statements: str) -> None:
    parsed = make_url(url)
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    engine = create_engine(parsed)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


def test_migrations_give_the_tables_of_the_code(empty_url: str) -> None:
    catalog = Catalog(empty_url)
    with catalog._database.read() as session:
        context = MigrationContext.configure(
            session.connection(), opts={"version_table": database.VERSION_TABLE, "compare_type": True}
        )
        assert compare_metadata(context, Base.metadata) == []
    catalog.close()


def test_the_code_knows_the_last_migration() -> None:
    assert ScriptDirectory(database.MIGRATIONS).get_heads() == [database.HEAD]


def test_a_catalog_with_runs_of_an_earlier_release_is_brought_up_to_date(empty_url: str) -> None:
    catalog = Catalog(empty_url)
    policy = new_policy(catalog)
    run = catalog.start_run("old", policy.policy_id, {}, "d", flow_run_id="flow")
    catalog.reserve_version(policy.policy_id, run.run_id, 1)
    catalog.close()
    _rewind(empty_url)
    again = Catalog(empty_url)
    assert [one.run_id for one in again.runs()] == [run.run_id]
    other = again.create_policy("other", "tiny", policy.lora)
    both = {run.run_id, again.start_run("new", other.policy_id, {}, "d", flow_run_id="flow").run_id}
    assert {one.run_id for one in again.runs()} == both
    assert again.reserve_version(policy.policy_id, run.run_id, 1) == 0
    again.close()


def _rewind(url: str) -> None:
    """Give the runs' table the constraint that it had at first, as an installation of then has it."""
    engine = database._engine(url)
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            table = connection.execute(text("SELECT sql FROM sqlite_master WHERE name = 'ot_runs'")).scalar()
            old = str(table).replace(
                "_policy_id UNIQUE (tenant, flow_run_id, policy_id)", " UNIQUE (tenant, flow_run_id)"
            )
            assert old != table
            connection.exec_driver_sql("PRAGMA writable_schema = ON")
            connection.execute(
                text("UPDATE sqlite_master SET sql = :old WHERE name = 'ot_runs'"), {"old": old}
            )
        else:
            name = "uq_ot_runs_tenant_flow_run_id"
            connection.execute(text(f"ALTER TABLE ot_runs DROP CONSTRAINT {name}_policy_id"))
            connection.execute(
                text(f"ALTER TABLE ot_runs ADD CONSTRAINT {name} UNIQUE (tenant, flow_run_id)")
            )
        connection.execute(text(f"UPDATE {database.VERSION_TABLE} SET version_num = '0005'"))
    engine.dispose()


def test_opening_again_keeps_what_is_there_and_migrates_nothing(empty_url: str) -> None:
    first = Catalog(empty_url)
    new_policy(first)
    first.close()
    code = (
        "import sys\nfrom opentinker_core.policies.catalog import Catalog\n"
        "print([policy.name for policy in Catalog(sys.argv[1]).policies()], 'alembic' in sys.modules)"
    )
    again = subprocess.run(
        [sys.executable, "-c", code, empty_url], capture_output=True, text=True, check=True
    )
    assert again.stdout == "['adder'] False\n"


def test_a_catalog_shares_a_database_with_other_applications(empty_url: str) -> None:
    Path(make_url(empty_url).database or "").parent.mkdir(parents=True, exist_ok=True)
    execute(
        empty_url,
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)",
        "INSERT INTO alembic_version VALUES ('mlflow')",
        "CREATE TABLE runs (run_uuid VARCHAR(32))",
    )
    catalog = Catalog(empty_url)
    assert new_run(catalog, new_policy(catalog)).name == "first"
    catalog.close()


def test_a_newer_schema_is_refused(empty_url: str) -> None:
    Catalog(empty_url).close()
    execute(empty_url, f"UPDATE {database.VERSION_TABLE} SET version_num = '9999'")
    with pytest.raises(
        OpenTinkerError, match=r"schema revision '9999' is newer than this .* upgrade opentinker"
    ):
        Catalog(empty_url)


@pytest.mark.parametrize(
    "url", ["", "nonsense", "mysql://host/db", "sqlite://", "sqlite:///:memory:", "oracle:///x"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"catalog URL: .*accepted: 'sqlite:///file' or 'postgresql://"):
        Catalog(url)


def test_hostile_tenants_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tenant: '\.\./x' is not a name"):
        Catalog(f"sqlite:///{tmp_path}/catalog.db", "../x")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "catalog.db").write_bytes(os.urandom(8192))
    with pytest.raises(
        OpenTinkerError, match=f"catalog sqlite:///{tmp_path}/catalog.db: file is not a database"
    ):
        Catalog(f"sqlite:///{tmp_path}/catalog.db")


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(OpenTinkerError, match="unable to open database file"):
        Catalog(f"sqlite:///{tmp_path}")


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("in the way")
    with pytest.raises(OpenTinkerError, match=f"catalog: cannot create {tmp_path}/home/state"):
        Catalog(f"sqlite:///{tmp_path}/home/state/catalog.db")


def test_a_read_only_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        Catalog(f"sqlite:///{disk}/catalog.db").close()
        make_read_only(disk)
        with pytest.raises(OpenTinkerError, match=f"catalog sqlite:///{disk}/catalog.db: "):
            new_policy(Catalog(f"sqlite:///{disk}/catalog.db"))
        with pytest.raises(
            OpenTinkerError, match=f"catalog: cannot create {disk}/new: Read-only file system"
        ):
            Catalog(f"sqlite:///{disk}/new/catalog.db")


def test_a_full_disk_keeps_what_was_committed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        catalog = Catalog(f"sqlite:///{disk}/catalog.db")
        policy = new_policy(catalog)
        with pytest.raises(OpenTinkerError, match="database or disk is full"):
            catalog.start_run("big", policy.policy_id, {"filling": "x" * (2 << 20)}, "")
        assert catalog.policies() == [policy]
        assert catalog.runs() == []
        catalog.close()


def test_a_writer_that_holds_the_file_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.1)
    catalog = Catalog(f"sqlite:///{tmp_path}/catalog.db")
    holder = sqlite3.connect(tmp_path / "catalog.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(OpenTinkerError, match="database is locked"):
        new_policy(catalog)
    assert catalog.policies() == []
    holder.execute("ROLLBACK")
    assert new_policy(catalog).name == "adder"
    holder.close()
    catalog.close()


def test_a_server_that_is_away_is_named_without_its_password() -> None:
    port = free_port()
    with pytest.raises(OpenTinkerError, match=rf"catalog .*127\.0\.0\.1:{port}/db: .*refused") as caught:
        Catalog(f"postgresql://user:secret@127.0.0.1:{port}/db")
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tenants_of_one_catalog_share_its_connections_and_nothing_else(url: str) -> None:
    with closing(Catalog(url, "first")) as first:
        second = first.seen_by("second")
        new_policy(first, "mine")
        assert second.policies() == []
        new_policy(second, "mine")
        with first.transaction():
            assert [policy.tenant for policy in second.policies()] == ["second"]
        with pytest.raises(UsageError, match="tenant"):
            first.seen_by("a/b")
