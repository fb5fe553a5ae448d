"""Server processes end with whoever started them, and the right Prefect server is chosen."""

import os
import signal
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest

from flows import servers
from flows.orchestrator import orchestrator, read_up
from opentinker_core.errors import OpenTinkerError, UsageError
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
STUBBORN = (  # ignores SIGTERM, and has a child that does too
    "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.fork()\ntime.sleep(600)"
)


@pytest.fixture
def http_server() -> object:
    """A real HTTP server that answers 200 on .../api/health, on /busy/... after some seconds; else 503."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(3.5 if self.path.startswith("/busy") else 0)
            self.send_response(200 if self.path.endswith("/api/health") else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_stopped_server_takes_its_children_along(tmp_path: Path) -> None:
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    code = f"import subprocess, sys, time\n{child}"
    server = servers.start(
        "x", [sys.executable, "-c", f"{code}\ntime.sleep(600)"], url="", log=tmp_path / "x.log"
    )
    guard = psutil.Process(server.process.pid)
    wait_until(lambda: len(guard.children(recursive=True)) == 2)
    family = guard.children(recursive=True)
    server.stop()
    assert not any(process.is_running() for process in family)


def test_a_server_that_gives_way_does_so_with_all_its_threads(tmp_path: Path) -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\ntime.sleep(600)"
    server = servers.start("x", [sys.executable, "-c", code], url="", log=tmp_path / "x.log")
    try:
        guard, mine = psutil.Process(server.process.pid), psutil.Process().nice()
        wait_until(lambda: [child.num_threads() for child in guard.children()] == [2])
        (child,) = guard.children()
        server.give_way(7)
        niceness = {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in child.threads()}
        assert (niceness, guard.nice()) == ({mine + 7}, mine)
        enabled = Path("/proc/sys/kernel/sched_autogroup_enabled")
        if enabled.exists() and enabled.read_text().strip() == "1":  # then niceness counts within a session
            assert Path(f"/proc/{child.pid}/autogroup").read_text().endswith("nice 7\n")
    finally:
        server.stop()


@pytest.mark.processes
def test_servers_end_when_their_starter_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom flows import servers\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        f"servers.start('x', sleep, url='', log=Path({str(tmp_path)!r}) / 'log')\n"
        "print('started', flush=True)\ntime.sleep(600)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert starter.stdout is not None
    assert starter.stdout.readline() == b"started\n"
    starter_process = psutil.Process(starter.pid)
    wait_until(lambda: len(starter_process.children(recursive=True)) == 2)
    family = starter_process.children(recursive=True)
    starter.kill()
    starter.wait()
    wait_until(lambda: not any(process.is_running() for process in family))


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_a_command_ends_with_a_guard_that_is_killed(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    server = servers.start("x", sleep, url="", log=tmp_path / "x.log")
    guard = psutil.Process(server.process.pid)
    wait_until(lambda: guard.children() and "sleep" in guard.children()[0].cmdline()[-1])
    (command,) = guard.children()
    guard.kill()
    wait_until(lambda: not command.is_running())
    server.stop()


@pytest.mark.processes
def test_who_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = (
        "import sys\nfrom opentinker_core import guard\nguard.GRACE_S = 0.3\n"
        "sys.exit(guard.main([sys.executable, '-c', sys.argv[1]]))"
    )
    process = subprocess.Popen([sys.executable, "-c", guard, STUBBORN], stdin=subprocess.PIPE, cwd=ROOT)
    wait_until(lambda: len(psutil.Process(process.pid).children(recursive=True)) == 2)
    family = psutil.Process(process.pid).children(recursive=True)
    time.sleep(0.2)  # until the signal is ignored
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 128 + signal.SIGKILL
    wait_until(lambda: not any(member.is_running() for member in family))


def test_the_guard_gives_the_status_of_the_command() -> None:
    command = [
        sys.executable,
        "-m",
        "opentinker_core.guard",
        sys.executable,
        "-c",
        "raise SystemExit(7)",
    ]
    guard = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)
    assert guard.wait(PATIENCE_S) == 7


def test_a_server_that_ends_at_start_is_told_with_its_log(tmp_path: Path) -> None:
    server = servers.start(
        "Broken",
        [sys.executable, "-c", "raise SystemExit('no database')"],
        url="http://127.0.0.1:9",
        log=tmp_path / "log",
    )
    with pytest.raises(OpenTinkerError, match="Broken server ended at start: no database"):
        servers.wait_until_healthy([(server, "/")], timeout_s=PATIENCE_S)


def test_a_silent_server_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    server = servers.start(
        "Silent",
        [sys.executable, "-c", "import time; time.sleep(600)"],
        url="http://127.0.0.1:9",
        log=tmp_path / "log",
    )
    with pytest.raises(OpenTinkerError, match="did not answer"):
        servers.wait_until_healthy([(server, "/")], timeout_s=0.2)
    server.stop()


def test_a_taken_port_is_refused_by_name() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"--port: port {port} .* cannot be used"):
            servers.check_port("--port", port)


def test_answers_tells_servers_from_failures(http_server: str) -> None:
    assert servers.answers(f"{http_server}/api/health")
    assert not servers.answers(f"{http_server}/broken")
    assert not servers.answers("http://127.0.0.1:9/")
    assert not servers.answers("file:///etc/passwd")
    assert not servers.answers("http://[nonsense")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    snapshot = dict(os.environ)
    yield tmp_path / "home"
    os.environ.clear()
    os.environ.update(snapshot)


def test_an_api_url_wins(clean_environment: Path, monkeypatch: pytest.MonkeyPatch, http_server: str) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"{http_server}/api")
    with orchestrator(clean_environment) as prefect:
        prefect.wait()
        assert (prefect.api_url, prefect.ui_url, prefect.server) == (f"{http_server}/api", http_server, None)


def test_a_busy_server_is_waited_for(
    clean_environment: Path, monkeypatch: pytest.MonkeyPatch, http_server: str
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"{http_server}/busy/api")
    with orchestrator(clean_environment) as prefect:
        assert prefect.api_url == f"{http_server}/busy/api"


def test_an_unreachable_api_is_told_at_once(clean_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    unreachable = pytest.raises(OpenTinkerError, match=r"http://127\.0\.0\.1:9/api.*PREFECT_API_URL")
    with unreachable, orchestrator(clean_environment):
        pass


def test_a_live_up_on_this_home_is_used_and_a_dead_one_is_not(
    clean_environment: Path, http_server: str
) -> None:
    clean_environment.mkdir()
    record = clean_environment / "up.json"
    record.write_text(f'{{"pid": {os.getpid()}, "prefect_url": "{http_server}"}}')
    with orchestrator(clean_environment) as prefect:
        assert prefect.api_url == os.environ["PREFECT_API_URL"] == f"{http_server}/api"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    record.write_text(f'{{"pid": {ended.pid}, "prefect_url": "{http_server}"}}')
    assert read_up(clean_environment) is None
    record.write_text("{torn")
    assert read_up(clean_environment) is None


def test_a_profile_of_the_user_is_used(clean_environment: Path, http_server: str) -> None:
    profiles = clean_environment.parent / ".prefect" / "profiles.toml"
    profiles.parent.mkdir()
    profiles.write_text(f'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "{http_server}/api"\n')
    with orchestrator(clean_environment) as prefect:
        assert prefect.api_url == f"{http_server}/api"


def test_without_a_server_and_leave_to_start_one_the_way_out_is_told(clean_environment: Path) -> None:
    with (
        pytest.raises(OpenTinkerError, match="opentinker up"),
        orchestrator(clean_environment, private=False),
    ):
        pass


@pytest.mark.servers
def test_a_private_server_starts_and_is_gone_afterwards(clean_environment: Path) -> None:
    with orchestrator(clean_environment) as prefect:
        prefect.wait()
        assert prefect.server is not None
        assert prefect.ui_url == ""
        assert servers.answers(f"{prefect.api_url}/health")
        assert os.environ["PREFECT_HOME"] == str(clean_environment / "prefect")
    assert not prefect.server.running
    assert not servers.answers(f"{prefect.api_url}/health")
    assert (clean_environment / "prefect" / "prefect.db").exists()
