"""Generates latents chunk by chunk: denoising steps against the rolling cache, then one pass that writes clean history.

Pure computation on one rank; several ranks run the same calls side by side and meet in the exchange.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from dataplanes.longlive.engine import EngineError
from dataplanes.longlive.linear.precision import LinearPrecision
from dataplanes.longlive.reference import flow
from dataplanes.longlive.reference.checkpoint import build_transformer
from dataplanes.longlive.reference.exchange import Exchange
from dataplanes.longlive.reference.kv_tensor import KvRule
from dataplanes.longlive.reference.model import (
    CausalTransformer,
    ModelShape,
    from_tokens,
    prompt_words,
    rotary_angles,
    rotate,
    to_tokens,
)
from dataplanes.longlive.reference.rolling_cache import CacheLimits, ChunkPlace, RollingCache, signal_to_noise_db
from dataplanes.longlive.reference.shapes import Prompt
from dataplanes.longlive.reference.stored_linear import set_precision, weight_bytes
from dataplanes.longlive.reference.vae import LATENT_CHANNELS, LATENT_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeChunk:
    """One chunk as it was generated.

    Args:
        latents: normalised, float32 `[frames, channels, height, width]`.
        denoise_s: of each step, measured.
        recache_s: of the pass that wrote history.
        kv_signal_to_noise_db: of this rank's stored history of the chunk; None where nothing was lost.
        sent_bytes: to other ranks.
    """

    latents: Tensor
    denoise_s: tuple[float, ...]
    recache_s: float
    kv_signal_to_noise_db: float | None
    sent_bytes: int


class Generator:
    """The transformer with the histories of its sessions.

    Args:
        model: float32; a test of exactness has it in float64.
        exchange: with the other ranks.
    """

    def __init__(self, model: CausalTransformer, exchange: Exchange) -> None:
        self.model = model
        self._exchange = exchange
        self._caches: dict[str, RollingCache] = {}

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    def reload(self, checkpoint: str, precisions: tuple[LinearPrecision, ...]) -> None:
        """Read the weights again, stored at other precisions; histories stay.

        Raises:
            EngineError: the checkpoint is gone or another one; the old weights stay.
        """
        self.model = build_transformer(checkpoint, self.shape, precisions)

    def set_precision(self, precision: LinearPrecision) -> None:
        """Switch to weights that are resident."""
        set_precision(self.model, precision)

    def weight_bytes(self) -> int:
        """Of the transformer."""
        return weight_bytes(self.model)

    def open(self, session_id: str, limits: CacheLimits, rule: KvRule) -> None:
        """Begin an empty history."""
        chunk_latents = self.shape.chunk_latents
        self._caches[session_id] = RollingCache(limits, rule, chunk_latents, self._exchange.largest)

    def close(self, session_id: str) -> None:
        """Drop a history; one that is not there is no error."""
        self._caches.pop(session_id, None)

    def limit(self, limits: CacheLimits) -> None:
        """Change what all sessions see."""
        for cache in self._caches.values():
            cache.limit(limits)

    def convert(self, rule: KvRule) -> None:
        """Store all histories in another precision."""
        for cache in self._caches.values():
            cache.convert(rule)

    def cache_bytes(self) -> int:
        """Of this rank's histories."""
        return sum(cache.bytes for cache in self._caches.values())

    def kept(self, session_id: str) -> tuple[int, ...]:
        """The chunks that a session's next one sees."""
        return tuple(entry.chunk for entry in self._caches[session_id].entries)

    @torch.no_grad()
    def make(self, session_id: str, place: ChunkPlace, prompt: Prompt, seed: int, steps: int) -> MadeChunk:
        """Denoise the next chunk and write its history.

        Args:
            session_id: an open one.
            place: where in the clip the chunk is.
            prompt: what it shows.
            seed: of the session; with the chunk's number it decides the noise.
            steps: denoising steps.

        Raises:
            EngineError: a latent is not finite; nothing was written.
        """
        sent_before = self._exchange.sent_bytes
        frames = self.shape.chunk_latents
        tokens = self._mine(to_tokens(noise(seed, place.chunk, frames).to(self._dtype)))
        angles = self._angles(session_id, place)
        seconds = []
        levels = flow.levels(steps)
        for level, next_level in itertools.pairwise(levels):
            begin = time.perf_counter()
            tokens = flow.denoise_step(
                tokens, level, next_level, lambda x, at: self._velocity(session_id, x, at, prompt, angles, None)
            )
            seconds.append(time.perf_counter() - begin)
        latents = from_tokens(self._exchange.gather_tokens(tokens), frames)
        if not bool(latents.isfinite().all()):
            raise EngineError(f"session {session_id}: chunk {place.chunk} is not finite", code="engine.not_finite")
        begin = time.perf_counter()
        ratio = self.remember(session_id, place, prompt, latents)
        recache_s = time.perf_counter() - begin
        return MadeChunk(
            latents=latents.float(),
            denoise_s=tuple(seconds),
            recache_s=recache_s,
            kv_signal_to_noise_db=ratio,
            sent_bytes=self._exchange.sent_bytes - sent_before,
        )

    @torch.no_grad()
    def remember(self, session_id: str, place: ChunkPlace, prompt: Prompt, latents: Tensor) -> float | None:
        """Write the history of a chunk that is there already: its keys and values at noise level 0.

        Returns:
            Signal to noise of what was stored, in dB; None where nothing was lost.
        """
        written: list[tuple[Tensor, Tensor]] = []
        tokens = self._mine(to_tokens(latents.to(self._dtype)))
        self._velocity(session_id, tokens, 0.0, prompt, self._angles(session_id, place), written)
        keys, values = zip(*written, strict=True)
        entry = self._caches[session_id].append(keys, values, place)
        return signal_to_noise_db([*keys, *values], [*entry.keys, *entry.values])

    @property
    def _dtype(self) -> torch.dtype:
        return self.model.head_table.dtype

    def _mine(self, tokens: Tensor) -> Tensor:
        """This rank's share of a chunk's tokens."""
        return tokens.chunk(self._exchange.ranks)[self._exchange.rank]

    def _angles(self, session_id: str, place: ChunkPlace) -> tuple[Tensor, Tensor]:
        """Rotary positions of the history and the chunk after it: the same in all passes of that chunk."""
        return rotary_angles(self._caches[session_id].times(place.shot).to(self._dtype), self.shape.head_dim)

    def _velocity(
        self,
        session_id: str,
        tokens: Tensor,
        level: float,
        prompt: Prompt,
        angles: tuple[Tensor, Tensor],
        written: list[tuple[Tensor, Tensor]] | None,
    ) -> Tensor:
        """One forward pass of this rank's tokens; `written` receives each layer's keys and values."""
        cache = self._caches[session_id]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query, key, value = self._exchange.to_heads(torch.cat([query, key, value]))
            if written is not None:
                written.append((key, value))
            seen = _attention(query, *cache.read(layer, key, value), *angles)
            return self._exchange.to_tokens(seen[None])

        words = prompt_words(prompt)[None, None]
        levels = torch.tensor([[level]], dtype=self._dtype)
        velocity: Tensor = self.model(tokens[None, None], levels, words, attend)
        return velocity[0, 0]


def noise(seed: int, chunk: int, frames: int) -> Tensor:
    """The noise that a chunk begins with, float32 `[frames, channels, height, width]`; the same on every rank."""
    digest = hashlib.sha256(f"{seed} {chunk}".encode()).digest()
    source = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(frames, LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE, generator=source)


def _attention(query: Tensor, keys: Tensor, values: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Of the last tokens over all, `[tokens, heads, head_dim]`."""
    count = query.shape[0]
    turned = rotate(query, cosines[-count:], sines[-count:])
    asked, looked_at, given = (x.transpose(0, 1)[None] for x in (turned, rotate(keys, cosines, sines), values))
    return functional.scaled_dot_product_attention(asked, looked_at, given)[0].transpose(0, 1)
