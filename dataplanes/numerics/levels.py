"""Integer levels between a group's minimum and maximum, with half-precision scale and zero.

The grid always covers the group: the zero is rounded down and the scale up, so no value is clamped and the error is at
most half a step. The encoder divides by exactly the rounded scale that the decoder multiplies with. `symbol * scale`
has at most 8 + 11 significant bits, so it is exact in float32 and the decoded value does not depend on whether a
compiler fuses the multiplication with the addition.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_SCALE = 2.0**-24
"""The smallest positive half-precision number; a constant group gets it, so a scale is never zero."""

LARGEST_SIDE = 2.0**100
"""Scales up to here leave room for every later multiplication, sum and rounding up in bfloat16 and float32."""

_HALF_ULP = 2.0**-11
"""Half a unit in the last place of a normal half-precision number, relative to it."""


def quantise(x: Tensor, levels: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Map each group to symbols 0 .. levels - 1.

    Args:
        x: float32; one group is a slice along `dim`. Not empty along `dim`.
        levels: number of levels, 2..256.
        dim: the axis that a group spans.

    Returns:
        Symbols (uint8, shape of `x`), scale and zero (float16, shape of `x` with `dim` of length 1). A group with an
        infinity, a NaN or a range that half precision cannot hold has a non-finite scale or zero and undefined symbols.
    """
    low = x.amin(dim, keepdim=True)
    high = x.amax(dim, keepdim=True)
    zero = round_down_to_half(low)
    scale = step_of_range(high - zero.float(), levels)
    symbols = ((x - zero.float()) * (1.0 / scale.float())).round_().clamp_(0, levels - 1)
    return symbols.to(torch.uint8), scale, zero


def dequantise(symbols: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """float32 `zero + symbol * scale`; `scale` and `zero` broadcast against `symbols`."""
    return symbols.float().mul_(scale.float()).add_(zero.float())


def round_down_to_half(low: Tensor) -> Tensor:
    """A half-precision number that is at most `low` and at most two units in the last place below it."""
    return (low - low.abs() * _HALF_ULP - SMALLEST_SCALE / 2).half()


def step_of_range(extent: Tensor, levels: int) -> Tensor:
    """A half-precision step with `(levels - 1) * step >= extent`, at least `SMALLEST_SCALE`."""
    step = extent * (1.0 / (levels - 1))
    return (step * (1.0 + 2 * _HALF_ULP) + SMALLEST_SCALE / 2).clamp_min(SMALLEST_SCALE).half()


def all_usable(*side: Tensor) -> bool:
    """Whether every scale and zero is finite and small enough that decoding stays finite; reads the device."""
    return all(bool((tensor.float().abs() < LARGEST_SIDE).all()) for tensor in side)
