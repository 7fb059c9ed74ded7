"""Counting and error reporting that any thread of the data plane can afford."""

from __future__ import annotations

import logging
import threading
import time

_log = logging.getLogger(__name__)


class Counters:
    """Named counters without a lock on the counting side: each thread counts in a dictionary of its own.

    Names are bounded: beyond `MAX_NAMES` in one thread everything counts as `other`.
    """

    MAX_NAMES = 256

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self._of_threads: list[tuple[threading.Thread, dict[str, int]]] = []
        self._of_ended_threads: dict[str, int] = {}

    def count(self, name: str, n: int = 1) -> None:
        """Add `n` to a counter."""
        try:
            mine: dict[str, int] = self._local.counts
        except AttributeError:
            mine = self._local.counts = {}
            with self._lock:
                self._of_threads.append((threading.current_thread(), mine))
        if name not in mine and len(mine) >= self.MAX_NAMES:
            name = "other"
        mine[name] = mine.get(name, 0) + n

    def totals(self) -> dict[str, int]:
        """All counters, summed over threads."""
        with self._lock:
            living = []
            for thread, counts in self._of_threads:
                if thread.is_alive():
                    living.append((thread, counts))
                else:
                    _add(self._of_ended_threads, counts)
            self._of_threads = living
            totals = dict(self._of_ended_threads)
            for _, counts in living:
                _add(totals, counts.copy())
        return dict(sorted(totals.items()))


def _add(into: dict[str, int], counts: dict[str, int]) -> None:
    for name, value in counts.items():
        into[name] = into.get(name, 0) + value


class ErrorEdge:
    """Where errors of the agent end: logged whole, counted, and never passed on to the data plane.

    The same kind of error from the same place is logged once in `LOG_INTERVAL_S` and counted every time, so that a
    fault on the transfer path cannot fill a disk.
    """

    LOG_INTERVAL_S = 30.0

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._logged_at_s: dict[tuple[str, str], float] = {}

    def caught(self, where: str, error: BaseException) -> None:
        """Take an error; called from an `except` block."""
        self._counters.count("internal_error")
        self._counters.count(f"internal_error.{where}")
        key = (where, type(error).__name__)
        now_s = time.monotonic()
        if now_s - self._logged_at_s.get(key, -self.LOG_INTERVAL_S) >= self.LOG_INTERVAL_S:
            self._logged_at_s[key] = now_s
            _log.error("agent error in %s; the data plane goes on", where, exc_info=error)
