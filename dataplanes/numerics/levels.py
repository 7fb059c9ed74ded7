"""Integer levels over a group's range, with a bfloat16 step and an integer offset.

A group's range is cut into `levels` equal cells; a symbol decodes to its cell's middle, so the error is at most half a
step. The offset is a whole number of sixteenths of a step: it costs a coder a few bits where a floating-point minimum
would cost eleven. Encoder and decoder use the same rounded step, and `(offset + 16 * symbol) * step / 16` has at most
24 significant bits, so it is exact in float32: a decoded value depends on no compiler's choice to fuse operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_STEP = 2.0**-100
"""Step of a group without any range; a step is never zero or infinite, nor its inverse."""

FRACTION = 16
"""Offsets count in this part of a step."""

LARGEST_OFFSET_STEPS = 2043.0
"""A step is at least the group's largest magnitude over this, so that the offset fits 16 bits."""


def quantise(x: Tensor, levels: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Map each group to symbols 0 .. levels - 1.

    Args:
        x: float32, finite, magnitudes below 2**100; one group is a slice along `dim`. Not empty along `dim`.
        levels: number of levels, 2..256.
        dim: the axis that a group spans.

    Returns:
        Symbols (uint8, shape of `x`), step (bfloat16) and offset (int16), both with `dim` of length 1.
    """
    low = x.amin(dim, keepdim=True)
    high = x.amax(dim, keepdim=True)
    extent = high - low
    peak = torch.maximum(low.abs(), high.abs())
    wanted = torch.maximum(extent * inverse_cells(levels), peak * (1.0 / LARGEST_OFFSET_STEPS))
    step = round_up_to_bfloat16(wanted.clamp_min(SMALLEST_STEP))
    # The first cell starts at the minimum or up to a sixteenth of a step below it; a constant sits on a cell's middle.
    middle = torch.where(extent > 0, step * (0.5 - 0.5 / FRACTION), torch.zeros_like(step))
    offset = ((low + middle) * (FRACTION / step)).round()
    symbols = ((x - offset * (step / FRACTION)) * (1.0 / step)).round_().clamp_(0, levels - 1)
    return symbols.to(torch.uint8), step.bfloat16(), offset.to(torch.int16)


def dequantise(symbols: Tensor, step: Tensor, offset: Tensor) -> Tensor:
    """float32 `(offset + 16 * symbol) * step / 16`; `step` and `offset` broadcast against `symbols`."""
    return (symbols.float() * FRACTION).add_(offset.float()).mul_(step.float() / FRACTION)


def inverse_cells(levels: int) -> float:
    """1 / (levels - 1/16): the share of the range that a step must span, leaving room for the offset's rounding."""
    return 1.0 / (levels - 1.0 / FRACTION)


def round_up_to_bfloat16(x: Tensor) -> Tensor:
    """The smallest bfloat16 value at or above positive finite float32 `x`, as float32."""
    return ((x.contiguous().view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
