"""Side-by-side measurements; each prints a table, or with --json one object with `ratios`."""

import sys
from pathlib import Path

# A script that is run by its path has this folder on `sys.path`, where transformers, looking for the
# package `kernels`, would find and run `kernels.py`. So scripts import from here before it.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
