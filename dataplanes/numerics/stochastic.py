"""NVFP4 with stochastic rounding: a value is rounded up or down with probabilities that make its mean itself.

Gradients need it, since errors of rounding to nearest do not average out over steps (NVIDIA, "Pretraining large
language models with NVFP4", 2025, section 4.4). Codes are drawn as Transformer Engine's kernels draw them, by noise of
one step's width before rounding. Block scales are rounded up here and not to nearest: no value then lies beyond the
largest code, where cutting it off would bias it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dataplanes.numerics import nvfp4
from dataplanes.numerics.fp8 import LARGEST as LARGEST_BLOCK_SCALE

_LARGEST_BYTE = 0x7E
"""448; the next one is NaN."""


def quantise_by_peak(x: Tensor, peak: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Quantise; `nvfp4.dequantise_by_peak` takes it back, to `x` on average.

    Args:
        x: float32 `[rows, n]`, finite; n is a multiple of 16.
        peak: float32, the largest magnitude of the tensor (`[1]`) or of each row (`[rows, 1]`).
        generator: of x's device; the same state gives the same codes.

    Returns:
        As `nvfp4.quantise_by_peak`.

    Raises:
        ValueError: n is no multiple of 16.
    """
    if x.shape[-1] % nvfp4.BLOCK:
        raise ValueError(f"x: rows of {x.shape[-1]} elements are not whole blocks of {nvfp4.BLOCK}")
    blocks = nvfp4.as_blocks(x)
    # Of zeros the peak is none; any will do.
    unit = torch.where(peak > 0, peak, torch.ones_like(peak)) / (LARGEST_BLOCK_SCALE * nvfp4.LARGEST)
    block_scale = _rounded_up(blocks.abs().amax(-1) / unit / nvfp4.LARGEST)
    step = block_scale.float() * unit
    scaled = torch.where(step[..., None] > 0, blocks / step[..., None], torch.zeros_like(blocks))
    return encode(scaled, generator).flatten(-2), block_scale.view(torch.uint8)


def encode(scaled: Tensor, generator: torch.Generator) -> Tensor:
    """Codes 0..15 of values within -6..6 (beyond they are cut off), uint8 of the same shape."""
    size = scaled.abs().clamp_max(nvfp4.LARGEST)
    noise = torch.rand(size.shape, generator=generator, device=size.device)
    # A grid's cell begins at its floor; the part above it is the probability of the next code.
    below_two, below_four, above = size * 2, size + 2, size * 0.5 + 4
    position = torch.where(size < 2, below_two, torch.where(size < 4, below_four, above))
    code = position.floor() + (noise < position.frac())
    return (code + 8 * torch.signbit(scaled)).to(torch.uint8)


def _rounded_up(wanted: Tensor) -> Tensor:
    """The smallest e4m3 number that is not below, up to 448."""
    nearest = wanted.clamp_max(LARGEST_BLOCK_SCALE).to(torch.float8_e4m3fn)
    # Positive e4m3 numbers are in the order of their bytes.
    raised = nearest.view(torch.uint8) + (nearest.float() < wanted).to(torch.uint8)
    return raised.clamp_max(_LARGEST_BYTE).view(torch.float8_e4m3fn)
