"""How NVFP4 codes and block scales lie in memory where others read them: two codes to a byte, scales in 128x4 tiles.

Source: Transformer Engine's `NVFP4Tensor` for the bytes; cuBLAS, "1D block scaling factors layout", for the tiles: the
scales of 128 rows and 4 blocks are 512 neighbouring bytes, row r of them at 16 * (r % 32) + 4 * (r / 32).
"""

from __future__ import annotations

import torch.nn.functional as functional
from torch import Tensor

from dataplanes.numerics import packing
from dataplanes.numerics.nvfp4 import CODES

TILE_ROWS = 128
TILE_BLOCKS = 4


def pack_codes(codes: Tensor) -> Tensor:
    """Two neighbours to a byte, the first in the low half.

    Args:
        codes: uint8 `[..., n]`, each below 16.

    Returns:
        uint8 `[..., n / 2]`.

    Raises:
        ValueError: n is odd.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: {codes.shape[-1]} in a row do not fill whole bytes")
    return packing.pack(codes.reshape(1, -1, 1), CODES).view(*codes.shape[:-1], codes.shape[-1] // 2)


def unpack_codes(packed: Tensor) -> Tensor:
    """Undo `pack_codes`: uint8 `[..., 2 * bytes]`."""
    codes = packing.unpack(packed.reshape(1, -1, 1), CODES, 2 * packed.numel())
    return codes.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def swizzle_scales(scales: Tensor) -> Tensor:
    """Scales as tensor cores read them.

    Args:
        scales: one byte each, `[rows, blocks]`.

    Returns:
        The same type, one dimension: rows are completed to a multiple of 128 and blocks to one of 4, with zeros.
    """
    rows, blocks = scales.shape
    padded = functional.pad(scales, (0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS))
    tiles = padded.view(-1, 4, TILE_ROWS // 4, padded.shape[1] // TILE_BLOCKS, TILE_BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_scales(swizzled: Tensor, rows: int, blocks: int) -> Tensor:
    """Undo `swizzle_scales`: `[rows, blocks]`.

    Raises:
        ValueError: so many bytes are not the tiles of `rows` and `blocks`.
    """
    row_tiles, block_tiles = -(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS)
    if swizzled.numel() != row_tiles * block_tiles * TILE_ROWS * TILE_BLOCKS:
        raise ValueError(f"swizzled: {swizzled.numel()} bytes are not the tiles of {rows} rows and {blocks} blocks")
    tiles = swizzled.view(row_tiles, block_tiles, TILE_ROWS // 4, 4, TILE_BLOCKS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(row_tiles * TILE_ROWS, block_tiles * TILE_BLOCKS)[:rows, :blocks].contiguous()
