"""Imports every module of the project once, so that all that it imports is compiled.

pip compiles what it installs, on one core, and of what is installed here one module in four is ever imported.
Where nothing is compiled and Python may not write (PYTHONDONTWRITEBYTECODE), every start compiles anew.

    python deployments/precompile.py
"""

import contextlib
import pkgutil
import sys
import warnings
from importlib import import_module

ROOMS = ("envs", "opentinker_kernels", "opentinker_core", "tasks", "flows")


def main() -> None:
    """Import all there is, but for what cannot be imported on this machine."""
    sys.dont_write_bytecode = False
    warnings.simplefilter("ignore")
    for room in ROOMS:
        for module in pkgutil.walk_packages(import_module(room).__path__, f"{room}.", lambda _: None):
            with contextlib.suppress(Exception):  # it is not the place to say what a machine lacks
                import_module(module.name)


if __name__ == "__main__":
    main()
