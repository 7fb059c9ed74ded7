"""Seeded Hadamard transform: spreads a head vector's outliers over its coordinates.

Source: QuaRot (Ashkboos et al. 2024), section 3; random signs as in the randomised Hadamard transform of Ailon and
Chazelle (2009).
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import torch
from torch import Tensor

DEFAULT_SEED = 13107

TILE_ROWS = 64
"""Rows of one matrix product, whatever the number of tokens."""


def block_size(head_dim: int) -> int:
    """The largest power of two that divides `head_dim`: 64 -> 64, 96 -> 32, 100 -> 4, 576 -> 64, 1 -> 1."""
    return head_dim & -head_dim


@lru_cache(maxsize=64)
def hadamard_matrix(head_dim: int, seed: int, device: torch.device) -> Tensor:
    """The orthonormal matrix diag(signs) @ H / sqrt(n) of one block, float32 `[n, n]`, n = `block_size(head_dim)`.

    Args:
        head_dim: length of a head vector.
        seed: which random signs; they come from SHA-256, so that they never change with a library's version.
        device: where the matrix shall lie.
    """
    size = block_size(head_dim)
    matrix = torch.ones(1, 1, dtype=torch.float32)
    while matrix.shape[0] < size:
        top = torch.cat([matrix, matrix], dim=1)
        bottom = torch.cat([matrix, -matrix], dim=1)
        matrix = torch.cat([top, bottom], dim=0)
    signs = torch.tensor([1.0 if _sign_bit(seed, index) else -1.0 for index in range(size)])
    return (signs[:, None] * matrix / math.sqrt(size)).to(device)


def _sign_bit(seed: int, index: int) -> bool:
    digest = hashlib.sha256(f"controld hadamard {seed} {index // 256}".encode()).digest()
    return bool(digest[index % 256 // 8] >> (index % 8) & 1)


def forward(x: Tensor, seed: int = DEFAULT_SEED) -> Tensor:
    """Rotate every head vector.

    Args:
        x: float32 `[..., head_dim]`; any strides.
        seed: which random signs.

    Returns:
        float32 of the same shape, contiguous. Orthonormal: the L2 norm of each block is kept. An infinity or NaN
        spreads over its block.
    """
    size = block_size(x.shape[-1])
    if size == 1:
        return x.contiguous()
    return _rotate(x, hadamard_matrix(x.shape[-1], seed, x.device))


def inverse(y: Tensor, seed: int = DEFAULT_SEED) -> Tensor:
    """Undo `forward` up to float32 rounding; same shapes."""
    size = block_size(y.shape[-1])
    if size == 1:
        return y.contiguous()
    return _rotate(y, hadamard_matrix(y.shape[-1], seed, y.device).t())


def _rotate(x: Tensor, matrix: Tensor) -> Tensor:
    """Every block times `matrix`, in tiles of a fixed number of rows.

    A matrix product of another number of rows may sum in another order, and then a chunk of one token would decode to
    other bytes than the same token within a longer chunk.
    """
    size = matrix.shape[0]
    rows = x.reshape(-1, size)
    result = torch.empty_like(rows, memory_format=torch.contiguous_format)
    whole = rows.shape[0] // TILE_ROWS * TILE_ROWS
    if whole:
        _multiply_tiles(rows[:whole], matrix, result[:whole])
    rest = rows.shape[0] - whole
    if rest:
        last = torch.zeros(TILE_ROWS, size, dtype=rows.dtype, device=rows.device)
        last[:rest] = rows[whole:]
        product = torch.empty_like(last)
        _multiply_tiles(last, matrix, product)
        result[whole:] = product[:rest]
    return result.view(x.shape)


def _multiply_tiles(rows: Tensor, matrix: Tensor, result: Tensor) -> None:
    size = matrix.shape[0]
    tiles = rows.view(-1, TILE_ROWS, size)
    torch.bmm(tiles, matrix.expand(tiles.shape[0], size, size), out=result.view(tiles.shape))
