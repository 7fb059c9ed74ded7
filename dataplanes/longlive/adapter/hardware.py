"""What this machine has for LongLive: found without importing a library that needs a GPU to be imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from dataplanes.longlive.linear.backend import LinearBackend, Offer
from dataplanes.longlive.linear.precision import LinearPrecision, Precision
from dataplanes.longlive.linear.probing import ProbeSize, all_backends, probe_all
from dataplanes.numerics.nvfp4 import BlockRule

NVFP4_CAPABILITY: Final = (10, 0)
"""Tensor cores with NVFP4 begin with Blackwell."""
FP8_CAPABILITY: Final = (8, 9)
"""Tensor cores with FP8 begin with Ada; torchao refuses less."""
W8A8: Final = LinearPrecision(weights=Precision.FP8, activations=Precision.FP8)
W4A4: Final = LinearPrecision(weights=Precision.NVFP4, activations=Precision.NVFP4)
W4A4_FOUR_OVER_SIX: Final = LinearPrecision(
    weights=Precision.NVFP4, activations=Precision.NVFP4, block_rule=BlockRule.FOUR_OVER_SIX
)
_PROBED: Final = (W8A8, W4A4, W4A4_FOUR_OVER_SIX)
"""What LongLive's layers run below bf16."""
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
        unfit: by back end and precision, why a library that is installed is not used: its self-test, or its speed.
    """

    device: str
    name: str
    compute_capability: tuple[int, int] | None
    memory_bytes: int
    libraries: frozenset[str]
    unfit: Mapping[tuple[str, LinearPrecision], str] = field(default_factory=dict)

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
    unfit = find_unfit(torch.device("cuda", index))
    # What the layers of the probes took is the model's now.
    torch.cuda.empty_cache()
    return Hardware(
        device=f"cuda:{index}",
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        libraries=libraries,
        unfit=unfit,
    )


def find_unfit(
    device: torch.device, *, backends: tuple[LinearBackend, ...] | None = None, size: ProbeSize | None = None
) -> dict[tuple[str, LinearPrecision], str]:
    """Back ends that fail their self-test on a device or are slower there than bf16, with the reason.

    Args:
        device: that LongLive would run on.
        backends: None: all of them.
        size: of the layer that is measured; None: LongLive's on CUDA.
    """
    chosen = tuple(one for one in (backends or all_backends()) if not one.is_emulated)
    offers = probe_all(device, backends=chosen, precisions=_PROBED, size=size)
    return {(one.backend, one.precision): one.reason for one in offers.probes if one.offer is Offer.NOTHING}
