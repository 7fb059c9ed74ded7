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
def signs(head_dim: int, seed: int, device: torch.device) -> Tensor:
    """The random signs of one block, float32 `[block_size(head_dim)]`.

    Args:
        head_dim: length of a head vector.
        seed: which signs; they come from SHA-256, so that they never change with a library's version.
        device: where they shall lie.
    """
    size = block_size(head_dim)
    return torch.tensor([1.0 if _sign_bit(seed, index) else -1.0 for index in range(size)], device=device)


def _sign_bit(seed: int, index: int) -> bool:
    digest = hashlib.sha256(f"controld hadamard {seed} {index // 256}".encode()).digest()
    return bool(digest[index % 256 // 8] >> (index % 8) & 1)


def forward(x: Tensor, seed: int = DEFAULT_SEED) -> Tensor:
    """Rotate every head vector: H (signs * x) / sqrt(n) per block of n.

    Args:
        x: float32 `[..., head_dim]`; any strides.
        seed: which random signs.

    Returns:
        float32 of the same shape, contiguous. Orthonormal: the L2 norm of each block is kept.
    """
    size = block_size(x.shape[-1])
    if size == 1:
        return x.contiguous()
    blocks = x.reshape(-1, size) * signs(x.shape[-1], seed, x.device)
    return (butterflies(blocks) * norm(size)).view(x.shape)


def inverse(y: Tensor, seed: int = DEFAULT_SEED) -> Tensor:
    """Undo `forward` up to float32 rounding; same shapes."""
    size = block_size(y.shape[-1])
    if size == 1:
        return y.contiguous()
    blocks = butterflies(y.reshape(-1, size)) * norm(size)
    return (blocks * signs(y.shape[-1], seed, y.device)).view(y.shape)


def norm(size: int) -> float:
    """1 / sqrt(size)."""
    return 1.0 / math.sqrt(size)


def butterflies(blocks: Tensor) -> Tensor:
    """Unnormalised transform of `[blocks, n]`, distance 1 first.

    Sums in a fixed order, unlike a matrix product, whose order changes with the number of rows: a token decodes to the
    same bytes alone and within a long chunk, here and in the native kernel.
    """
    count, size = blocks.shape
    # Blocks side by side: every stage then runs over contiguous memory.
    values = blocks.t().contiguous()
    distance = 1
    while distance < size:
        pairs = values.view(-1, 2, distance, count)
        values = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], dim=1)
        distance *= 2
    return values.view(size, count).t().contiguous()
