"""How far a decoded value may lie from its input, from the input alone.

Each bound holds for inputs below 2**96 in magnitude. They leave room for float32 arithmetic, not for the
final rounding to the pool's type (`output_rounding`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dataplanes.numerics import absmax, lloyd_max
from dataplanes.numerics.fp8 import LARGEST as FP8_LARGEST
from dataplanes.numerics.hadamard import block_size
from dataplanes.numerics.levels import LARGEST_OFFSET_STEPS, SMALLEST_STEP, inverse_cells
from dataplanes.numerics.nvfp4 import LARGEST as FP4_LARGEST
from dataplanes.numerics.nvfp4 import BlockRule, largest_block_scale

_SLACK = 1.0 + 2.0**-9


def levels_bound(x: Tensor, levels: int, dim: int) -> Tensor:
    """Half a step: the range over (levels - 1/16), or 1/2043 of the largest magnitude; `dim` of length 1."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    peak = torch.maximum(low.abs(), high.abs())
    step = torch.maximum((high - low) * inverse_cells(levels), peak / LARGEST_OFFSET_STEPS)
    # A bfloat16 rounded up is at most 2**-7 larger.
    return step.clamp_min(SMALLEST_STEP) * ((1 + 2.0**-7) * _SLACK / 2)


def absmax_bound(x: Tensor, bins: int, dim: int) -> Tensor:
    """Half a step: the largest magnitude over (bins - 2); `dim` of length 1."""
    step = x.abs().amax(dim, keepdim=True) / absmax.largest_symbol(bins)
    return step.clamp_min(SMALLEST_STEP) * ((1 + 2.0**-7) * _SLACK / 2)


def lloyd_max_bound(x: Tensor, levels: int) -> Tensor:
    """Half the codebook's widest gap, or how far the element lies beyond its last entry, times the scale."""
    entries = torch.tensor(lloyd_max.codebook(levels), dtype=torch.float32, device=x.device)
    gap = entries.diff().max() / 2
    scale = lloyd_max.scale_of(x).float()
    beyond = x.abs() * (1.0 / scale) - entries[-1]
    return torch.maximum(beyond, gap) * scale * _SLACK + x.abs() * 2.0**-20


def fp8_bound(x: Tensor, dim: int = -1) -> Tensor:
    """Three mantissa bits: a sixteenth of the value; below e4m3's normal range half its smallest step."""
    smallest = x.abs().amax(dim, keepdim=True) / FP8_LARGEST * 2.0**-10 * (1 + 2.0**-6)
    return torch.maximum(x.abs() / 16, smallest) * _SLACK + 2.0**-126


def nvfp4_bound(blocks: Tensor, token_peak: Tensor, rule: BlockRule = BlockRule.PLAIN) -> Tensor:
    """One block step (half the gap between 4 and 6), the block scale's own rounding included.

    With 4over6 it is that of a peak at 6 too: at 4 half the widest gap, from 3 to 4, is less.

    Args:
        blocks: `[..., block, 16]`.
        token_peak: the token's largest magnitude, broadcasting against `blocks`.
        rule: where a block's peak lands.
    """
    step = blocks.abs().amax(-1, keepdim=True) / FP4_LARGEST * (1 + 2.0**-4)
    floor = token_peak / (FP4_LARGEST * largest_block_scale(rule)) * 2.0**-7
    return (step + floor) * (1 + 2.0**-6) + 2.0**-120


def through_inverse_hadamard(bound: Tensor, x: Tensor) -> Tensor:
    """Bound after the inverse transform: its L2 norm over a block bounds every element of the block.

    Args:
        bound: per transformed element, `[..., head_dim]`.
        x: the untransformed input of the same shape, for the float32 error of two rotations.
    """
    size = block_size(x.shape[-1])
    # Squares of tiny bounds would underflow in float32.
    blocked = bound.double().reshape(*bound.shape[:-1], -1, size)
    rounding = x.double().reshape(blocked.shape).norm(dim=-1, keepdim=True) * (size * 2.0**-22)
    total: Tensor = blocked.norm(dim=-1, keepdim=True) * _SLACK + rounding
    return total.float().expand(blocked.shape).reshape(x.shape)


def output_rounding(x: Tensor, bound: Tensor, dtype: torch.dtype) -> Tensor:
    """What the final rounding to `dtype` adds to `bound`."""
    info = torch.finfo(dtype)
    return (x.abs() + bound) * (info.eps / 2) + info.tiny * info.eps
