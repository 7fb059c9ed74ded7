"""Rotary position embedding: its angles, and how joint vectors are taken from planes and put back."""

from __future__ import annotations

import torch
from torch import Tensor

from dataplanes.kvcodec.predictive.artefact import Rotary


def angles(rotary: Rotary, first_token: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 `[tokens, dim / 2]` each (RoFormer, arXiv 2104.09864, section 3.2.2)."""
    frequencies = rotary.theta ** (-torch.arange(0, rotary.dim, 2, dtype=torch.float64) / max(rotary.dim, 1))
    positions = torch.arange(first_token, first_token + tokens, dtype=torch.float64)
    turned = positions[:, None] * frequencies
    return turned.cos().float(), turned.sin().float()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, direction: int) -> Tensor:
    """Apply RoPE (direction 1) or undo it (-1).

    Args:
        x: float32 `[..., tokens, heads, head_dim]`.
        cosines, sines: from `angles`.
    """
    half = cosines.shape[-1]
    c, s = cosines[:, None], direction * sines[:, None]
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat([first * c - second * s, second * c + first * s, x[..., 2 * half :]], dim=-1)
