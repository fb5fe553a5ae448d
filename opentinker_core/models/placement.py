"""Which device, number format and how many threads: decided here and nowhere else."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from opentinker_core.config.schema import RuntimeConfig
from opentinker_core.errors import UsageError

_CUDA = re.compile(r"cuda(?::(\d{1,3}))?\Z", re.ASCII)
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclass(frozen=True)
class Placement:
    """Where the base model lies and how it computes."""

    device: str
    """`cpu` or `cuda:N`."""
    dtype: torch.dtype
    threads: int
    """CPU threads of torch."""


def placement(config: RuntimeConfig) -> Placement:
    """Decide the placement and apply its number of threads to this process.

    float32 on the CPU, where it is the faster one for short sequences, bfloat16 on a GPU, unless
    the config says otherwise.

    Raises:
        UsageError: the device is unknown or not there.
    """
    device = _device(config.device)
    default = torch.float32 if device == "cpu" else torch.bfloat16
    dtype = (
        default
        if config.dtype == "auto"
        else {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    )
    threads = config.threads or available_cores()
    torch.set_num_threads(threads)
    return Placement(device, dtype, threads)


def available_cores() -> int:
    """`OMP_NUM_THREADS` if set, else the physical cores this process may run on."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return os.cpu_count() or 1
    siblings = (Path(_TOPOLOGY.format(cpu)) for cpu in os.sched_getaffinity(0))
    return len({path.read_text() if path.exists() else str(path) for path in siblings})


def _device(name: str) -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda:0" if count else "cpu"
    cuda = _CUDA.match(name)
    if cuda and int(cuda[1] or 0) < count:
        return f"cuda:{int(cuda[1] or 0)}"
    if name == "cpu":
        return "cpu"
    accepted = ", ".join(["auto", "cpu", *(f"cuda:{index}" for index in range(count))])
    problem = f"is not there ({count} CUDA devices)" if cuda else "is unknown"
    raise UsageError(f"runtime.device: {name!r} {problem}; accepted here: {accepted}")
