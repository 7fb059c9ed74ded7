"""What waits in a queue, counted from what came and what left, without ids."""

from __future__ import annotations

from collections import deque

from controld.contract.errors import FieldError


class Backlog:
    """Raw bytes and transfers that were offered and have not left yet. Not thread-safe.

    What leaves is taken to be the oldest of its size; where none has that size (what was sent may differ from what was
    expected), the oldest. So a difference never stays in the sum, as it would by adding and subtracting bytes.
    """

    MAX_WAITING = 65_536

    def __init__(self) -> None:
        self._waiting: deque[int] = deque()
        self.bytes = 0

    @property
    def transfers(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def offered(self, raw_bytes: int) -> None:
        """A transfer came. Beyond `MAX_WAITING` the oldest is taken as lost.

        Raises:
            FieldError: bytes are negative.
        """
        if raw_bytes < 0:
            raise FieldError("backlog.raw_bytes", f"{raw_bytes} is negative", code="estimate.offered")
        if len(self._waiting) >= self.MAX_WAITING:
            self.bytes -= self._waiting.popleft()
        self._waiting.append(raw_bytes)
        self.bytes += raw_bytes

    def left(self, raw_bytes: int) -> None:
        """A transfer left, done or given up; nothing happens where none waits."""
        if not self._waiting:
            return
        try:
            # Queues are nearly in order, so what leaves is found near the front.
            self._waiting.remove(raw_bytes)
            self.bytes -= raw_bytes
        except ValueError:
            self.bytes -= self._waiting.popleft()
