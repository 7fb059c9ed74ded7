"""Symmetric integer levels with a step from a group's largest magnitude; zero is a level, and nothing else is sent.

Source: CacheGen (Liu et al., SIGCOMM 2024, arXiv 2310.07240) in the form that LMCache runs: `bins` of which one is
never used, a step of the largest magnitude over (bins / 2 - 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dataplanes.numerics.levels import SMALLEST_STEP, round_up_to_bfloat16

SMALLEST_BINS = 4


def largest_symbol(bins: int) -> int:
    """The level of the largest magnitude; symbols are 0 .. 2 * this."""
    return bins // 2 - 1


def alphabet(bins: int) -> int:
    """How many symbols occur."""
    return 2 * largest_symbol(bins) + 1


def quantise(x: Tensor, bins: int, dim: int) -> tuple[Tensor, Tensor]:
    """Map each group to symbols 0 .. alphabet - 1.

    Args:
        x: float32, finite, magnitudes below 2**100; one group is a slice along `dim`.
        bins: 4..256.
        dim: the axis that a group spans.

    Returns:
        Symbols (uint8, shape of `x`) and step (bfloat16, `dim` of length 1, rounded up so that nothing is cut off).
    """
    last = largest_symbol(bins)
    step = round_up_to_bfloat16((x.abs().amax(dim, keepdim=True) * (1.0 / last)).clamp_min(SMALLEST_STEP))
    symbols = (x * (1.0 / step)).round_().clamp_(-last, last) + last
    return symbols.to(torch.uint8), step.bfloat16()


def dequantise(symbols: Tensor, step: Tensor, bins: int) -> Tensor:
    """float32 `(symbol - largest_symbol) * step`, exact."""
    return (symbols.float() - largest_symbol(bins)).mul_(step.float())
