"""What an engine write costs apart from its bytes: messages, threads that wake, the interpreter's lock.

Coded pieces are small, so on a fast link this is most of their time; taken for wire, it makes the link look slower the
better a codec is, and raw transfers dearer than they are.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from dataplanes.sglang.pd.transfer import WireSpan

LARGEST_S: Final = 0.003
"""More is not believed: a link that has slowed down would otherwise pass for overhead."""

_REMEMBERED: Final = 256
_SMALL_SHARE: Final = 0.25


class WriteOverhead:
    """The least time that small writes took beyond their bytes at the best rate seen, among recent writes.

    Not safe in several threads; every lane's worker may call it, so the caller holds a lock.
    """

    def __init__(self) -> None:
        self._spans: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)

    def without(self, span: WireSpan) -> WireSpan:
        """The span less what is overhead, and remember it; at least half of it stays."""
        seconds = span.end_s - span.start_s
        if seconds <= 0 or span.wire_bytes <= 0:
            return span
        self._spans.append((seconds, span.wire_bytes))
        overhead_s = min(self._overhead_s(), seconds / 2)
        return WireSpan(span.start_s + overhead_s, span.end_s, span.wire_bytes)

    def _overhead_s(self) -> float:
        best_s, best_bytes = min(self._spans, key=lambda known: known[0] / known[1])
        second_per_byte = best_s / best_bytes
        small = [
            seconds - wire_bytes * second_per_byte
            for seconds, wire_bytes in self._spans
            if wire_bytes <= _SMALL_SHARE * best_bytes
        ]
        return min(max(min(small), 0.0), LARGEST_S) if small else 0.0
