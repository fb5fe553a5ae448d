"""Registers the mark of the slowest test here."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_task: plays every reasoning-gym task (half a minute)")
