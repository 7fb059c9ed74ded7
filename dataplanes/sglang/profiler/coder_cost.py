"""What one configuration costs on one prompt: bytes on the wire and seconds on either side, warm."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dataplanes.sglang.profiler.quality import Planes


class WireCodec(Protocol):
    """A configuration at work: planes to the very bytes that would travel, and back."""

    def encode(self, planes: Planes) -> Sequence[torch.Tensor]:
        """All frames of a prompt, flat uint8, headers and side data included; valid until the next call."""
        ...

    def decode(self, frames: Sequence[torch.Tensor], tokens: int) -> Planes:
        """What the receiver has in its pool afterwards; valid until the next call."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class CoderCost:
    """Measured on one prompt.

    Args:
        encode_s, decode_s: medians of the repeats, seconds.
        received: the decoded planes.
    """

    wire_bytes: int
    encode_s: float
    decode_s: float
    received: Planes


def measure_coder(
    codec: WireCodec,
    planes: Planes,
    *,
    warm_up: int = 1,
    repeats: int = 3,
    budget_s: float = 0.3,
    timer: Callable[[], float] = time.perf_counter,
) -> CoderCost:
    """Run the codec on the planes: `warm_up` round trips unmeasured, then at most `repeats` measured ones.

    No repeat begins once the measured ones took `budget_s`; there is always one.
    """
    tokens = int(planes[0].shape[0])
    encode_s: list[float] = []
    decode_s: list[float] = []
    with torch.inference_mode():
        for _ in range(warm_up):
            codec.decode(codec.encode(planes), tokens)
        for _ in range(repeats):
            start_s = timer()
            frames = codec.encode(planes)
            middle_s = timer()
            received = codec.decode(frames, tokens)
            end_s = timer()
            encode_s.append(middle_s - start_s)
            decode_s.append(end_s - middle_s)
            if sum(encode_s) + sum(decode_s) >= budget_s:
                break
    return CoderCost(
        sum(frame.numel() for frame in frames), statistics.median(encode_s), statistics.median(decode_s), received
    )
