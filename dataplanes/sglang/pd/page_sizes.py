"""What pages, pieces and parts of a pool come to, in tokens and raw bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from dataplanes.kvcodec import KVCodec, KVLayout

PART_BYTES: Final = 12_000_000
"""Raw size of what one tenant sends before another one's turn may come, about."""

PART_ALIGNMENT_TOKENS: Final = 256
"""No group of a codec is coarser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSizes:
    """Sizes in a pool of one layout.

    Args:
        layout: of the pool.
        piece_bytes: raw size of a piece to aim at.
    """

    layout: KVLayout
    piece_bytes: int

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.layout.page_tokens

    @property
    def part_tokens(self) -> int:
        """How much of a chunk one tenant sends before another one's turn may come."""
        unit = math.lcm(PART_ALIGNMENT_TOKENS, self.page_tokens)
        return unit * max(1, round(PART_BYTES / self.layout.raw_bytes(unit)))

    def piece_tokens(self, codec: KVCodec) -> int:
        """How many tokens become one frame of a codec."""
        unit = codec.chunk_alignment_tokens
        return unit * max(1, round(self.piece_bytes / self.layout.raw_bytes(unit)))

    def raw_bytes(self, tokens: int) -> int:
        """Raw bytes of the pages that hold so many tokens: what SGLang's raw path puts on the wire."""
        pages = -(-max(0, tokens) // self.page_tokens)
        return self.layout.raw_bytes(pages * self.page_tokens)
