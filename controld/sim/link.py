"""The link between the machines: first in, first out, slow again after it has rested."""

from __future__ import annotations

import math
from dataclasses import dataclass

from controld.contract.errors import FieldError
from controld.sim.schedule import RateSchedule

_SEGMENT_BYTES = 1460.0
_MOST_DOUBLINGS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTruth:
    """What the link really is.

    Args:
        schedule: its rate.
        rtt_s: round trip; half of it passes before bytes arrive, half before their acknowledgement does.
        initial_window_bytes: what may be under way in the first round trip after a rest; it doubles every round trip
            until the rate is reached. 0: no slow start.
        rest_s: a rest so long makes it slow again.
    """

    schedule: RateSchedule
    rtt_s: float = 5e-4
    initial_window_bytes: float = 10 * _SEGMENT_BYTES
    rest_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rtt_s", "initial_window_bytes", "rest_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise FieldError(f"link.{name}", f"{value} is not a finite non-negative number")


class FifoLink:
    """The state of a link: until when it is taken, and since when it has been busy without a rest."""

    __slots__ = ("_burst_s", "_free_s", "_truth")

    def __init__(self, truth: LinkTruth) -> None:
        self._truth = truth
        self._free_s = -math.inf
        self._burst_s = -math.inf

    def copy(self) -> FifoLink:
        """The same state, to try something on."""
        link = FifoLink(self._truth)
        link._free_s, link._burst_s = self._free_s, self._burst_s
        return link

    def send(self, now_s: float, size_bytes: float, transfers: int) -> tuple[float, float]:
        """Put bytes behind all others; when their first enters the wire, and when their last has.

        Args:
            transfers: how many transfers have begun, for schedules that count them.
        """
        start_s = max(now_s, self._free_s)
        if start_s - self._free_s > self._truth.rest_s:
            self._burst_s = start_s
        self._free_s = self._finish_s(start_s, size_bytes, transfers)
        return start_s, self._free_s

    def _finish_s(self, start_s: float, size_bytes: float, transfers: int) -> float:
        truth, schedule = self._truth, self._truth.schedule
        window, rtt_s = truth.initial_window_bytes, truth.rtt_s
        at_full_rate_s = schedule.finish_s(start_s, size_bytes, transfers)
        under_way = schedule.rate(start_s, transfers) * rtt_s
        if window == 0 or under_way <= window:
            return at_full_rate_s
        doublings = (start_s - self._burst_s) / rtt_s
        full_doublings = math.log2(under_way / window)
        if doublings >= min(full_doublings, _MOST_DOUBLINGS):
            return at_full_rate_s
        # The rate is window / rtt 2^(t / rtt) until it reaches the link's; its integral is window / ln 2 2^(t / rtt).
        grown = 2.0**doublings
        while_slow = window / math.log(2) * (2.0**full_doublings - grown)
        if size_bytes <= while_slow:
            end_s = self._burst_s + rtt_s * math.log2(grown + size_bytes * math.log(2) / window)
        else:
            fast_from_s = self._burst_s + rtt_s * full_doublings
            end_s = schedule.finish_s(fast_from_s, size_bytes - while_slow, transfers)
        return max(end_s, at_full_rate_s)
