"""Foreign packages, such as the public cookbook, in folders of their own: never in the tested environment."""

import fcntl
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from opentinker_core.digests import digest_json

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_PATIENCE_S = 300


class NotInstallableError(Exception):
    """The packages cannot be had on this machine; the message says why."""


def ensure(home: Path, requirements: Path = REQUIREMENTS, name: str = "cookbook") -> Path:
    """The folder to put on another process's `PYTHONPATH`; installed on first use, once a machine.

    Raises:
        NotInstallableError: pip does not get it.
    """
    digest = digest_json({"requirements": requirements.read_text(), "python": sys.version_info[:2]})
    target = home.expanduser().absolute() / name / f"packages-{digest[:12]}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                _install(requirements, name, Path(scratch) / "packages")
                shutil.move(Path(scratch) / "packages", target)
    return target


def _install(requirements: Path, name: str, target: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    command = [
        *pip,
        "--no-compile",
        "--only-binary=:all:",
        "--target",
        str(target),
        "--requirement",
        str(requirements),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        raise NotInstallableError(f"{name}: pip took more than {_PATIENCE_S} s") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        raise NotInstallableError(f"{name}: {' '.join(errors[:2]) or done.stderr[-300:]}")
