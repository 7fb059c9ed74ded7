"""Optional libraries, which may fail to import in ways of their own."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from types import ModuleType

import torch

_LOG = logging.getLogger(__name__)


@cache
def imported(name: str) -> ModuleType | str:
    """The module, or why there is none.

    Any exception counts: Transformer Engine without CUDA raises a RuntimeError, other libraries an OSError or
    AttributeError. Remembered, as a failed import takes seconds and does not heal.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - foreign code at a process edge
        _LOG.info("%s does not import", name, exc_info=True)
        first_line = (str(error).strip().splitlines() or [""])[0]
        return f"{name} does not import: {type(error).__name__}: {first_line}"


def below_capability(device: torch.device, major: int, minor: int) -> str | None:
    """Why a CUDA device of compute capability `major.minor` is missing; None: it is there."""
    wanted = f"needs a CUDA device of compute capability {major}.{minor} or higher"
    if device.type != "cuda":
        return f"{wanted}; this is {device.type}"
    found = torch.cuda.get_device_capability(device)
    return None if found >= (major, minor) else f"{wanted}; this one has {found[0]}.{found[1]}"
