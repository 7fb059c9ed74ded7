"""The reconstruction error that is normal for a lossy part, taken as senders take it while serving: of one frame, from
anywhere in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dataplanes.kvcodec.reconstruction import reconstruction_error
from dataplanes.sglang.profiler.quality import Planes
from dataplanes.sglang.profiler.wire_codec import FRAME_BYTES

_GOLDEN = 0.6180339887498949


def frame_error(planes: Planes, received: Planes, segment: int, *, frame_bytes: int = FRAME_BYTES) -> float:
    """The error of one frame of a prompt; the segments' frames are spread evenly over the prompt.

    Args:
        planes: the keys of all layers, then the values, `[tokens, kv_heads, head_dim]` each.
        received: what came back.
        segment: its number decides which frame.
        frame_bytes: raw bytes of a frame, about.
    """
    tokens = int(planes[0].shape[0])
    token_bytes = sum(plane[:1].numel() * plane.element_size() for plane in planes)
    frames = max(1, round(tokens * token_bytes / frame_bytes))
    frame = int(frames * ((segment + 1) * _GOLDEN % 1.0))
    start, end = frame * tokens // frames, (frame + 1) * tokens // frames
    half = len(planes) // 2

    def pairs(first: int, last: int) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        return [(planes[index][start:end], received[index][start:end]) for index in range(first, last)]

    return reconstruction_error((pairs(0, half), pairs(half, len(planes))))
