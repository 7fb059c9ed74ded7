"""Contract double, not LongLive: faults on request, `name=value` in LONGLIVE_DOUBLE_FAULT."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch


def fault(name, value):
    """Whether this fault is asked for here; an `oom` raises, a `hang` says so in a file and sleeps."""
    wanted, _, at = os.environ.get("LONGLIVE_DOUBLE_FAULT", "").partition("=")
    if wanted != name or at != str(value):
        return False
    if name.startswith("oom"):
        raise torch.OutOfMemoryError(f"the double has no memory for {value}")
    if name.startswith("hang"):
        Path(os.environ["LONGLIVE_DOUBLE_HANGS"]).touch()
        time.sleep(600)
    return True
