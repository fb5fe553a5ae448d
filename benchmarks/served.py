"""`opentinker serve` in a process of its own, for benchmarks."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentinker_core.servers import free_port

ROOT = Path(__file__).parents[1]


@contextmanager
def served(home: Path, settings: Mapping[str, Any]) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A server with these settings on a free port; gives its URL and process, killed at the end.

    Raises:
        SystemExit: it did not start; with its log.
    """
    config, log = home / "serve.yaml", home / "serve.log"
    config.write_text(json.dumps({"port": free_port(), **settings}))
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "serve", "--json", str(config)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
        )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            yield str(json.loads(line)["url"]), process
        finally:
            process.kill()
