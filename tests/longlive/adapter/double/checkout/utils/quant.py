"""Contract double, not LongLive: rows of whole numbers up to seven with a scale each, in place of NVFP4."""

from __future__ import annotations

from types import SimpleNamespace

import torch


def LongLiveQuantizationConfig(*, scale_rule, backend, type):  # noqa: N802 (the real one's name)
    return SimpleNamespace(scale_rule=scale_rule, backend=backend, type=type)


def quantize_to_fp4(rows, config):
    assert config.type == "kv"
    scales = rows.float().abs().amax(dim=-1, keepdim=True).clamp_min(1e-6) / 7
    codes = (rows.float() / scales).round().to(torch.int8)
    return SimpleNamespace(values=codes, scale_factors=scales, amax=scales.amax())


def clone_quantized_tensor(tensor):
    return SimpleNamespace(**{name: part.clone() for name, part in vars(tensor).items()})


def copy_quantized_into(slot, source):
    for name, part in vars(source).items():
        getattr(slot, name).copy_(part)


def dequantize_kv_cache(kv_list, max_blocks, num_heads, block_token_size, dtype, device):
    parts = [(one.values * one.scale_factors).to(dtype) for one in kv_list[:max_blocks]]
    return torch.cat(parts).view(1, max_blocks * block_token_size, num_heads, -1)
