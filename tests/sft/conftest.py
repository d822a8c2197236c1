"""Marks of the tests of fine-tuning."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_model: trains a model from PyPI; skipped only where that cannot be had")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here as slow, for now."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
