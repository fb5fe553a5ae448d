"""Fixtures that several rooms share; and which tests run side by side when pytest-xdist runs them."""

import gc
import os
import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells set it for what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send Ctrl-C to programs they start
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from docs.screenshots import Servers

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")  # how fast examples are made says nothing of the code

_LONG = ("vllm", "learning", "servers", "processes")
"""Markers of files that take long, the longest first: they begin first, so that none is left at the end."""

_PREFECT = ("training_flows", "train_together", "two_flows", "deployments")
_TOGETHER = {f"tests/flows/test_{name}.py": "prefect" for name in _PREFECT}
_TOGETHER |= dict.fromkeys(("tests/flows/test_pool.py", "tests/ui/test_pages.py"), "pool")
_TOGETHER |= {f"tests/golden/test_{name}.py": "golden" for name in ("replay", "joint_replay")}
_TOGETHER |= {f"tests/sampling/vllm/test_{name}.py": "vllm" for name in ("real", "real_canary")}
"""Files whose tests share servers, or whose servers do not fit side by side, by the name of their group."""

_APART = "tests/learning/"
"""Where tests are long and share nothing."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a worker of pytest-xdist: files with a long test come first."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = dict[Path, int]()
        for item in items:
            marks = [number for number, name in enumerate(_LONG) if item.get_closest_marker(name)]
            place[item.path] = min([*marks, place.get(item.path, len(_LONG))])
        items.sort(key=lambda item: place[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`pytest -n 3` keeps the tests of a file on one worker, for what they share.

    (The markers of `--dist loadgroup` are not seen under pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return nodeid if path.startswith(_APART) else _TOGETHER.get(path, path)

    config.option.loadscopereorder = False  # in the order of collection, not by their number of tests
    return Scheduling(config, log)


@pytest.fixture(autouse=True, scope="module")
def _no_client_is_left() -> Iterator[None]:
    """Clients of the Tinker SDK that a module leaves would look for their servers from threads for ever."""
    yield
    if module := sys.modules.get("tinker.lib.internal_client_holder"):
        for holder in [one for one in gc.get_objects() if type(one) is module.InternalClientHolder]:
            holder.close()


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation's home; the tiny model is built in it on first use, and only there."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Servers"]:
    """A running `opentinker up --workers`, which has deployed, on a home of its own."""
    from docs.screenshots import served

    with served(tmp_path_factory.mktemp("pool")) as servers:
        yield servers
