"""Says before it happens what a setting takes in memory, so that a limit is kept and not met by accident."""

from __future__ import annotations

import torch
from torch import nn

from dataplanes.longlive.linear.precision import LinearPrecision, Precision
from dataplanes.longlive.reference.generator import Generator
from dataplanes.longlive.reference.kv_tensor import KvRule, stored_bytes
from dataplanes.longlive.reference.live_bytes import LiveBytes
from dataplanes.longlive.reference.model import ModelShape
from dataplanes.longlive.reference.parallel import RankGroup
from dataplanes.longlive.reference.rolling_cache import CacheLimits, ChunkPlace
from dataplanes.longlive.reference.shapes import Prompt
from dataplanes.longlive.reference.vae import LATENT_CHANNELS, LATENT_SIZE, FeatureCache, Vae, cache_bytes
from dataplanes.numerics.nvfp4 import BLOCK

_PROBE_SESSION = "\0probe"


def history_bytes(shape: ModelShape, limits: CacheLimits, rule: KvRule) -> int:
    """Of one session's keys and values when its window is full."""
    chunk = sum(stored_bytes(shape.chunk_tokens, shape.dim, rule, is_key=is_key) for is_key in (True, False))
    return (limits.window - 1) * shape.layers * chunk


def latent_bytes(shape: ModelShape) -> int:
    """Of one chunk that waits to be decoded."""
    return 4 * shape.chunk_latents * LATENT_CHANNELS * LATENT_SIZE**2


def block_weight_bytes(shape: ModelShape, precision: LinearPrecision) -> int:
    """Of the matrices in the blocks, stored at a precision."""
    dim, wide = shape.dim, shape.feed_forward
    total = 0
    for outputs, inputs in (*[(dim, dim)] * 4, (wide, dim), (dim, wide)):
        values = outputs * inputs
        match precision.weights:
            case Precision.BF16:
                total += 2 * values
            case Precision.FP8:
                total += values + 4 * outputs
            case Precision.NVFP4:
                total += values // 2 + values // BLOCK + 4
    return shape.layers * total


def measure_activations(generator: Generator | RankGroup, limits: CacheLimits, rule: KvRule) -> int:
    """Bytes that one forward pass holds at most beside weights and history, measured with the window full."""
    shape = generator.shape
    latents = torch.zeros(shape.chunk_latents, LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE)
    prompt = Prompt(0, 0, 0)
    generator.open(_PROBE_SESSION, limits, rule)
    try:
        for chunk in range(limits.window - 1):
            generator.remember(_PROBE_SESSION, ChunkPlace(chunk=chunk), prompt, latents)
        with LiveBytes() as live:
            generator.make(_PROBE_SESSION, ChunkPlace(chunk=limits.window - 1), prompt, 0, 1)
        peak: int = live.peak_bytes
        return peak
    finally:
        generator.close(_PROBE_SESSION)


def measure_decoder(vae: Vae, shape: ModelShape) -> tuple[int, int]:
    """Bytes that decoding a chunk holds at most, and those that one session keeps between chunks."""
    cache: FeatureCache = {}
    latents = torch.zeros(shape.chunk_latents, LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE)
    with torch.no_grad(), LiveBytes() as live:
        vae.stream(latents, cache)
    return live.peak_bytes, cache_bytes(cache)


def module_bytes(module: nn.Module) -> int:
    """Of parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
