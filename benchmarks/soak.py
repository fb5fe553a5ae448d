"""Whether a server leaks: tenants that train, sample, leave rudely and are killed, for minutes.

`opentinker serve` on the tiny model, in a process of its own, and crowds of tenants (`soak_tenants.py`) in
others. Each tenant begins session after session by the official SDK: steps, a named checkpoint, a sampler,
samples; futures that nobody waits for; connections broken in the middle of headers, bodies, long polls,
streams and downloads; streams that are not read; half of the sessions are never ended. Crowds are killed
(SIGKILL) and replaced, one every few seconds. Sessions that are not heard of expire after 20 s.

Every 2 s: the server's memory, threads and open files, and what it says that it holds (`/metrics`). In the
end the tenants are gone, and the server is asked again, once everything had time to expire: it must hold
nothing.

- `resident_growth`: resident memory by its trend over the second half ÷ its mean there, as a share. A flat
  line is 0; the verdict is `flat` up to 0.03.
- sessions a minute: how much happened.

    python benchmarks/soak.py [--json] [--minutes 10] [--tenants 32] [--series series.json]
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.served import served
from benchmarks.soak_tenants import crowd

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess


EVERY_S = 2.0
CROWD = 8
"""Tenants of one process."""
KILL_EVERY_S = 30.0
SESSION_TIMEOUT_S = 20.0
REST_S = 120.0
"""How long what is left may take to expire."""
FLAT = 0.03
HELD = ("sessions", "policies_resident", "futures_pending", "work_running", "versions_wanted")
"""What a server without clients has none of; see `service/holdings.py`. Results are kept for ten minutes."""
SHOWN = (*HELD, "futures", "http_requests_open", "queue_depth", "states", "slots", "snapshots")
CACHES_GB = 0.01
"""Of adapters and of prompts: they are to be full long before the second half."""
FORKED = multiprocessing.get_context("forkserver")
"""Crowds come from a process that has imported what they need."""
Moment = dict[str, float]


@contextmanager
def server(home: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A server of the tiny model; gives its URL and process."""
    runtime = {"snapshot_memory_gb": CACHES_GB, "prefix_memory_gb": CACHES_GB}
    settings = {"models": ["tiny"], "session_timeout_s": SESSION_TIMEOUT_S, "runtime": runtime}
    with served(home, settings) as (url, process):
        yield url, psutil.Process(process.pid)


@dataclass
class Crowds:
    """Processes of tenants, which are killed and replaced."""

    url: str
    keys: Sequence[str]
    log: Path
    killed: int = 0
    _running: dict[int, "ForkServerProcess"] = field(default_factory=dict)

    def begin(self) -> None:
        """Let all tenants live."""
        for first in range(0, len(self.keys), CROWD):
            self._begin(first)

    def replace_one(self, draw: random.Random) -> None:
        """Kill a crowd; others of the same tenants come."""
        first = draw.choice(list(self._running))
        self._kill(first)
        self.killed += 1
        self._begin(first)

    def end(self) -> None:
        """Kill all of them."""
        for first in list(self._running):
            self._kill(first)

    def failures(self) -> list[str]:
        """What tenants said that failed."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def _begin(self, first: int) -> None:
        keys = self.keys[first : first + CROWD]
        arguments = (self.url, keys, f"{first}/{self.killed}", self.log)
        self._running[first] = FORKED.Process(target=crowd, args=arguments, daemon=True)
        self._running[first].start()

    def _kill(self, first: int) -> None:
        process = self._running.pop(first)
        process.kill()
        process.join()


class Watch:
    """What a server takes and holds, moment by moment."""

    def __init__(self, url: str, process: psutil.Process) -> None:
        self._url, self._process = url, process
        self._began = time.monotonic()
        self.moments: list[Moment] = []

    def look(self) -> Moment:
        """Note how it is now."""
        memory = self._process.memory_full_info()
        now = {
            "second": time.monotonic() - self._began,
            "resident_mb": memory.rss / 1e6,
            "own_mb": memory.uss / 1e6,
            "threads": float(self._process.num_threads()),
            "open_files": float(self._process.num_fds()),
            **self._said(),
        }
        self.moments.append(now)
        return now

    def _said(self) -> Moment:
        """The server's own metrics, summed over their labels but for the tiers."""
        said: Moment = {}
        text = httpx.get(f"{self._url}/metrics", timeout=60).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix("opentinker_")
                name = sample.labels["tier"] if name == "resident" else name
                said[name] = said.get(name, 0.0) + sample.value
        return said

    def trend(self, name: str) -> tuple[float, float]:
        """Of the second half: growth a minute, by least squares, and the mean."""
        half = [one for one in self.moments if one["second"] >= self.moments[-1]["second"] / 2]
        minutes, values = [one["second"] / 60 for one in half], [one[name] for one in half]
        return float(np.polyfit(minutes, values, 1)[0]), float(np.mean(values))


def soak(watch: Watch, crowds: Crowds, seconds: float) -> None:
    """Let tenants come and go for `seconds`."""
    draw = random.Random(0)
    began = killed = time.monotonic()
    while (now := time.monotonic()) - began < seconds:
        watch.look()
        if now - killed >= KILL_EVERY_S:
            crowds.replace_one(draw)
            killed = now
        time.sleep(EVERY_S)


def rest(watch: Watch) -> Moment:
    """How the server is when everything had time to end."""
    moments, deadline = watch.moments, time.monotonic() + REST_S
    watch.moments = []
    try:
        while any((now := watch.look())[name] for name in HELD) and time.monotonic() < deadline:
            time.sleep(EVERY_S)
        return now
    finally:
        watch.moments = moments


def report(watch: Watch, left: Moment, crowds: Crowds, minutes: float, *, as_json: bool) -> bool:
    """Print what was seen; gives whether nothing leaks."""
    from benchmarks.report import show  # with torch, which crowds do not need

    names = ("resident_mb", "own_mb", "threads", "open_files", *SHOWN)
    trends = {name: watch.trend(name) for name in names}
    rows: list[tuple[str, float, str]] = []
    for name, (growth, mean) in trends.items():
        rows += [(name, mean, "mean"), (f"{name}, growth", growth, "a minute")]
        rows.append((f"{name}, left", left[name], ""))
    last = watch.moments[-1]
    requests = last["http_requests_total"]
    rows.append(("requests a minute", requests / minutes, "a minute"))
    rows.append(("tenants' processes killed", float(crowds.killed), ""))
    rows.append(("failures that tenants saw", float(len(crowds.failures())), ""))
    growth, mean = trends["resident_mb"]
    share = growth * minutes / 2 / mean
    held = [name for name in HELD if left[name]]
    show("soak", rows, {"resident_growth": share}, as_json=as_json)
    verdict = "flat" if share <= FLAT else "grows"
    print(f"memory: {verdict}; left behind: {', '.join(held) or 'nothing'}", file=sys.stderr)
    return share <= FLAT and not held


def main() -> None:
    """Soak, print, and exit with 1 if something leaks."""
    from benchmarks.service import new_keys

    FORKED.set_forkserver_preload(["benchmarks.soak_tenants"])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--tenants", type=int, default=32)
    parser.add_argument("--series", type=Path, help="a file for every moment, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        home = Path(scratch)
        threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        os.environ |= {"OPENTINKER_HOME": scratch, "TINKER_TELEMETRY": "0", **threads}
        url, process = running.enter_context(server(home))
        crowds = Crowds(url, new_keys(arguments.tenants), home / "tenants.log")
        running.callback(crowds.end)
        watch = Watch(url, process)
        crowds.begin()
        soak(watch, crowds, arguments.minutes * 60)
        crowds.end()
        left = rest(watch)
        if arguments.series:
            series: dict[str, Any] = {"moments": [*watch.moments, left], "failures": crowds.failures()}
            arguments.series.write_text(json.dumps(series))
        holds = report(watch, left, crowds, arguments.minutes, as_json=arguments.json)
    if not holds:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
