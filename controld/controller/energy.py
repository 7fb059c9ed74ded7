"""What a transfer costs in joules: a table of coefficients, every one of them estimated, and the sum over its parts.

E = watts x seconds of the codec + joules per byte on the wire + joules per byte through memory: computing,
communication and memory, as networking-aware accounting splits it (arXiv 2604.07857). Bytes and seconds are predicted
and learned; the coefficients are not measured here, so joules rank arms and are no bill.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from controld.controller.knobs.base import Array, Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """One row of the table.

    Args:
        source: where the figure comes from.
        estimated: whether it was measured on the machines that it is used for; always true so far.
    """

    name: str
    value: float
    unit: str
    source: str
    estimated: bool = True


CORE = Coefficient(
    name="a busy core",
    value=30.0,
    unit="W",
    source="assumption: a server's package power over the few cores that a codec keeps busy",
)
WIRE = Coefficient(
    name="the wire",
    value=1e-8,
    unit="J/B",
    source="assumption: both network cards and two switches at part load, about 1 nJ a bit",
)
MEMORY = Coefficient(
    name="memory",
    value=160e-12,
    unit="J/B",
    source="640 pJ a 32-bit word of DRAM at 45 nm (Horowitz, as quoted for arXiv 2604.07857)",
)
PREFILL = Coefficient(
    name="a busy prefill engine",
    value=300.0,
    unit="W",
    source="assumption: an accelerator at part load",
)
COEFFICIENTS = (CORE, WIRE, MEMORY, PREFILL)

_CODEC_PASSES = 2.0
"""A codec reads its input and writes its output on each side: raw and coded once each, and both again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joules:
    """Parts of one transfer's energy, each of shape [arms, S, 1, 1] or broadcasting to it."""

    computing_j: Array
    wire_j: Array
    memory_j: Array

    @property
    def total_j(self) -> Array:
        """Their sum."""
        return np.asarray(self.computing_j + self.wire_j + self.memory_j)


def transfer_joules(prediction: Prediction, wire_shares: Array, sizes_bytes: Array) -> Joules:
    """Estimated joules of every arm.

    Args:
        wire_shares: wire bytes / raw bytes as corrected, shape [arms], raw first; 0 for the arm that computes.
        sizes_bytes: raw bytes, shape [S].
    """
    raw_bytes = sizes_bytes[None, :, None, None]
    share = wire_shares[:, None, None, None]
    wire_bytes = share * raw_bytes
    watts = np.where(share > 0, CORE.value, PREFILL.value)
    # Raw goes from memory to memory; what is coded passes through it once more on each side.
    passes = np.where(np.arange(len(share)) > 0, _CODEC_PASSES, 1.0)[:, None, None, None]
    return Joules(
        computing_j=watts * (prediction.encode_s + prediction.decode_s),
        wire_j=WIRE.value * wire_bytes,
        memory_j=MEMORY.value * passes * (raw_bytes + wire_bytes),
    )
