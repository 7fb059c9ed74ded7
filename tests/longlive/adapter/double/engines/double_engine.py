"""Makes the LongLive adapter's engine on the contract double: the hardware is said, not there."""

from __future__ import annotations

from typing import Any

from dataplanes.longlive.adapter.deployment import read_deployment
from dataplanes.longlive.adapter.hardware import Hardware
from dataplanes.longlive.adapter.longlive_engine import LongLiveEngine

LIBRARIES = frozenset({"transformer_engine", "fouroversix", "torchao", "omegaconf"})


def said_hardware(capability: tuple[int, int] = (10, 0), libraries: frozenset[str] = LIBRARIES) -> Hardware:
    """A device that the double accepts: torch's CPU under the name of no product."""
    return Hardware(
        device="cpu",
        name="contract double",
        compute_capability=capability,
        memory_bytes=0,
        libraries=libraries,
    )


def make(deployment: str, **more: Any) -> LongLiveEngine:
    """For `WorkerSettings.factory`."""
    return LongLiveEngine(read_deployment(deployment), said_hardware(**more))
