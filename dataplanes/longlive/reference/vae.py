"""A causal VAE: a latent frame stands for four pixel frames (a clip's first for one), and a quarter of each edge.

Nothing looks ahead, so latents can be decoded as they come: `Decoder.stream` carries each temporal convolution's last
inputs (its feature cache) from call to call, frame by frame, and so gives the same bits however a clip is cut into
chunks. The scheme of cached causal convolutions is Wan 2.1's (arXiv 2503.20314, section 4.1); sizes are our own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

FRAMES_PER_LATENT = 4
LATENT_CHANNELS = 8
LATENT_SIZE = 8
"""Latents of a latent frame's edge."""

_FINE, _COARSE, _PIXEL = 40, 56, 16
_HISTORY = 2
"""Earlier frames that a temporal convolution of three taps sees."""

FeatureCache = dict[int, Tensor]
"""The last inputs of each temporal convolution, by its place in the decoder."""


class CausalBlock(nn.Module):
    """A residual block: a spatial convolution, then one over this and the two frames before.

    Args:
        channels: in and out.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.spatial = nn.Conv2d(channels, channels, 3, padding=1)
        self.temporal = nn.Conv2d(channels * (_HISTORY + 1), channels, 1)

    def forward(self, x: Tensor, history: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run over a piece of a clip.

        Args:
            x: `[batch, frames, channels, height, width]`.
            history: what an earlier piece returned; None at a clip's begin, where zeros come before.

        Returns:
            The output, shaped as `x`, and the history for the next piece.
        """
        batch, frames, channels, height, width = x.shape
        hidden = self.spatial(functional.silu(self.norm(x.flatten(0, 1)))).view_as(x)
        if history is None:
            history = hidden.new_zeros(batch, _HISTORY, channels, height, width)
        seen = torch.cat([history, hidden], dim=1)
        taps = torch.cat([seen[:, tap : tap + frames] for tap in range(_HISTORY + 1)], dim=2)
        mixed = self.temporal(functional.silu(taps).flatten(0, 1)).view_as(x)
        return x + mixed, seen[:, frames:].clone()


class Encoder(nn.Module):
    """Frames to the mean and logarithm of the variance of latents."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3 * FRAMES_PER_LATENT * 4, _FINE, 3, padding=1)
        self.fine = CausalBlock(_FINE)
        self.down = nn.Conv2d(_FINE, _COARSE, 3, stride=2, padding=1)
        self.coarse = CausalBlock(_COARSE)
        self.leave = nn.Conv2d(_COARSE, 2 * LATENT_CHANNELS, 1)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Encode whole clips.

        Args:
            frames: `[batch, 1 + 4 * n, 3, height, width]` in [0, 1].

        Returns:
            Mean and log variance, `[batch, 1 + n, channels, height / 4, width / 4]`.
        """
        batch, count = frames.shape[:2]
        first = frames[:, :1].expand(-1, FRAMES_PER_LATENT - 1, -1, -1, -1)
        grouped = torch.cat([first, frames], dim=1) * 2 - 1
        latents = (count - 1) // FRAMES_PER_LATENT + 1
        folded = grouped.reshape(batch * latents, FRAMES_PER_LATENT * 3, *frames.shape[3:])
        fine = self.enter(functional.pixel_unshuffle(folded, 2))
        fine, _ = self.fine(fine.unflatten(0, (batch, latents)))
        coarse, _ = self.coarse(self.down(fine.flatten(0, 1)).unflatten(0, (batch, latents)))
        both = self.leave(functional.silu(coarse.flatten(0, 1))).unflatten(0, (batch, latents))
        mean, log_variance = both.chunk(2, dim=2)
        return mean, log_variance.clamp(-12.0, 4.0)


class Decoder(nn.Module):
    """Latents to frames."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(LATENT_CHANNELS, _COARSE, 3, padding=1)
        self.coarse = CausalBlock(_COARSE)
        self.up = nn.Conv2d(_COARSE, _FINE, 3, padding=1)
        self.fine = CausalBlock(_FINE)
        self.spread = nn.Conv2d(_FINE, _PIXEL * FRAMES_PER_LATENT * 4, 1)
        self.polish = nn.Conv2d(_PIXEL, _PIXEL, 3, padding=1)
        self.leave = nn.Conv2d(_PIXEL, 3, 3, padding=1)

    def forward(self, latents: Tensor, cache: FeatureCache | None = None) -> Tensor:
        """Decode a piece of clips in one go.

        Args:
            latents: `[batch, n, channels, height, width]`.
            cache: the feature cache, brought up to date; None decodes a whole clip.

        Returns:
            `[batch, 4 * n, 3, 4 * height, 4 * width]`, not clamped. Of a clip's first latent frame only the last of the
            four frames is of the clip.
        """
        batch, count = latents.shape[:2]
        histories = {} if cache is None else cache
        coarse = self.enter(latents.flatten(0, 1)).unflatten(0, (batch, count))
        coarse, histories[0] = self.coarse(coarse, histories.get(0))
        wide = functional.interpolate(functional.silu(coarse.flatten(0, 1)), scale_factor=2.0)
        fine, histories[1] = self.fine(self.up(wide).unflatten(0, (batch, count)), histories.get(1))
        pixels = functional.pixel_shuffle(self.spread(functional.silu(fine.flatten(0, 1))), 2)
        pixels = functional.silu(pixels.reshape(-1, _PIXEL, *pixels.shape[2:]))
        frames: Tensor = self.leave(functional.silu(self.polish(pixels)) + pixels)
        return frames.view(batch, count * FRAMES_PER_LATENT, *frames.shape[1:]) * 0.5 + 0.5

    def stream(self, latents: Tensor, cache: FeatureCache) -> Tensor:
        """Decode the next latent frames of one clip; the same bits for any division into calls.

        Args:
            latents: `[n, channels, height, width]`.
            cache: empty at the clip's begin, then what the calls before left in it.

        Returns:
            `[4 * n, 3, height, width]` in [0, 1], three frames less for a clip's begin.
        """
        starts = not cache
        frames = torch.cat([self(latent[None, None], cache)[0] for latent in latents])
        return frames[FRAMES_PER_LATENT - 1 if starts else 0 :].clamp(0, 1)


class Vae(nn.Module):
    """Encoder, decoder, and the statistics by which latents are brought to mean 0 and deviation 1."""

    mean: Tensor
    deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder()
        self.register_buffer("mean", torch.zeros(LATENT_CHANNELS))
        self.register_buffer("deviation", torch.ones(LATENT_CHANNELS))

    def encode(self, frames: Tensor) -> Tensor:
        """Normalised latents `[batch, 1 + n, channels, height, width]` of frames `[batch, 1 + 4 n, 3, ...]`."""
        mean: Tensor = self.encoder(frames)[0]
        return (mean - self.mean.view(-1, 1, 1)) / self.deviation.view(-1, 1, 1)

    def stream(self, latents: Tensor, cache: FeatureCache) -> Tensor:
        """`Decoder.stream` of normalised latents."""
        return self.decoder.stream(latents * self.deviation.view(-1, 1, 1) + self.mean.view(-1, 1, 1), cache)


def cache_bytes(cache: FeatureCache) -> int:
    """Bytes of a feature cache."""
    return sum(history.numel() * history.element_size() for history in cache.values())
