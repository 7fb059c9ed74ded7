"""What this machine has for LongLive: found without importing a library that needs a GPU to be imported."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Final

import torch

NVFP4_CAPABILITY: Final = (10, 0)
"""Tensor cores with NVFP4 begin with Blackwell."""
FP8_CAPABILITY: Final = (8, 9)
"""Tensor cores with FP8 begin with Ada; torchao refuses less."""
_LIBRARIES: Final = ("transformer_engine", "fouroversix", "torchao", "omegaconf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The device that the engine runs on.

    Args:
        device: torch's name, "" where there is none.
        name: the product's.
        compute_capability: (major, minor), None without a device.
        memory_bytes: of the device.
        libraries: which of the optional libraries are installed.
    """

    device: str
    name: str
    compute_capability: tuple[int, int] | None
    memory_bytes: int
    libraries: frozenset[str]

    def has(self, library: str) -> bool:
        """Whether it is installed."""
        return library in self.libraries

    def reaches(self, capability: tuple[int, int]) -> bool:
        """Whether the compute capability is this one or newer."""
        return self.compute_capability is not None and self.compute_capability >= capability


def probe(index: int = 0) -> Hardware:
    """The CUDA device `index`, or that there is none."""
    libraries = frozenset(name for name in _LIBRARIES if importlib.util.find_spec(name) is not None)
    if not torch.cuda.is_available():
        return Hardware(device="", name="no CUDA device", compute_capability=None, memory_bytes=0, libraries=libraries)
    properties = torch.cuda.get_device_properties(index)
    return Hardware(
        device=f"cuda:{index}",
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        libraries=libraries,
    )
