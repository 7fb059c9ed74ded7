"""What the engine holds: tensors by what they are for, and the device's own counts where there are any."""

from __future__ import annotations

from typing import Any

import torch

from controld.contract.video import MemorySplit


def bytes_of(value: Any) -> int:
    """Bytes of the tensors in a cache: dicts, lists and quantised tensors (objects that hold tensors)."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(bytes_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(bytes_of, value))
    return sum(map(bytes_of, vars(value).values())) if hasattr(value, "__dict__") else 0


def module_bytes(module: torch.nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return sum(one.numel() * one.element_size() for one in (*module.parameters(), *module.buffers()))


def split(pipe: Any, device: str) -> MemorySplit:
    """What a pipeline holds now; the peak is since `reset_peak`. Without a device counter it is the sum."""
    weights = module_bytes(pipe)
    cached = sum(
        bytes_of(getattr(pipe, name) or ())
        for name in ("kv_cache_pos", "kv_cache_neg", "crossattn_cache_pos", "crossattn_cache_neg")
    )
    if not device.startswith("cuda"):
        return MemorySplit(weights_bytes=weights, kv_bytes=cached, peak_bytes=weights + cached)
    peak = torch.cuda.max_memory_allocated(device)
    return MemorySplit(
        weights_bytes=weights,
        kv_bytes=cached,
        activation_bytes=max(0, peak - weights - cached),
        peak_bytes=peak,
        reserved_bytes=torch.cuda.memory_reserved(device),
    )


def reset_peak(device: str) -> None:
    """Begin counting the peak anew."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)


def held_bytes(device: str) -> int:
    """Device memory that tensors hold now; 0 where nothing counts it."""
    return torch.cuda.memory_allocated(device) if device.startswith("cuda") else 0


def limit(device: str, limit_bytes: int, total_bytes: int) -> None:
    """Make the allocator refuse more than the limit; 0: no limit."""
    if device.startswith("cuda"):
        fraction = min(1.0, limit_bytes / total_bytes) if limit_bytes else 1.0
        torch.cuda.set_per_process_memory_fraction(fraction, device)
