"""Below which bandwidth a codec is faster than sending raw, from its ratio and its speeds."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpeed:
    """A codec on one machine.

    Args:
        ratio: raw bytes over wire bytes.
        encode_bytes_per_s: raw bytes.
        decode_bytes_per_s: raw bytes.
    """

    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("ratio", "encode_bytes_per_s", "decode_bytes_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: {value} is not a positive number")

    @property
    def sequential_bytes_per_s(self) -> float:
        """Break-even where encoding, wire and decoding follow one another: (1 - 1/ratio) / (1/encode + 1/decode).

        0 where the codec saves no bytes.
        """
        saved = max(1 - 1 / self.ratio, 0.0)
        return saved / (1 / self.encode_bytes_per_s + 1 / self.decode_bytes_per_s)

    @property
    def overlapped_bytes_per_s(self) -> float:
        """Break-even where the pieces of a long transfer keep all three stages busy: the slower of encoder and decoder.

        0 where the codec saves no bytes.
        """
        return min(self.encode_bytes_per_s, self.decode_bytes_per_s) if self.ratio > 1 else 0.0

    def sequential_gain(self, bandwidth_bytes_per_s: float) -> float:
        """Raw time over coded time on a link, one stage after the other; above 1 the codec wins."""
        raw_s = 1 / bandwidth_bytes_per_s
        return raw_s / (1 / self.encode_bytes_per_s + raw_s / self.ratio + 1 / self.decode_bytes_per_s)

    def overlapped_gain(self, bandwidth_bytes_per_s: float) -> float:
        """Raw time over coded time on a link, all stages at once."""
        slowest = min(self.encode_bytes_per_s, bandwidth_bytes_per_s * self.ratio, self.decode_bytes_per_s)
        return slowest / bandwidth_bytes_per_s
