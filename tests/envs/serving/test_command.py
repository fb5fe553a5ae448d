"""`opentinker env serve`: what it refuses, keys in files, TLS, and that its page tells the truth."""

import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from envs.protocol import Action
from envs.registry import make
from envs.serving.errors import Code, Reason
from opentinker_core.commands.environments import app
from opentinker_core.errors import UsageError
from tests.envs.serving.environments import CANARY, OBEDIENT
from tests.envs.serving.served import serving

DOCUMENT = Path(__file__).parents[3] / "docs/environment_server.md"
KEY = "the-key-of-this-test"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["arithmetic", "--host", "0.0.0.0"],
            "host: 0.0.0.0 can be reached from elsewhere",
        ),
        (["arithmetic", "remote"], "environments: 'remote' is not accepted"),
        (["arithmetik"], "environment: 'arithmetik' does not exist; did you mean arithmetic"),
        (["no.where:Game"], "environment: 'no.where:Game': No module named 'no'"),
        (["arithmetic", "--port", "70000"], "port: 70000 is not accepted; accepted: 0 to 65535"),
        (["arithmetic", "--host", "nowhere.invalid"], "host: 'nowhere.invalid'"),
        (["arithmetic", "--host", "a" * 70], f"host: '{'a' * 70}'"),
        (["arithmetic", "--shards", "0"], "shards: 0 is not accepted; accepted: 1 to 256"),
        (["arithmetic", "--lease-s", "nan"], "lease_s: nan is not accepted"),
        (["arithmetic", "--max-sessions", "0"], "max_sessions: 0 is not accepted"),
        (["arithmetic", "--key-file", "none.txt"], "key-file: none.txt: No such file"),
        (["arithmetic", "--tls-key", "none.pem"], "tls_key: "),
        (
            ["arithmetic", "--tls-certificate", "none.pem", "--tls-key", "none.key"],
            "tls_certificate: none.pem",
        ),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_what_cannot_be_served_is_refused_and_named(arguments: list[str], said: str) -> None:
    if "--port" not in arguments:
        arguments = [*arguments, "--port", "0"]
    refused = CliRunner().invoke(app, ["serve", *arguments]).exception
    assert isinstance(refused, UsageError), refused
    assert said in str(refused)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = CliRunner().invoke(app, ["serve", "arithmetic", "--port", str(port)]).exception
    assert isinstance(refused, UsageError)
    assert f"port: {port} cannot be listened on" in str(refused)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"url": "ftp://x:1"}, "url: 'ftp://x:1' is not accepted; accepted: http://host:port"),
        ({"url": "http://key@x:1"}, r"url: '\.\.\.' is not accepted"),
        ({"url": "http://x:1/?key=1"}, "url: "),
        ({"url": []}, "url: "),
        ({"url": "http://x:1", "timeout_s": 0}, "timeout_s: 0 is not accepted"),
        ({"url": "http://x:1", "retries": -1}, "retries: -1 is not accepted"),
        ({"url": "http://x:1", "key_env": "NO_SUCH"}, "key_env: 'NO_SUCH': there is no such variable"),
        ({"url": "http://x:1", "args": {"a": float("nan")}}, "args: "),
        (
            {"url": "http://127.0.0.1:9", "retries": 1},
            "no answer, asked 2 times: .*env serve",
        ),
        ({}, "remote: argument 'url' is missing"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_what_no_client_can_use_is_refused_and_named(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make("remote", id="arithmetic", **args)


@pytest.mark.processes
def test_keys_of_a_file_and_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, certificate, key = tmp_path / "keys", tmp_path / "server.pem", tmp_path / "server.key"
    keys.write_text(f"# the trainer's\n{KEY}\n")
    command = (
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    )
    names = ("-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(key), "-out", str(certificate))
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
    tls = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    with serving(tmp_path / "log", CANARY, "--key-file", str(keys), *tls, "--shards", "1") as server:
        assert server.url.startswith("https://")
        monkeypatch.setenv("OPENTINKER_ENV_KEY", KEY)
        with pytest.raises(ValueError, match="certificate verify failed"):
            make("remote", url=server.url, id=CANARY, retries=0)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        environment: Any = make("remote", url=server.url, id=CANARY, retries=1)
        assert environment.reset(3).text == "canary-3"
        assert environment.step(Action("x")).observation.text == "canary-3: x"
        environment.close()
        assert KEY not in server.log.read_text()


@pytest.mark.processes
def test_an_environment_that_needs_arguments_can_be_served(tmp_path: Path) -> None:
    with serving(tmp_path / "log", OBEDIENT, f"{__name__}:Needs", "--shards", "1") as server:
        assert make("remote", url=server.url, id=f"{__name__}:Needs", args={"word": "x"}).reset(1).text == "x"
        with pytest.raises(ValueError, match="argument 'word' is missing"):
            make("remote", url=server.url, id=f"{__name__}:Needs")
        assert "argument 'word' is missing" in server.log.read_text()


class Needs:
    """An environment without a default."""

    def __init__(self, split: str = "train", *, word: str) -> None:
        self._word = word

    def reset(self, seed: int) -> Any:
        from envs.protocol import Observation

        return Observation.user(self._word)

    def step(self, action: Action) -> Any:
        raise RuntimeError("no episode is running")


def test_the_page_names_what_there_is() -> None:
    page = DOCUMENT.read_text()
    options = set(re.findall(r"`(--[a-z-]+)", page))
    shown = (
        CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).stdout
    )
    assert options <= set(re.findall(r"--[a-z-]+", shown))
    for reason in re.findall(r"(?:reason|hears) `(\w+)`", page):
        assert reason in list(Reason)
    assert Code.OUT_OF_ORDER in page
