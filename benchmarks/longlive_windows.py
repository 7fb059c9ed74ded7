"""What the history costs with windows of 9 and 15 latent frames in each precision: bytes held, and a chunk's time.

Both times are one thread's processor time. A chunk's is a whole one of the engine's, decoding included, with the window
full. Reading is measured by itself, over a cache as full as the engine's: for every forward pass of a chunk and every
layer all keys and values are put side by side in float32, for attention. Settings take turns, so that other work on
the machine meets all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from longlive_front import measure_costs
from longlive_quality import BF16, HISTORIES

from controld.contract.configuration import Configuration, Value
from dataplanes.longlive.reference.model import ModelShape
from dataplanes.longlive.reference.rolling_cache import ChunkPlace, RollingCache
from dataplanes.longlive.reference.setting import FULL, Setting

WINDOWS = (9, 15)
FORMATS: Mapping[str, Mapping[str, Value]] = {
    BF16: {}, **{name: HISTORIES[name] for name in ("KV fp8", "KV nvfp4")}
}  # fmt: skip
# The smaller window has no room for two sinks.
_SINK: Mapping[str, Value] = {"multi_shot": "no"}
_READINGS = 20


def windows() -> dict[tuple[str, int], Configuration]:
    """All settings by format and window; they differ in nothing else."""
    return {
        (name, window): Configuration({**FULL, **_SINK, **change, "window": window})
        for window in WINDOWS
        for name, change in FORMATS.items()
    }


def measure_windows(chunks: int, checkpoint: str) -> list[dict[str, Any]]:
    """A row for each setting; medians, of a chunk's time over `chunks`."""
    configurations = windows()
    costs = measure_costs({str(key): one for key, one in configurations.items()}, chunks, checkpoint)
    reading = _measure_reading(configurations)
    return [
        {
            "name": name,
            "window": window,
            "kv_bytes": costs[str((name, window))]["kv_bytes"],
            "chunk_s": costs[str((name, window))]["chunk_s"],
            "reading_s": reading[name, window],
            "is_emulated": name != BF16,
        }
        for name, window in configurations
    ]


def _measure_reading(configurations: Mapping[tuple[str, int], Configuration]) -> dict[tuple[str, int], float]:
    """Median seconds that a chunk's passes read history for."""
    shape, source = ModelShape(), torch.Generator().manual_seed(0)
    sizes = (2, shape.layers, shape.chunk_tokens, shape.heads, shape.head_dim)
    keys, values = (list(drawn) for drawn in torch.randn(sizes, generator=source))
    settings = {key: Setting.of(configuration) for key, configuration in configurations.items()}
    caches = {}
    for key, setting in settings.items():
        caches[key] = RollingCache(setting.limits, setting.kv, shape.chunk_latents, lambda peak: peak)
        for chunk in range(setting.limits.window):
            caches[key].append(keys, values, ChunkPlace(chunk=chunk))
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in settings}
    for _ in range(_READINGS):
        for key, setting in settings.items():
            begin = time.thread_time()
            for _ in range(setting.steps + 1):
                for layer in range(shape.layers):
                    caches[key].read(layer, keys[layer], values[layer])
            seconds[key].append(time.thread_time() - begin)
    return {key: statistics.median(found) for key, found in seconds.items()}
