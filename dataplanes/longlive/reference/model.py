"""The causal diffusion transformer: tokens of one chunk, conditioned on noise level and prompt, look at kept history.

Adaptive layer norms with one projection for all layers and a table per layer are PixArt-alpha's (arXiv 2310.00426,
section 2.3), which Wan 2.1 (arXiv 2503.20314) uses too; rotary positions over time, height and width are Wan's. Keys
are kept *before* rotation, so that positions can be counted within the window and never exceed what training saw.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from dataplanes.longlive.reference.shapes import COLOURS, MOTIONS, SHAPES, Prompt
from dataplanes.longlive.reference.vae import LATENT_CHANNELS, LATENT_SIZE

PATCH = 2
TOKENS_PER_LATENT = (LATENT_SIZE // PATCH) ** 2
SHOT_OFFSET = 8.0
"""Latent frames by which a scene cut moves temporal positions apart (LongLive-2.0's `multi_shot_rope_offset`)."""

_TOKEN_VALUES = LATENT_CHANNELS * PATCH * PATCH
_NOISE_FREQUENCIES = 32
_MODULATIONS = 6
_TIME_THETA, _SPACE_THETA = 100.0, 20.0

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of a layer: (layer, query, key, value), each `[batch, tokens, heads, head_dim]`, to the query's shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of the transformer.

    Args:
        dim: of a token; a multiple of 16 * heads, so that NVFP4's blocks are whole.
        chunk_latents: latent frames that are denoised together.
    """

    dim: int = 128
    heads: int = 4
    layers: int = 4
    feed_forward: int = 384
    chunk_latents: int = 3

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def chunk_tokens(self) -> int:
        return self.chunk_latents * TOKENS_PER_LATENT


class Attention(nn.Module):
    """Projections and head norms; what is attended to is the caller's."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self._heads = shape.heads
        self.query = nn.Linear(shape.dim, shape.dim)
        self.key = nn.Linear(shape.dim, shape.dim)
        self.value = nn.Linear(shape.dim, shape.dim)
        self.output = nn.Linear(shape.dim, shape.dim)
        self.query_norm = nn.RMSNorm(shape.head_dim, eps=1e-6)
        self.key_norm = nn.RMSNorm(shape.head_dim, eps=1e-6)

    def forward(self, x: Tensor, layer: int, attend: Attend) -> Tensor:
        """`[batch, tokens, dim]` to the same shape."""
        query, key, value = (
            project(x).unflatten(-1, (self._heads, -1)) for project in (self.query, self.key, self.value)
        )
        seen = attend(layer, self.query_norm(query), self.key_norm(key), value)
        output: Tensor = self.output(seen.flatten(-2))
        return output


class FeedForward(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.dim, shape.feed_forward)
        self.down = nn.Linear(shape.feed_forward, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., dim]` to the same shape."""
        output: Tensor = self.down(functional.gelu(self.up(x), approximate="tanh"))
        return output


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.feed_forward = FeedForward(shape)
        self.table = nn.Parameter(torch.randn(_MODULATIONS, shape.dim) * 0.02)

    def forward(self, x: Tensor, modulation: Tensor, layer: int, attend: Attend) -> Tensor:
        """Run over groups of tokens that share a noise level and a prompt.

        Args:
            x: `[batch, groups, tokens, dim]`.
            modulation: `[batch, groups, 1, 6, dim]`.
            layer: which one this is, for `attend`.
            attend: over the tokens of all groups.
        """
        shift, scale, gate, shift_2, scale_2, gate_2 = (modulation + self.table).unbind(-2)
        hidden = _normalise(x) * (1 + scale) + shift
        x = x + gate * self.attention(hidden.flatten(1, 2), layer, attend).view_as(x)
        hidden = _normalise(x) * (1 + scale_2) + shift_2
        output: Tensor = x + gate_2 * self.feed_forward(hidden.flatten(1, 2)).view_as(x)
        return output


class PromptEmbedding(nn.Module):
    """A vector for each word that a prompt may have."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.shape = nn.Embedding(len(SHAPES), dim)
        self.colour = nn.Embedding(len(COLOURS), dim)
        self.motion = nn.Embedding(len(MOTIONS), dim)

    def forward(self, words: Tensor) -> Tensor:
        """Integers `[..., 3]` (shape, colour, motion) to `[..., dim]`."""
        shape, colour, motion = words.unbind(-1)
        total: Tensor = self.shape(shape) + self.colour(colour) + self.motion(motion)
        return total


class CausalTransformer(nn.Module):
    """The whole model: noisy latents in, velocity (noise minus data) out."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embedding = nn.Linear(_TOKEN_VALUES, shape.dim)
        self.prompt_embedding = PromptEmbedding(shape.dim)
        self.time_embedding = nn.Sequential(
            nn.Linear(2 * _NOISE_FREQUENCIES, shape.dim), nn.SiLU(), nn.Linear(shape.dim, shape.dim)
        )
        self.time_projection = nn.Linear(shape.dim, _MODULATIONS * shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head_table = nn.Parameter(torch.zeros(2, shape.dim))
        self.head = nn.Linear(shape.dim, _TOKEN_VALUES)

    def forward(self, tokens: Tensor, noise_level: Tensor, words: Tensor, attend: Attend) -> Tensor:
        """Predict velocities.

        Args:
            tokens: `[batch, groups, tokens, values]`, see `to_tokens`.
            noise_level: `[batch, groups]` in [0, 1]; 0 is clean.
            words: integers `[batch, groups, 3]`.
            attend: what the tokens look at.

        Returns:
            The shape of `tokens`.
        """
        x = self.patch_embedding(tokens)
        condition = self.time_embedding(_noise_waves(noise_level, x.dtype)) + self.prompt_embedding(words)
        modulation = self.time_projection(functional.silu(condition)).unflatten(-1, (1, _MODULATIONS, -1))
        for layer, block in enumerate(self.blocks):
            x = block(x, modulation, layer, attend)
        shift, scale = (condition[..., None, None, :] + self.head_table).unbind(-2)
        output: Tensor = self.head(_normalise(x) * (1 + scale) + shift)
        return output


def to_tokens(latents: Tensor) -> Tensor:
    """`[..., frames, channels, height, width]` to `[..., frames * patches, values]`, a row of patches after another."""
    *lead, frames, channels, height, width = latents.shape
    split = latents.reshape(*lead, frames, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    ordered = _patches_last(split)
    return ordered.reshape(*lead, frames * (height // PATCH) * (width // PATCH), channels * PATCH * PATCH)


def from_tokens(tokens: Tensor, frames: int) -> Tensor:
    """Undo `to_tokens`."""
    *lead, _, _ = tokens.shape
    edge = LATENT_SIZE // PATCH
    split = tokens.reshape(*lead, frames, edge, edge, LATENT_CHANNELS, PATCH, PATCH)
    order = [*range(len(lead) + 1), *(len(lead) + axis for axis in (3, 1, 4, 2, 5))]
    return split.permute(order).reshape(*lead, frames, LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE)


def prompt_words(prompt: Prompt) -> Tensor:
    """The integers `[3]` that stand for a prompt."""
    return torch.tensor([prompt.shape, prompt.colour, prompt.motion])


def rotary_angles(times: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the tokens of latent frames.

    Args:
        times: temporal positions `[..., frames]`.
        head_dim: half of it is for time, a quarter each for height and width.

    Returns:
        Both `[..., frames * TOKENS_PER_LATENT, head_dim / 2]`, in the dtype of `times`.
    """
    edge = LATENT_SIZE // PATCH
    places = torch.arange(edge, dtype=times.dtype)
    time = times[..., None] * _frequencies(head_dim // 2, _TIME_THETA, times.dtype)
    space = places[:, None] * _frequencies(head_dim // 4, _SPACE_THETA, times.dtype)
    shape = (*times.shape, edge, edge)
    angles = torch.cat(
        [
            time[..., None, None, :].expand(*shape, -1),
            space[:, None].expand(*shape, -1),
            space.expand(*shape, -1),
        ],
        dim=-1,
    ).reshape(*times.shape[:-1], -1, head_dim // 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply rotary positions `[..., tokens, head_dim / 2]` to `[..., tokens, heads, head_dim]`."""
    first, second = x.chunk(2, dim=-1)
    c, s = cosines.unsqueeze(-2), sines.unsqueeze(-2)
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1)


def _patches_last(split: Tensor) -> Tensor:
    """`[..., channels, rows, patch, columns, patch]` to `[..., rows, columns, channels, patch, patch]`."""
    lead = split.dim() - 5
    return split.permute([*range(lead), *(lead + axis for axis in (1, 3, 0, 2, 4))])


def _normalise(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=1e-6)


def _frequencies(dims: int, theta: float, dtype: torch.dtype) -> Tensor:
    return theta ** (-torch.arange(0, dims, 2, dtype=dtype) / dims)


def _noise_waves(noise_level: Tensor, dtype: torch.dtype) -> Tensor:
    frequencies = torch.exp(-math.log(1000.0) * torch.arange(_NOISE_FREQUENCIES, dtype=dtype) / _NOISE_FREQUENCIES)
    angles = noise_level.to(dtype)[..., None] * 1000.0 * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
