"""What every test shares: the cycle collector passes over what importing the tests has made."""

from __future__ import annotations

import gc

import pytest


def pytest_sessionstart() -> None:
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Modules stay to the end, and walking their 300,000 objects in each full collection costs seconds."""
    gc.collect()
    gc.freeze()
    gc.enable()
