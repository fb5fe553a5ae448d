"""Fixtures that several rooms share; and which tests run side by side when pytest-xdist runs them."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores

from pathlib import Path

import pytest

_LONG = ("learning", "servers", "processes")
"""Markers of files that take long: they begin first, so that no worker has one left over at the end."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file on one worker, for what they share, unless they name a group of their own."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("/".join(item.path.parts[-2:])))
    if "PYTEST_XDIST_WORKER" in os.environ:
        long = {_group(item) for item in items if any(map(item.get_closest_marker, _LONG))}
        items.sort(key=lambda item: _group(item) not in long)


def _group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    return str(marker.args[0])


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation's home; the tiny model is built in it on first use, and only there."""
    return tmp_path_factory.mktemp("home")
