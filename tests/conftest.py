"""What every test shares: a cycle collector that passes over modules, and numbers that are drawn alike in every run."""

from __future__ import annotations

import gc
import sys

import pytest
from hypothesis import settings

# Whether a commit passes is no matter of luck, nor of who else keeps the machine busy: the same examples each time, and
# no limit to what one may take. `--hypothesis-profile=default` looks for others.
settings.load_profile("ci")


def pytest_sessionstart() -> None:
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Modules stay to the end, and walking their 300,000 objects in each full collection costs seconds."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Tensors that a test draws without a generator of its own depend neither on the run nor on the tests before it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
