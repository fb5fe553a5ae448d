"""Fixtures that several rooms share: a home with the tiny model in it, and an engine around that model."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation's home; the tiny model is built in it on first use, and only there."""
    return tmp_path_factory.mktemp("home")
