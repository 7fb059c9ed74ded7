"""Mooncake's engine with its batches kept to a size that it takes, and its writes timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

MAX_DESCRIPTORS: Final = 1_000
"""The TCP transport queues 1,024 transfers to a peer and as many more behind them; a larger batch fails at once."""

OnWrite = Callable[[float, float, int], None]
"""`(start, end, bytes)` of a write that succeeded; monotonic seconds."""


class BoundedEngine:
    """Passes everything through to an engine, large batches in parts.

    Mooncake's TCP transport confirms each write from the receiving side, so that the end of a call is the arrival of
    its bytes.

    Args:
        engine: SGLang's engine wrapper.
        on_write: called in the writing thread.
    """

    def __init__(self, engine: Any, on_write: OnWrite) -> None:
        self._engine = engine
        self._on_write = on_write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def batch_transfer_sync(
        self, session_id: str, buffers: Sequence[int], peer_buffer_addresses: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Write all of them; the first status that is not zero ends it."""
        for start in range(0, len(lengths), MAX_DESCRIPTORS):
            part = slice(start, start + MAX_DESCRIPTORS)
            start_s = time.monotonic()
            status = self._engine.batch_transfer_sync(
                session_id, list(buffers[part]), list(peer_buffer_addresses[part]), list(lengths[part])
            )
            if status != 0:
                return int(status)
            self._on_write(start_s, time.monotonic(), sum(lengths[part]))
        return 0
