"""NVFP4: e2m1 codes in blocks of 16, an e4m3 scale per block, an outer scale per token.

Source: NVIDIA, "Introducing NVFP4" (2025), and the reference quantiser of the OCP Microscaling formats (v1.0) for the
e2m1 grid. The published format has one outer scale for a whole tensor; here it is one per token, so that a token
depends on no other and the chunking of a transfer changes nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from dataplanes.numerics.fp8 import LARGEST as LARGEST_BLOCK_SCALE
from dataplanes.numerics.fp8 import SMALLEST_SUBNORMAL, scale_of_peak

BLOCK = 16
LARGEST = 6.0
CODES = 16

_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantise(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise tokens independently.

    Args:
        x: float32 `[..., heads, head_dim]`; everything before `heads` indexes tokens. A last block shorter than 16 is
            completed with zeros, which are not returned.

    Returns:
        Codes 0..15 (uint8, shape of `x`; bit 3 is the sign), block scales (e4m3 as uint8, `[..., heads, blocks]`) and
        the token's outer scale (bfloat16 `[...]`).
    """
    head_dim = x.shape[-1]
    outer = scale_of_peak(x.abs().amax((-2, -1)), LARGEST * LARGEST_BLOCK_SCALE)
    blocks = as_blocks(x)
    peaks = blocks.abs().amax(-1) / (LARGEST * outer.float()[..., None, None])
    block_scale = peaks.clamp_(SMALLEST_SUBNORMAL, LARGEST_BLOCK_SCALE).to(torch.float8_e4m3fn)
    step = block_scale.float() * outer.float()[..., None, None]
    codes = _encode_e2m1(blocks / step[..., None])
    codes = codes.flatten(-2)[..., :head_dim]
    return codes.contiguous(), block_scale.view(torch.uint8), outer


def dequantise(codes: Tensor, block_scale: Tensor, outer: Tensor) -> Tensor:
    """float32 of codes, block scales and outer scales as returned by `quantise`."""
    head_dim = codes.shape[-1]
    step = block_scale.view(torch.float8_e4m3fn).float() * outer.float()[..., None, None]
    values = as_blocks(code_values(codes.device)[codes.int() & (CODES - 1)])
    return (values * step[..., None]).flatten(-2)[..., :head_dim].contiguous()


def code_values(device: torch.device) -> Tensor:
    """What each of the 16 codes stands for, float32."""
    return torch.tensor([*_GRID, *(-value for value in _GRID)], dtype=torch.float32, device=device)


def block_count(head_dim: int) -> int:
    """Blocks per head vector."""
    return -(-head_dim // BLOCK)


def as_blocks(x: Tensor) -> Tensor:
    """`[..., head_dim]` as `[..., blocks, 16]`, completed with zeros."""
    head_dim = x.shape[-1]
    missing = -head_dim % BLOCK
    if missing:
        x = functional.pad(x, (0, missing))
    return x.reshape(*x.shape[:-1], block_count(head_dim), BLOCK)


def _encode_e2m1(scaled: Tensor) -> Tensor:
    """Nearest e2m1 code, ties to the even code, saturating at 6."""
    size = scaled.abs().clamp_(max=LARGEST)
    # Inside each binade the grid is even, so rounding to nearest even of the scaled size is the standard's rounding.
    below_two = (size * 2).round()
    below_four = size.round() + 2
    above = (size * 0.5).round() + 4
    code = torch.where(size <= 2, below_two, torch.where(size <= 4, below_four, above))
    return (code + 8 * torch.signbit(scaled)).to(torch.uint8)
