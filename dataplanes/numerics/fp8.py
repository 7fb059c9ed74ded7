"""FP8 e4m3 with one scale per head vector; saturating, and no byte is ever a NaN for a finite input.

Source: Micikevicius et al., "FP8 formats for deep learning" (2022): e4m3 has no infinity, 448 is its largest value,
0x7f and 0xff are NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
SMALLEST_SCALE = 2.0**-126
SMALLEST_SUBNORMAL = 2.0**-9


def quantise(x: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Scale each group to e4m3's range.

    Args:
        x: float32; one group is a slice along `dim`.
        dim: the axis that a group spans.

    Returns:
        Bytes (uint8, shape of `x`) and scale (bfloat16, `dim` of length 1, rounded up so that nothing exceeds 448).
    """
    scale = scale_of_peak(x.abs().amax(dim, keepdim=True), LARGEST)
    scaled = (x / scale.float()).clamp_(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 of the bytes times their scale."""
    return codes.view(torch.float8_e4m3fn).float().mul_(scale.float())


def scale_of_peak(peak: Tensor, largest: float) -> Tensor:
    """A bfloat16 scale of at least `peak / largest`, never zero or subnormal."""
    return (peak * scale_per_peak(largest)).clamp_min(SMALLEST_SCALE).bfloat16()


def scale_per_peak(largest: float) -> float:
    """1 / largest, raised so that rounding to bfloat16 cannot take it below."""
    return (1.0 + 2.0**-8) / largest
