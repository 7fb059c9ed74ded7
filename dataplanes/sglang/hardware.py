"""What codec times depend on, named alike by every process of this data plane."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def device_name(device: str = "cpu") -> str:
    """The processor's or the accelerator's name, as its vendor writes it.

    Args:
        device: torch's name of the kind of device.
    """
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
