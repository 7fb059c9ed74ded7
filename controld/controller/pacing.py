"""When to plan again: at most once an interval, and sooner where what was learned contradicts the plan in force.

Most news move a plan by little, and can wait until the interval has passed. A surprise (an arm that turned several
times slower) makes every transfer until the next plan a bad one, so it may cut the interval short. That costs credit,
which comes back slowly: in the long run plans are made at most `1 + 1 / CREDIT_INTERVALS` times an interval, however
surprising the news are.
"""

from __future__ import annotations

import math

from controld.contract.errors import FieldError

SURPRISE_LOG = 0.1
"""A stage that is a tenth slower or quicker than the plan takes it for is a surprise."""

CREDIT = 8
"""Plans before their time that can follow one another."""

CREDIT_INTERVALS = 10.0
"""After so many intervals one of them may be made again."""


class Pace:
    """Not thread-safe. Times are passed in, seconds on one clock that never goes back.

    Args:
        interval_s: the least time between two plans that nothing surprising calls for.
    """

    def __init__(self, interval_s: float) -> None:
        if not (math.isfinite(interval_s) and interval_s >= 0):
            raise FieldError("pace.interval_s", f"{interval_s} is not a finite time, zero or more")
        self._interval_s = interval_s
        self._planned_s = -math.inf
        self._credit = float(CREDIT)

    def earliest_s(self, now_s: float, moved_log: float) -> float:
        """From when on a plan may be made, given how far the news have moved what it would be made from."""
        if abs(moved_log) >= SURPRISE_LOG and self._credit_at(now_s) >= 1:
            return now_s
        return max(now_s, self._planned_s + self._interval_s)

    def planned(self, now_s: float) -> None:
        """A plan was made."""
        credit = self._credit_at(now_s)
        early = now_s < self._planned_s + self._interval_s
        self._credit = max(0.0, credit - 1) if early else credit
        self._planned_s = now_s

    def _credit_at(self, now_s: float) -> float:
        if not (self._interval_s > 0 and math.isfinite(self._planned_s)):
            return float(CREDIT)
        passed = (now_s - self._planned_s) / (CREDIT_INTERVALS * self._interval_s)
        return min(float(CREDIT), self._credit + passed)
