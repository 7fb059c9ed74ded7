"""Chunk by chunk decoding for a VAE that has none.

LongLive's loop calls `vae.model.cached_decode`; its light VAEs have it, the released Wan 2.2 VAE decodes whole clips
only. Its decoder keeps the causal state of each convolution in a list that is handed to it, so decoding on from the
state of the chunk before gives the frames that decoding the whole clip gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_PIXEL_PATCH = 2


def add_cached_decode(model: Any, unpatchify: Callable[..., torch.Tensor]) -> bool:
    """Give a VAE `cached_decode(z, scale)` where it has none; whether it was needed.

    Args:
        model: the VAE with `conv2`, `decoder`, `clear_cache` and the state list `_feat_map`.
        unpatchify: `(x, patch_size)`, turns channels into pixels.
    """
    if hasattr(model, "cached_decode"):
        return False

    def cached_decode(z: torch.Tensor, scale: Sequence[Any]) -> torch.Tensor:
        mean, inverse_deviation = (one.view(1, -1, 1, 1, 1) if isinstance(one, torch.Tensor) else one for one in scale)
        latents = model.conv2(z / inverse_deviation + mean)
        parts = []
        for frame in range(latents.shape[2]):
            is_first = model._feat_map[0] is None
            model._conv_idx = [0]
            more = {"first_chunk": True} if is_first else {}
            parts.append(
                model.decoder(
                    latents[:, :, frame : frame + 1], feat_cache=model._feat_map, feat_idx=model._conv_idx, **more
                )
            )
        return unpatchify(torch.cat(parts, dim=2), patch_size=_PIXEL_PATCH)

    model.cached_decode = cached_decode
    return True


def move_decoder_state(model: Any, device: torch.device) -> None:
    """Move the causal state after the weights, so that a clip goes on decoding on another device."""
    state = getattr(model, "_feat_map", None)
    if isinstance(state, list):
        state[:] = [one.to(device) if isinstance(one, torch.Tensor) else one for one in state]
