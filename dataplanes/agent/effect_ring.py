"""Effects that the daemon has not committed yet."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from itertools import islice

from controld.contract.effect import Effect


class EffectRing:
    """A bounded queue of numbered effects: appended by the data plane, read by the stream, cut by acknowledgements.

    A full ring drops its oldest effect. Sequence numbers count from 1 and are never used twice, so a daemon that sees
    an effect again after a reconnect knows it by its number.

    Args:
        capacity: how many effects may wait.
        on_overflow: called for each dropped effect.
        on_append: called after each append; must be quick.
    """

    def __init__(
        self,
        capacity: int,
        *,
        on_overflow: Callable[[], None] = lambda: None,
        on_append: Callable[[], None] = lambda: None,
    ) -> None:
        self._capacity = capacity
        self._on_overflow = on_overflow
        self._on_append = on_append
        self._lock = threading.Lock()
        self._effects: deque[Effect] = deque()
        self._first_seq = 1

    def append(self, effect: Effect) -> None:
        """Number and keep an effect."""
        with self._lock:
            overflow = len(self._effects) >= self._capacity
            if overflow:
                self._effects.popleft()
                self._first_seq += 1
            self._effects.append(effect)
        if overflow:
            self._on_overflow()
        self._on_append()

    def acknowledge(self, up_to_seq: int) -> bool:
        """Forget what is committed; False where the number was never given out (nothing is forgotten then)."""
        with self._lock:
            if up_to_seq >= self._first_seq + len(self._effects):
                return False
            while self._first_seq <= up_to_seq:
                self._effects.popleft()
                self._first_seq += 1
            return True

    def after(self, seq: int, limit: int) -> list[tuple[int, Effect]]:
        """Up to `limit` waiting effects with numbers above `seq`, in order."""
        with self._lock:
            skip = max(0, seq + 1 - self._first_seq)
            chosen = list(islice(self._effects, skip, skip + limit))
            first = self._first_seq + skip
        return list(enumerate(chosen, start=first))

    def last_seq(self) -> int:
        """The highest number given out; 0 before the first."""
        with self._lock:
            return self._first_seq + len(self._effects) - 1

    def __len__(self) -> int:
        return len(self._effects)
