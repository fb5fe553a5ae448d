"""`opentinker serve` and `opentinker keys` as processes: first key, mistakes, TLS, one server at a time."""

import json
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.servers import free_port
from tests.service.processes import command, serve

pytestmark = pytest.mark.processes

WHOAMI = "/api/v1/admin/whoami"


def _refused(done: "subprocess.CompletedProcess[str]", code: int, *parts: str) -> None:
    """One message on stderr, and nothing else."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("opentinker: ")
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    for part in parts:
        assert part in done.stderr


def test_the_first_key_is_shown_once_and_works_with_the_sdk(tmp_path: Path) -> None:
    port = free_port()
    with serve(tmp_path, "models=tiny", f"port={port}") as server:
        assert server.said["url"] == f"http://127.0.0.1:{port}"
        assert server.said["models"] == ["tiny"]
        capabilities = server.client().get_server_capabilities()
        assert [model.model_name for model in capabilities.supported_models] == ["tiny"]
        key = server.said["key"]
        assert key not in server.log.read_text()
        assert server.end() == 0
    with serve(tmp_path, "models=tiny", f"port={port}") as again:
        assert again.said["key"] is None
        assert httpx.get(again.url + WHOAMI, headers={"X-API-Key": key}).json()["role"] == "admin"


def test_lines_to_export_are_printed(tmp_path: Path) -> None:
    import sys

    from tests.service.processes import ROOT, environment

    port = free_port()
    arguments = [sys.executable, "-m", "flows.cli", "serve", "models=tiny", f"port={port}"]
    with subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = []
        while not said or "Ctrl-C" not in said[-1]:
            said.append(process.stdout.readline())
            assert said[-1], said
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    exports = dict(line.strip()[7:].split("=", 1) for line in said if line.strip().startswith("export "))
    assert exports["TINKER_BASE_URL"] == f"http://127.0.0.1:{port}"
    assert exports["OPENAI_BASE_URL"] == f"http://127.0.0.1:{port}/v1"
    assert exports["TINKER_API_KEY"] == exports["OPENAI_API_KEY"]
    assert exports["TINKER_API_KEY"].startswith("tml-")


def test_a_port_that_is_taken_is_named_before_any_model_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = command(tmp_path, "serve", "models=no-such-model", f"port={port}")
    _refused(done, 2, f"port: {port}", "Address already in use", "accepted: a free port")


def test_an_unknown_model_is_named_and_no_key_is_lost(tmp_path: Path) -> None:
    done = command(tmp_path, "serve", "models=no-such-model", f"port={free_port()}", HF_HUB_OFFLINE="1")
    _refused(done, 2, "no-such-model")
    assert json.loads(command(tmp_path, "keys", "list", "--json").stdout) == {"keys": []}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["none.yaml"], ["none.yaml: no such file"]),
        (["a.yaml", "b.yaml"], ["a.yaml, b.yaml: accepted: one config file"]),
        (["prot=1"], ["did you mean 'port'"]),
        (["host=256.1.1.1"], ["host: '256.1.1.1'", "accepted: an address of this machine"]),
        (["host=192.0.2.1"], ["host: 192.0.2.1", "accepted: "]),
        (["host=0.0.0.0"], ["can be reached from elsewhere", "opentinker keys create"]),
        (["tls={certificate: none.pem, key: none.key}"], ["tls.certificate: none.pem: No such file"]),
    ],
)
def test_a_wrong_request_ends_with_one_message(
    tmp_path: Path, arguments: list[str], parts: list[str]
) -> None:
    _refused(command(tmp_path, "serve", "models=tiny", f"port={free_port()}", *arguments), 2, *parts)


def test_a_database_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "catalog.db").write_bytes(b"no database" * 100)
    done = command(tmp_path, "serve", "models=tiny", f"port={free_port()}")
    _refused(done, 1, "catalog.db", "not a database")


def test_there_is_one_server_at_a_time_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    with serve(tmp_path, "models=tiny", f"port={free_port()}") as server:
        done = command(tmp_path, "serve", "models=tiny", f"port={free_port()}")
        _refused(done, 1, f"process {server.process.pid} serves this installation already")
        server.end(signal.SIGKILL)
    with serve(tmp_path, "models=tiny", f"port={server.said['url'].rsplit(':', 1)[1]}") as again:
        assert httpx.get(f"{again.url}/readyz").status_code == 200


def test_with_a_key_all_addresses_may_be_listened_on(tmp_path: Path) -> None:
    key = command(tmp_path, "keys", "create", "me", "--role", "reader").stdout.strip()
    with serve(tmp_path, "models=tiny", "host=0.0.0.0", f"port={free_port()}") as server:
        assert server.said["key"] is None
        assert httpx.get(server.url + WHOAMI, headers={"X-API-Key": key}).json()["role"] == "reader"


def _certificate(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate), *(options or ["-nodes"])),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def test_tls_is_served_by_configuration(tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path, "server")
    tls = f"tls={{certificate: {certificate}, key: {key}}}"
    with serve(tmp_path, "models=tiny", f"port={free_port()}", tls) as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(certificate))
        answer = httpx.get(server.url + WHOAMI, headers={"X-API-Key": server.said["key"]}, verify=trusting)
        assert answer.status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + WHOAMI)
        assert server.end() == 0


def test_certificates_that_do_not_work_are_named(tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path, "one")
    other, encrypted = _certificate(tmp_path, "two", "-passout", "pass:secret")
    (tmp_path / "no.pem").write_text("no certificate")
    for pair in ((certificate, encrypted), (other, encrypted), (other, key), (tmp_path / "no.pem", key)):
        tls = f"tls={{certificate: {pair[0]}, key: {pair[1]}}}"
        done = command(tmp_path, "serve", "models=tiny", f"port={free_port()}", tls)
        _refused(done, 2, "tls: ", str(pair[0]), "accepted: a PEM certificate and its private key")


def test_keys_are_made_listed_and_revoked_while_a_server_runs(tmp_path: Path) -> None:
    with serve(tmp_path, "models=tiny", f"port={free_port()}") as server:
        made = json.loads(command(tmp_path, "keys", "create", "job", "--tenant", "acme", "--json").stdout)
        mine = {"X-API-Key": made["key"]}
        answer = httpx.get(server.url + WHOAMI, headers=mine)
        assert answer.json() == {"tenant": "acme", "role": "member", "key_id": made["key_id"]}
        listed = command(tmp_path, "keys", "list", "--tenant", "acme")
        assert made["key_id"] in listed.stdout
        assert made["key"] not in listed.stdout
        assert "is revoked" in command(tmp_path, "keys", "revoke", made["key_id"]).stdout
        deadline = time.monotonic() + 5
        while httpx.get(server.url + WHOAMI, headers=mine).status_code != 401:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["create", "--role", "king"], "--role: 'king'; accepted: reader, member, admin"),
        (["create", "a/b"], "name: 'a/b' is not a name; accepted"),
        (["create", "--tenant", "a b"], "tenant: 'a b' is not a name; accepted"),
        (["create", "--expires-in-days", "-1"], "expires_in_days: -1; accepted: above 0"),
        (["revoke", "nothing"], "key: there is none with the id 'nothing'"),
    ],
)
def test_wrong_requests_for_keys_end_with_one_message(
    tmp_path: Path, arguments: list[str], part: str
) -> None:
    _refused(command(tmp_path, "keys", *arguments), 2, part)


@pytest.mark.pretrained
def test_the_bundled_model_answers_its_first_call(tmp_path: Path) -> None:
    from opentinker_core.config.settings import Settings
    from opentinker_core.models.source import resolve

    models = Settings().home / "models"
    resolve("smollm2-135m", Settings().home)
    tmp_path.joinpath("models").symlink_to(models, target_is_directory=True)
    with serve(tmp_path, f"port={free_port()}") as server:
        made = server.client().create_lora_training_client(base_model="smollm2-135m", rank=8).result()
        assert made.get_info().model_data.model_name == "smollm2-135m"
