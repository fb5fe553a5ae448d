"""Real servers for tests, each started in about a second: S3 (moto over HTTP) and PostgreSQL."""

import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import boto3

from tests.waiting import PATIENCE_S

S3_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}

_FORGETFUL = """
import sys
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

moto = DomainDispatcherApplication(create_backend_app)

def forgetful(environ, start_response):
    environ.pop("HTTP_IF_NONE_MATCH", None)
    return moto(environ, start_response)

run_simple("127.0.0.1", int(sys.argv[1]), forgetful, threaded=True)
"""


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def s3_server(*, forgetful: bool = False, checks_credentials: bool = False) -> Iterator[str]:
    """A moto server; yields its endpoint URL.

    `forgetful`: it ignores `If-None-Match`, as `rclone serve s3` does. `checks_credentials`: it
    refuses unknown access keys, as AWS does.
    """
    port = free_port()
    environment = {**os.environ, **({"INITIAL_NO_AUTH_ACTION_COUNT": "0"} if checks_credentials else {})}
    program = ["-c", _FORGETFUL, str(port)] if forgetful else ["-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(
        [sys.executable, *program], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    endpoint = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{endpoint}/moto-api/", server)
        yield endpoint
    finally:
        server.kill()
        server.wait()


def new_bucket(endpoint: str) -> str:
    """Create a bucket with a name of its own."""
    bucket = f"bucket-{uuid4().hex[:12]}"
    keys = {
        "aws_access_key_id": S3_CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": S3_CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys).create_bucket(Bucket=bucket)
    return bucket


def _wait_for(url: str, server: subprocess.Popen[bytes], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except urllib.error.HTTPError:
            return  # it answers
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def postgres_binaries() -> Path | None:
    """The folder of PostgreSQL's server programs, or None."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    initdb = shutil.which("initdb")
    return Path(initdb).resolve().parent if initdb else None


@contextmanager
def postgres_server(binaries: Path) -> Iterator[str]:
    """A fresh PostgreSQL cluster; yields the URL of its `postgres` database."""
    user = _server_user()
    folder = Path(tempfile.mkdtemp(prefix="opentinker-postgres-"))
    if user is not None:
        shutil.chown(folder, user)
    data, port = folder / "data", free_port()

    def call(*command: str) -> None:
        result = subprocess.run(command, user=user, cwd=folder, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr + result.stdout

    options = f"-p {port} -k {folder} -h 127.0.0.1 -c fsync=off"
    try:
        call(str(binaries / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust", "--no-sync")
        call(
            str(binaries / "pg_ctl"), "-D", str(data), "-w", "-o", options, "-l", str(folder / "log"), "start"
        )
        try:
            yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
        finally:
            call(str(binaries / "pg_ctl"), "-D", str(data), "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _server_user() -> str | None:
    """PostgreSQL refuses to run as root: the account to use then."""
    if os.geteuid() != 0:
        return None
    accounts = {account.pw_name for account in pwd.getpwall()}
    return "postgres" if "postgres" in accounts else "nobody"


@contextmanager
def prefect_server(home: Path) -> Iterator[str]:
    """A Prefect server with schedules on a database under `home`; yields its API URL. Takes some seconds."""
    from flows import servers

    server = servers.start_prefect(home, free_port(), full=True, directory=home / "prefect")
    try:
        servers.wait_until_healthy([(server, "/api/health")])
        yield f"{server.url}/api"
    finally:
        server.stop()
