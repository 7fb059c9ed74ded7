"""Time as a parameter: the daemon, the agent and the simulator take a clock, so tests never sleep."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks: one that only goes forward, one that people read."""

    def monotonic_s(self) -> float:
        """Seconds on a clock that never steps back."""
        ...

    def unix_s(self) -> float:
        """Seconds since 1970 by the wall clock; for display and audit, never for intervals."""
        ...


class SystemClock:
    """The machine's clocks."""

    __slots__ = ()

    def monotonic_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told; the wall clock moves with it.

    Args:
        start_s: first reading of the monotonic clock, seconds.
        unix_origin_s: wall-clock time at monotonic zero, seconds.
    """

    __slots__ = ("_now_s", "_unix_origin_s")

    def __init__(self, start_s: float = 0.0, unix_origin_s: float = 1_700_000_000.0) -> None:
        self._now_s = start_s
        self._unix_origin_s = unix_origin_s

    def monotonic_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._unix_origin_s + self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by a non-negative number of seconds."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now_s += seconds
