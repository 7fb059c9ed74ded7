"""A codebook that is optimal for a unit Gaussian, scaled by each vector's root mean square.

Source: TurboQuant (Zandieh et al. 2025, arXiv 2504.19874), its form for the least squared error: after a
random rotation the coordinates of a vector are nearly Gaussian, whatever it was, so one codebook (Lloyd 1982, Max 1960)
serves all, and of the vector only its norm is sent. The rotation is the caller's; here it is the Hadamard transform.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist

import torch
import torch.nn.functional as functional
from torch import Tensor

SMALLEST_SCALE = 2.0**-100
SMALLEST_PEAK = 2.0**-120
_GRID = 4096
"""Entries are whole numbers over this, so that no library's last digit decides what a frame decodes to."""

_ROUNDS = 3000
_SETTLED = 1e-7


@lru_cache(maxsize=64)
def codebook(levels: int) -> tuple[float, ...]:
    """The entries in order, symmetric about zero.

    Args:
        levels: 2..256.
    """
    normal = NormalDist()
    # Where many entries should lie: as in a Gaussian of three times the variance (Panter and Dite 1951).
    entries = [math.sqrt(3) * normal.inv_cdf((index + 0.5) / levels) for index in range(levels)]
    for _ in range(_ROUNDS):
        edges = [-math.inf, *((left + right) / 2 for left, right in pairwise(entries)), math.inf]
        shares = [normal.cdf(edge) for edge in edges]
        densities = [normal.pdf(edge) if math.isfinite(edge) else 0.0 for edge in edges]
        # Each entry becomes the mean of what is nearest to it.
        moved = [
            (densities[index] - densities[index + 1]) / (shares[index + 1] - shares[index]) for index in range(levels)
        ]
        moved = [(new - mirrored) / 2 for new, mirrored in zip(moved, reversed(moved), strict=True)]
        shift = max(abs(new - old) for new, old in zip(moved, entries, strict=True))
        entries = moved
        if shift < _SETTLED:
            break
    return tuple(round(entry * _GRID) / _GRID for entry in entries)


def quantise(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Map each vector to indices into the codebook.

    Args:
        x: float32 `[..., dim]`, finite, magnitudes below 2**102, rotated.
        levels: 2..256.

    Returns:
        Indices (uint8, shape of `x`) and scale (bfloat16 `[..., 1]`, the root mean square).
    """
    scale = scale_of(x)
    entries = torch.tensor(codebook(levels), dtype=torch.float32, device=x.device)
    edges = (entries[1:] + entries[:-1]) / 2
    return torch.bucketize(x * (1.0 / scale.float()), edges).to(torch.uint8), scale


def dequantise(indices: Tensor, scale: Tensor, levels: int) -> Tensor:
    """float32 of the indices' entries times their scale; indices beyond the codebook stand for its last entry."""
    entries = torch.tensor(codebook(levels), dtype=torch.float32, device=indices.device)
    return entries[indices.clamp_max(levels - 1).int()].mul_(scale.float())


def scale_of(x: Tensor) -> Tensor:
    """Root mean square of each vector, bfloat16 `[..., 1]`, at least 2**-100.

    Sums in a fixed order, so that a vector has the same scale alone and among others.
    """
    peak = x.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_PEAK)
    squares = (x / peak).square()
    width = 1 << (x.shape[-1] - 1).bit_length()
    squares = functional.pad(squares, (0, width - x.shape[-1]))
    while width > 1:
        width //= 2
        squares = squares[..., :width] + squares[..., width:]
    return (peak * (squares * (1.0 / x.shape[-1])).sqrt()).clamp_min(SMALLEST_SCALE).bfloat16()
