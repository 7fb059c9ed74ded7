"""The random Hadamard transform of 16 that NVFP4 training applies to inputs of a weight gradient.

Source: NVIDIA, "Pretraining large language models with NVFP4" (2025, arXiv 2509.25149), section 4.2: H16 diag(s), one
vector of signs for a whole run. The product of two tensors that are both transformed along their common dimension is
that of the tensors.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from dataplanes.numerics import hadamard

SIZE: Final = 16

PUBLISHED_SIGNS: Final = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Those of Transformer Engine and of LongLive-2.0's fouroversix."""


def published_signs(device: torch.device) -> Tensor:
    """float32 `[16]`."""
    return torch.tensor(PUBLISHED_SIGNS, dtype=torch.float32, device=device)


def seeded_signs(seed: int, device: torch.device) -> Tensor:
    """float32 `[16]`, the same for a seed for ever."""
    return hadamard.signs(SIZE, seed, device)


def forward(x: Tensor, signs: Tensor) -> Tensor:
    """H (signs * x) / 4 for each 16 neighbours.

    Args:
        x: float32 `[..., n]`.
        signs: float32 `[16]`.

    Raises:
        ValueError: n is no multiple of 16.
    """
    return (hadamard.butterflies(_blocks(x) * signs) * hadamard.norm(SIZE)).view(x.shape)


def inverse(y: Tensor, signs: Tensor) -> Tensor:
    """Undo `forward` up to float32 rounding.

    Raises:
        ValueError: n is no multiple of 16.
    """
    return (hadamard.butterflies(_blocks(y)) * hadamard.norm(SIZE) * signs).view(y.shape)


def _blocks(x: Tensor) -> Tensor:
    if x.shape[-1] % SIZE:
        raise ValueError(f"x: rows of {x.shape[-1]} elements are not whole blocks of {SIZE}")
    return x.reshape(-1, SIZE)
