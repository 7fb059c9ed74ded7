"""What transfers and loads of KV share: chunks whose stages overlap, and the seconds and bytes of each stage.

V raw bytes are cut into K chunks; one stage works on a chunk while the next one works on the chunk before it, so a
transfer takes the sum of one chunk's stages and K - 1 times the slowest of them. Raw bytes are not cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from controld.controller.knobs.base import STAGES, Array, Context, Stage, StageModels

_Scalar = TypeVar("_Scalar", bound=np.generic)

ENCODE, BYTES, WIRE, DECODE = (STAGES.index(s) for s in (Stage.ENCODE, Stage.BYTES, Stage.WIRE, Stage.DECODE))


def column(values: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """Values by arm, shape [arms], as they stand beside sizes, bandwidths and loads: shape [arms, 1, 1, 1]."""
    return values[:, None, None, None]


def axes(context: Context) -> tuple[Array, Array]:
    """Sizes and bandwidths, each along its own one of the last three of four axes; the last is for loads."""
    return context.sizes_bytes[None, :, None, None], context.bandwidths_bytes_per_s[None, None, :, None]


def chunk_counts(framed: NDArray[np.bool_], size: Array, chunk_bytes: float) -> Array:
    """K: ceil(V / chunk_bytes) for an arm that is cut, 1 for any other; the shape that `framed` and `size` make."""
    return np.where(framed, np.maximum(np.ceil(size / chunk_bytes), 1.0), 1.0)


def overlapped(stages: Sequence[Array], chunks: Array) -> Array:
    """Seconds from the first chunk's begin to the last one's end, of stages whose seconds are given for all chunks."""
    slowest = total = stages[0]
    for stage in stages[1:]:
        slowest = np.maximum(slowest, stage)
        total = total + stage
    return (total + (chunks - 1.0) * slowest) / chunks


def decode_seconds(models: StageModels, factors: Array, size: Array) -> Array:
    """Corrected seconds of decoding, shape [arms, S, 1, 1]."""
    return column(factors[:, DECODE]) * (column(models.decode_a_s) + size * column(models.decode_b_s_per_byte))


def wire_seconds(models: StageModels, factors: Array, size: Array, bandwidth: Array) -> Array:
    """Corrected seconds on the wire, shape [arms, S, B, 1]."""
    return column(models.wire_share * factors[:, BYTES] * factors[:, WIRE]) * (size / bandwidth)


def work_of_servers(servers: Sequence[Array | float], shape: tuple[int, ...]) -> Array:
    """Seconds that a transfer takes of each server, in the order of `Knob.work_stages`: [servers, *shape]."""
    work = np.zeros((len(servers), *shape))
    for index, seconds in enumerate(servers):
        work[index] = seconds
    return work


def coded_stage_seconds(
    models: StageModels, arm: int, *, raw_bytes: float, wire_bytes: float, bandwidth: float
) -> dict[Stage, float]:
    """The bytes, decode and wire stages of an arm that is cut; see `Knob.stage_seconds`."""
    decode = models.decode_a_s[arm] + models.decode_b_s_per_byte[arm] * raw_bytes
    predicted = {Stage.BYTES: float(models.wire_share[arm] * raw_bytes), Stage.DECODE: float(decode)}
    if bandwidth > 0:
        predicted[Stage.WIRE] = wire_bytes / bandwidth
    return predicted
