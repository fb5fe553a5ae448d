"""Runs `opentinker`, or the program that is killed on the way, to its end."""

import os
import subprocess
from pathlib import Path

from tests import programs


def run_command(
    home: Path, api: str, *arguments: str, module: str = "flows.cli"
) -> "subprocess.CompletedProcess[str]":
    """What came of a command on an installation and a Prefect server; `module`: the program."""
    environment = os.environ | {"OPENTINKER_HOME": str(home), "PREFECT_API_URL": api}
    return programs.run(arguments, environment, module=module)
