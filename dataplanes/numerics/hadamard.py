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
    matrix = hadamard_matrix(x.shape[-1], seed, x.device)
    return (x.reshape(-1, size) @ matrix).view(x.shape)


def inverse(y: Tensor, seed: int = DEFAULT_SEED) -> Tensor:
    """Undo `forward` up to float32 rounding; same shapes."""
    size = block_size(y.shape[-1])
    if size == 1:
        return y.contiguous()
    matrix = hadamard_matrix(y.shape[-1], seed, y.device)
    return (y.reshape(-1, size) @ matrix.t()).view(y.shape)
