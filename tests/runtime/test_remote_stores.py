"""The same run on Postgres and S3 as on SQLite and local files: only where things lie differs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from opentinker_core.config.settings import Settings
from opentinker_core.runtime.session import RunSession, open_session
from opentinker_core.runtime.workspace import Workspace
from tests.runtime.runs import run_to_the_end, small_config, train
from tests.servers import S3_CREDENTIALS, new_bucket, postgres_binaries, postgres_server, s3_server

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL's server programs are not installed")
    with postgres_server(binaries) as url:
        yield url


def _outcome(session: RunSession) -> tuple[object, ...]:
    versions = session.workspace.catalog.run_versions(session.run.run_id)
    return session.token_ids_digest(), [version.sampler.digest for version in versions]


def test_postgres_and_s3_change_nothing_of_a_run(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in S3_CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with s3_server() as endpoint:
        bucket = new_bucket(endpoint)

        def workspace(machine: str) -> Workspace:
            return Workspace(
                Settings(
                    home=tmp_path / machine,
                    catalog_url=postgres,
                    snapshot_uri=f"s3://{bucket}/snapshots",
                    trajectory_uri=f"s3://{bucket}/trajectories",
                    s3_endpoint_url=endpoint,
                )
            )

        first = open_session(small_config(), workspace("one"))
        first.publish(4, first.sft(1, 4))
        # Another machine goes on: it has the servers, and nothing of the first one's files.
        second = run_to_the_end(open_session(None, workspace("another"), run_id=first.run.run_id))
        assert second.version.sampler.uri.startswith(f"s3://{bucket}/snapshots/")
        assert _outcome(second) == _outcome(train(tmp_path / "local", small_config()))
