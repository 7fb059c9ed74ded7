"""NVFP4: e2m1 codes in blocks of 16, an e4m3 scale per block, and an outer scale.

Source: NVIDIA, "Introducing NVFP4" (2025), and the reference quantiser of the OCP Microscaling formats (v1.0) for the
e2m1 grid; 4over6: Cook et al., "Four Over Six" (2025, arXiv 2512.02010).

Two forms. `quantise_by_peak` is Transformer Engine's: the largest magnitude of a tensor, or of each row, is given and
decides the outer scale, in its order of operations, so codes and scales are its reference's bit for bit. `quantise` is
the KV codec's and differs on purpose:

- the outer scale is one per token, so that a token depends on no other and the chunking of a transfer changes nothing;
- it is a bfloat16, rounded up, which costs a frame two bytes a token and never saturates a block scale;
- a block scale is never zero, so that a block far below the token's peak keeps its largest values;
- elements are divided by their step, not multiplied by a rounded reciprocal, which would shift exact ties;
- with 4over6, block scales reach 224 and not 256: half of 448, so that the step that puts a block's peak at 6 is plain
  NVFP4's own.
"""

from __future__ import annotations

import enum

import torch
import torch.nn.functional as functional
from torch import Tensor

from dataplanes.numerics.fp8 import LARGEST as LARGEST_BLOCK_SCALE
from dataplanes.numerics.fp8 import SMALLEST_SUBNORMAL, scale_of_peak

BLOCK = 16
LARGEST = 6.0
CODES = 16
RAISED_TO_FOUR = 1.5
"""By what a block scale that puts the block's peak at 4 exceeds the one that puts it at 6."""

_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class BlockRule(enum.Enum):
    """Where a block's largest magnitude lands among the codes."""

    PLAIN = "plain"
    """At 6."""
    FOUR_OVER_SIX = "4over6"
    """At 6 or at 4, whichever leaves the block the smaller squared error: from 4 to 6 the grid is coarse."""


class Tile(enum.Enum):
    """What shares a block scale."""

    ROW = "1x16"
    """16 neighbours of a row."""
    SQUARE = "16x16"
    """16 neighbours of 16 neighbouring rows: a matrix and its transpose then have the same codes, which training needs
    of weights (NVIDIA, "Pretraining large language models with NVFP4", 2025, section 4.3)."""


def quantise(x: Tensor, rule: BlockRule = BlockRule.PLAIN) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise tokens independently.

    Args:
        x: float32 `[..., heads, head_dim]`; everything before `heads` indexes tokens. A last block shorter than 16 is
            completed with zeros, which are not returned.
        rule: where a block's peak lands. `dequantise` need not know.

    Returns:
        Codes 0..15 (uint8, shape of `x`; bit 3 is the sign), block scales (e4m3 as uint8, `[..., heads, blocks]`) and
        the token's outer scale (bfloat16 `[...]`).
    """
    head_dim = x.shape[-1]
    outer = scale_of_peak(x.abs().amax((-2, -1)), LARGEST * largest_block_scale(rule))
    spread = outer.float()[..., None, None]
    blocks = as_blocks(x)
    wanted = blocks.abs().amax(-1) / (LARGEST * spread)
    codes, block_scale = _with_block_scale(blocks, wanted, spread)
    if rule is BlockRule.FOUR_OVER_SIX:
        other_codes, other_scale = _with_block_scale(blocks, wanted * RAISED_TO_FOUR, spread)
        other_error = _squared_error(blocks, other_codes, other_scale, spread)
        is_better = other_error < _squared_error(blocks, codes, block_scale, spread)
        codes = torch.where(is_better[..., None], other_codes, codes)
        block_scale = torch.where(is_better, other_scale.view(torch.uint8), block_scale.view(torch.uint8))
    return codes.flatten(-2)[..., :head_dim].contiguous(), block_scale.view(torch.uint8), outer


def dequantise(codes: Tensor, block_scale: Tensor, outer: Tensor) -> Tensor:
    """float32 of codes, block scales and outer scales as returned by `quantise`."""
    head_dim = codes.shape[-1]
    step = block_scale.view(torch.float8_e4m3fn).float() * outer.float()[..., None, None]
    values = as_blocks(code_values(codes.device)[codes.int() & (CODES - 1)])
    return (values * step[..., None]).flatten(-2)[..., :head_dim].contiguous()


def quantise_by_peak(
    x: Tensor,
    peak: Tensor,
    rule: BlockRule = BlockRule.PLAIN,
    *,
    largest_scale: float = LARGEST_BLOCK_SCALE,
    tile: Tile = Tile.ROW,
) -> tuple[Tensor, Tensor]:
    """Quantise as Transformer Engine's `NVFP4QuantizerRef` does, bit for bit.

    Args:
        x: float32 `[rows, n]`, finite; n is a multiple of 16.
        peak: float32, the largest magnitude of the tensor (`[1]`) or of each row (`[rows, 1]`, its row-scaled form).
        rule: 4over6 is its form by squared error (`nvfp4_4over6_err_mode="MSE"`, without fast math). Squares are of the
            input's units, so where they leave float32 (blocks above 2**63 or below 2**-75) the peak stays at 6.
        largest_scale: what the largest block scale is to be with 4over6: 448, or 256 so that a peak at 4 always fits.
        tile: what shares a block scale. With squares rows are a multiple of 16 and the peak is the tensor's. Squares
            commute with transposing exactly; with 4over6 up to squares whose two errors are equal to the last bits.

    Returns:
        Codes 0..15 (uint8 `[rows, n]`; two to a byte as `low + 16 * high` make its `data`) and block scales (e4m3 as
        uint8, `[rows, n / 16]`; a square's is in each of its rows). A negative zero has code 0, as in the reference.

    Raises:
        ValueError: n is no multiple of 16 (with squares, rows are not, or each row has its peak), or plain blocks are
            to have a scale other than 448.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"x: rows of {x.shape[-1]} elements are not whole blocks of {BLOCK}")
    if rule is BlockRule.PLAIN and largest_scale != LARGEST_BLOCK_SCALE:
        raise ValueError(f"largest_scale: {largest_scale} is for 4over6, plain blocks reach {LARGEST_BLOCK_SCALE}")
    if tile is Tile.SQUARE and (x.shape[0] % BLOCK or peak.numel() != 1):
        raise ValueError(f"x: {x.shape[0]} rows and {peak.numel()} peaks; squares take whole {BLOCK} rows and one peak")
    blocks = as_blocks(x)
    block_peaks = blocks.abs().amax(-1)
    if tile is Tile.SQUARE:
        block_peaks = _to_rows(_by_square(block_peaks).amax(1))
    largest = torch.finfo(torch.float32).max
    encode = torch.full_like(peak, largest_scale * LARGEST).div_(peak).clamp_(max=largest)
    if rule is BlockRule.PLAIN:
        wanted = block_peaks * (encode * torch.full_like(encode, LARGEST).reciprocal_())
        codes, block_scale = _by_reciprocal(blocks, wanted, encode)
        return codes.flatten(-2), block_scale.view(torch.uint8)
    base = block_peaks / LARGEST * encode
    at_six, at_four = (_by_reciprocal(blocks, wanted, encode) for wanted in (base, base * RAISED_TO_FOUR))
    error_six, error_four = (
        _squared_error_in_order(blocks, *found, peak, largest_scale * LARGEST) for found in (at_six, at_four)
    )
    if tile is Tile.SQUARE:
        error_six, error_four = _sum_of_tile_rows(error_six), _sum_of_tile_rows(error_four)
    is_better = error_four < error_six
    codes = torch.where(is_better[..., None], at_four[0], at_six[0])
    block_scale = torch.where(is_better, at_four[1].view(torch.uint8), at_six[1].view(torch.uint8))
    return codes.flatten(-2), block_scale


def dequantise_by_peak(
    codes: Tensor, block_scale: Tensor, peak: Tensor, *, largest_scale: float = LARGEST_BLOCK_SCALE
) -> Tensor:
    """float32 of what `quantise_by_peak` returned, in the order of Transformer Engine's kernel."""
    unit = torch.ones_like(peak).div_(largest_scale * LARGEST)
    step = block_scale.view(torch.float8_e4m3fn).float() * peak * unit
    return (as_blocks(code_values(codes.device)[codes.int()]) * step[..., None]).flatten(-2)


def largest_block_scale(rule: BlockRule) -> float:
    """What `quantise` lets a block scale reach: with 4over6 one and a half times as much must still fit."""
    return LARGEST_BLOCK_SCALE / 2 if rule is BlockRule.FOUR_OVER_SIX else LARGEST_BLOCK_SCALE


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


def _by_square(per_row: Tensor) -> Tensor:
    """`[rows, blocks]` as `[rows / 16, 16, blocks]`."""
    return per_row.view(-1, BLOCK, per_row.shape[1])


def _to_rows(per_square: Tensor) -> Tensor:
    """`[rows / 16, blocks]` as `[rows, blocks]`, a square's value in each of its rows."""
    return per_square.repeat_interleave(BLOCK, 0)


def _sum_of_tile_rows(per_row: Tensor) -> Tensor:
    """Sum over each square's rows, halves first as Transformer Engine's reference does; `[rows, blocks]`."""
    total = _by_square(per_row)
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return _to_rows(total[:, 0])


def _with_block_scale(blocks: Tensor, wanted: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and e4m3 block scales of the KV codec's form."""
    block_scale = wanted.clamp(SMALLEST_SUBNORMAL, LARGEST_BLOCK_SCALE).to(torch.float8_e4m3fn)
    step = block_scale.float() * outer
    return _encode_e2m1(blocks / step[..., None]), block_scale


def _squared_error(blocks: Tensor, codes: Tensor, block_scale: Tensor, outer: Tensor) -> Tensor:
    """Of each block, in units of the outer scale: no magnitude of the input overflows or vanishes.

    Summed as a tree, halves first, so that other code can add in the same order.
    """
    scale = block_scale.float()
    scaled = (blocks / (scale * outer)[..., None]).abs()
    squares = (code_values(codes.device)[(codes & 7).int()] - scaled).square()
    while squares.shape[-1] > 1:
        half = squares.shape[-1] // 2
        squares = squares[..., :half] + squares[..., half:]
    return squares[..., 0] * (scale * scale)


def _by_reciprocal(blocks: Tensor, wanted: Tensor, encode: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and e4m3 block scales of Transformer Engine's form; a block scale may be zero."""
    block_scale = wanted.clamp(max=LARGEST_BLOCK_SCALE).to(torch.float8_e4m3fn)
    step = block_scale.float() * encode.reciprocal()
    scaled = blocks * step.reciprocal().clamp_(max=torch.finfo(torch.float32).max)[..., None]
    codes = _encode_e2m1(scaled)
    return torch.where(scaled == 0, torch.zeros_like(codes), codes), block_scale


def _squared_error_in_order(
    blocks: Tensor, codes: Tensor, block_scale: Tensor, peak: Tensor, largest_product: float
) -> Tensor:
    """Of each block, added from the first element to the last as Transformer Engine's reference does."""
    values = code_values(codes.device)[codes.int()] * block_scale.float()[..., None]
    squares = (values * peak[..., None] / largest_product - blocks).square()
    total = torch.zeros_like(squares[..., 0])
    for square in squares.unbind(-1):
        total = total + square
    return total


def _encode_e2m1(scaled: Tensor) -> Tensor:
    """Nearest e2m1 code, ties to the even code, saturating at 6."""
    size = scaled.abs().clamp_(max=LARGEST)
    # Inside each binade the grid is even, so rounding to nearest even of the scaled size is the standard's rounding.
    below_two = (size * 2).round()
    below_four = size.round() + 2
    above = (size * 0.5).round() + 4
    code = torch.where(size <= 2, below_two, torch.where(size <= 4, below_four, above))
    return (code + 8 * torch.signbit(scaled)).to(torch.uint8)
