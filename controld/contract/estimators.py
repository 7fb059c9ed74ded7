"""What a data plane knows of its links: bandwidth from wire spans it saw anyway, and the load offered to it.

Both estimators are pure: times are passed in, seconds on one monotonic clock. No synthetic traffic: an estimate that
nothing refreshes keeps its mean and widens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from controld.contract.errors import FieldError

MAX_SPAN_BYTES = 2.0**53
MIN_SPAN_S = 1e-9
MIN_BYTES = 1e-6
"""Below these, which no clock and no wire has, no rate follows from a span or from its share of a period."""

LEAST_SET_UP_BYTES = 1e6
"""What took fewer bytes to set up says how long a connection takes to come about, and nothing of the link."""

SET_UP_MARGIN = 3.0
"""A link is at least as quick as its set-up was; it is taken to be so many times as quick until more is known."""


def first_guess_bytes_per_s(set_up_bytes_per_s: float, prior_bytes_per_s: float) -> float:
    """The rate to draw an arm with while the link has no estimate; 0 where nothing at all is known.

    The set-up's rate is a lower bound. The operator's word counts where it is not below that. Without it the set-up's
    rate times `SET_UP_MARGIN` does: a codec that is quicker than raw on that link is so on every slower one, so nothing
    is coded that would be slower than raw on a link up to so many times as quick as the set-up.

    Args:
        set_up_bytes_per_s: see `BandwidthEstimator.set_up_bytes_per_s`.
        prior_bytes_per_s: what the operator says of the link; 0: nothing.
    """
    if prior_bytes_per_s > 0:
        return max(prior_bytes_per_s, set_up_bytes_per_s)
    return SET_UP_MARGIN * set_up_bytes_per_s


@dataclass(frozen=True, slots=True)
class Estimate:
    """A rate with what is known of its error.

    Args:
        mean: bytes per second.
        sd: standard deviation of the mean, bytes per second; grows with age.
        age_s: seconds since the newest observation in it; infinite where there is none.
        count: observations that went into it, ever.
    """

    mean: float
    sd: float
    age_s: float
    count: int


@dataclass(slots=True)
class _BusyPeriod:
    """A stretch of wall clock in which at least one span was on the wire, with all bytes of that stretch."""

    start_s: float
    end_s: float
    wire_bytes: float
    spans: int
    span_seconds: float
    longest_span_s: float
    is_setup: bool = False
    continues: bool = False  # begins where the period before it was cut, with spans that straddle the cut

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def concurrency(self) -> float:
        """How many spans were on the wire at a time, on average."""
        return self.span_seconds / self.seconds


class _BusyPeriods:
    """The union of wire spans as disjoint periods in time order; the newest ones can still be amended.

    Spans that overlap share one period, so that concurrency never multiplies the link, and a span that is reported
    late joins the period it belongs to. A link that never rests is cut where a period is `CUT` times as long as its
    longest span; the bytes of a straddling span are split in proportion to time.
    """

    CUT = 6.0
    SETTLED = 3.0
    AMENDABLE = 16

    def __init__(self) -> None:
        self.periods: list[_BusyPeriod] = []
        self.closed_until_s = -math.inf

    def insert(self, start_s: float, end_s: float, wire_bytes: float) -> int:
        """Add a span; the index of the first period that is new or changed."""
        if end_s <= self.closed_until_s:
            return len(self.periods)
        if start_s < self.closed_until_s:
            wire_bytes *= (end_s - self.closed_until_s) / (end_s - start_s)
            start_s = self.closed_until_s
        first = len(self.periods)
        while first > 0 and self.periods[first - 1].end_s > start_s:
            first -= 1
        last = first
        while last < len(self.periods) and self.periods[last].start_s < end_s:
            last += 1
        span = _BusyPeriod(start_s, end_s, wire_bytes, 1, end_s - start_s, end_s - start_s)
        if first == last:
            self.periods.insert(first, span)
            return first
        touched = self.periods[first:last]
        longest_s = max(span.longest_span_s, *(period.longest_span_s for period in touched))
        union_s = max(end_s, touched[-1].end_s) - min(start_s, touched[0].start_s)
        if union_s <= self.CUT * longest_s:
            self.periods[first:last] = [self._merged([*touched, span])]
        else:
            self.periods[first:last] = self._shared_out(span, touched, longest_s)
        return first

    def is_overfull(self) -> bool:
        """Whether the oldest period must be closed."""
        return len(self.periods) > self.AMENDABLE

    def close_oldest(self) -> None:
        """Forget the oldest period: it cannot change any more."""
        self.closed_until_s = self.periods.pop(0).end_s

    def settled(self) -> tuple[int, _BusyPeriod | None]:
        """How many periods are settled, and what else is to be taken as one period after them.

        Spans are reported when they end, so the newest period lacks the bytes of those that are still under way. While
        they are most of it, it is joined to the period that it continues, or (at the beginning of a burst that is as
        concurrent as those before) left out.
        """
        count = len(self.periods)
        if count < 2:
            return count, None
        tail = self.periods[-1]
        if tail.continues:
            if tail.seconds >= self.SETTLED * tail.longest_span_s:
                return count, None
            return count - 2, self._merged(self.periods[-2:])
        before = self.periods[:-1]
        usual_concurrency = sum(p.span_seconds for p in before) / sum(p.seconds for p in before)
        return (count - 1 if tail.concurrency < usual_concurrency / 2 else count), None

    @staticmethod
    def _merged(periods: list[_BusyPeriod]) -> _BusyPeriod:
        return _BusyPeriod(
            start_s=min(period.start_s for period in periods),
            end_s=max(period.end_s for period in periods),
            wire_bytes=sum(period.wire_bytes for period in periods),
            spans=sum(period.spans for period in periods),
            span_seconds=sum(period.span_seconds for period in periods),
            longest_span_s=max(period.longest_span_s for period in periods),
            is_setup=any(period.is_setup for period in periods),
            continues=periods[0].continues,
        )

    def _shared_out(self, span: _BusyPeriod, touched: list[_BusyPeriod], longest_s: float) -> list[_BusyPeriod]:
        """Give each period its share of the span; what no period covers extends a neighbour or is a new period."""
        density = span.wire_bytes / (span.end_s - span.start_s)
        head, tail = touched[0], touched[-1]
        if span.start_s < head.start_s and head.end_s - span.start_s <= self.CUT * longest_s:
            head.start_s = span.start_s
        if span.end_s > tail.end_s and span.end_s - tail.start_s <= self.CUT * longest_s:
            tail.end_s = span.end_s
        tail.spans += 1
        result: list[_BusyPeriod] = []
        at_s = span.start_s
        for period in touched:
            if period.start_s > at_s:
                result.append(self._piece(at_s, period.start_s, density, span))
            overlap_s = min(span.end_s, period.end_s) - max(span.start_s, period.start_s)
            period.wire_bytes += density * overlap_s
            period.span_seconds += overlap_s
            period.longest_span_s = max(period.longest_span_s, span.longest_span_s)
            result.append(period)
            at_s = period.end_s
        if span.end_s > at_s:
            result.append(self._piece(at_s, span.end_s, density, span))
            result[-1].continues = True
        return result

    @staticmethod
    def _piece(start_s: float, end_s: float, density: float, span: _BusyPeriod) -> _BusyPeriod:
        seconds = end_s - start_s
        return _BusyPeriod(start_s, end_s, density * seconds, 0, seconds, span.longest_span_s)


@dataclass(slots=True)
class _LogRateFilter:
    """A Kalman filter on the logarithm of the rate, its observations weighted by bytes.

    The state walks at random with time and with each observation, so age widens it. An observation far outside what
    noise explains may be a stall or a changed link: it moves the mean half of the way and leaves both ends possible,
    so that the next one decides; one that outlasts its longest span `LASTING` times is more than a stall and decides
    itself. A change by any factor is followed within two transfers of usual size.
    """

    mean_log: float = 0.0
    variance: float = math.inf
    noise_variance: float = 0.15**2
    usual_bytes: float = 0.0
    newest_s: float = -math.inf
    count: int = 0

    DRIFT_PER_S: ClassVar[float] = 0.02**2
    DRIFT_PER_OBSERVATION: ClassVar[float] = 0.05**2
    STALE_VARIANCE: ClassVar[float] = math.log(3) ** 2
    NOISE_RANGE: ClassVar[tuple[float, float]] = (0.05**2, 0.5**2)
    GATE_SDS: ClassVar[float] = 3.0
    LASTING: ClassVar[float] = 1.5
    TINY: ClassVar[float] = 0.01
    USUAL_HALF_LIFE_S: ClassVar[float] = 600.0

    def observe(self, period: _BusyPeriod) -> None:
        seconds = period.seconds
        if seconds < MIN_SPAN_S or period.wire_bytes < MIN_BYTES:
            return
        log_rate = math.log(period.wire_bytes / seconds)
        self.count += period.spans
        if self.variance == math.inf:
            self.mean_log, self.variance = log_rate, self.noise_variance
            self.usual_bytes, self.newest_s = period.wire_bytes, period.end_s
            return
        variance = self.variance_at(period.end_s)
        size = self._relative_size(period)
        self.newest_s = max(self.newest_s, period.end_s)
        surprise = log_rate - self.mean_log
        if size < self.TINY and surprise < 0:
            # Slower than the link, but so small that latency explains it: only the time has passed.
            self.variance = variance
            return
        weight = min(1.0, size)
        variance += self.DRIFT_PER_OBSERVATION * weight
        noise = self.noise_variance / weight
        if surprise * surprise > self.GATE_SDS**2 * (variance + noise):
            if seconds >= self.LASTING * period.longest_span_s:
                self.mean_log, self.variance = log_rate, noise
            else:
                self.mean_log += surprise / 2
                self.variance = surprise * surprise / 4
            return
        low, high = self.NOISE_RANGE
        explained = min(max(weight * (surprise * surprise - variance), low), high)
        self.noise_variance += 0.1 * weight * (explained - self.noise_variance)
        gain = variance / (variance + noise)
        self.mean_log += gain * surprise
        self.variance = (1 - gain) * variance

    def variance_at(self, now_s: float) -> float:
        """Variance of the log rate after the time that has passed."""
        age_s = max(0.0, now_s - self.newest_s)
        return min(self.variance + self.DRIFT_PER_S * age_s, max(self.variance, self.STALE_VARIANCE))

    def _relative_size(self, period: _BusyPeriod) -> float:
        """Bytes over the usual bytes, before this period changes what is usual.

        The usual size is itself weighted by bytes, so that a crowd of tiny transfers does not become usual; it fades
        with time, so that in the end it does where nothing larger comes any more.
        """
        fade = math.exp2(-max(0.0, period.end_s - self.newest_s) / self.USUAL_HALF_LIFE_S)
        usual_bytes = max(self.usual_bytes * fade, 1.0)
        share = period.wire_bytes / (period.wire_bytes + 4 * usual_bytes)
        self.usual_bytes = usual_bytes + (period.wire_bytes - usual_bytes) * share
        return max(period.wire_bytes / usual_bytes, 1e-9)

    def copy(self) -> _LogRateFilter:
        return replace(self)


class BandwidthEstimator:
    """Bytes per second that a link carries, from the spans in which our bytes were on its wire.

    Bytes count over the union of wall clock, never per span: overlapping, chunked and stalled spans cannot add up to
    more than the link carried. Large transfers weigh more than small ones, whose time is mostly latency. The first
    busy period is not used: it holds the connection's set-up; what it says is a lower bound, and kept apart.

    Args:
        exclude_setup: leave the first busy period out.
    """

    def __init__(self, *, exclude_setup: bool = True) -> None:
        self._busy = _BusyPeriods()
        self._closed = _LogRateFilter()
        self._states: list[_LogRateFilter] = []
        self._current: _LogRateFilter | None = None
        self._expects_setup = exclude_setup
        self._set_up: _BusyPeriod | None = None

    def observe(self, start_s: float, end_s: float, wire_bytes: float) -> None:
        """Take in one wire span, which ends at the receiver's acknowledgement; in any order.

        A span of no bytes or no duration says nothing and is ignored.

        Raises:
            FieldError: a time is not finite, the span ends before it starts, or bytes are not in [0, 2^53].
        """
        if not (math.isfinite(start_s) and math.isfinite(end_s)) or end_s < start_s:
            raise FieldError("wire_span", f"[{start_s}, {end_s}] is not a span of time", code="estimate.span")
        if not 0 <= wire_bytes <= MAX_SPAN_BYTES:
            raise FieldError("wire_span.wire_bytes", f"{wire_bytes} is not a size", code="estimate.span")
        if end_s - start_s < MIN_SPAN_S or wire_bytes < MIN_BYTES:
            return
        changed = self._busy.insert(start_s, end_s, wire_bytes)
        del self._states[changed:]
        self._current = None
        if self._expects_setup:
            self._busy.periods[0].is_setup = True
            self._expects_setup = False
        if self._busy.periods[0].is_setup:
            self._set_up = self._busy.periods[0]
        while self._busy.is_overfull():
            self._closed = self._state_after(1)
            self._busy.close_oldest()
            del self._states[0]

    def estimate(self, now_s: float) -> Estimate | None:
        """The rate as known at `now_s`; None before the first span that counts."""
        if self._current is None:
            count, tail = self._busy.settled()
            self._current = self._state_after(count)
            if tail is not None and not tail.is_setup:
                self._current = self._current.copy()
                self._current.observe(tail)
        state = self._current
        if state.variance == math.inf:
            return None
        mean = math.exp(state.mean_log)
        sd = mean * math.sqrt(math.expm1(min(state.variance_at(now_s), state.STALE_VARIANCE)))
        return Estimate(mean, sd, max(0.0, now_s - state.newest_s), state.count)

    @property
    def set_up_bytes_per_s(self) -> float:
        """What the first busy period carried, a lower bound of the rate; 0 where there was none, or it was small."""
        period = self._set_up
        if period is None or period.wire_bytes < LEAST_SET_UP_BYTES:
            return 0.0
        return period.wire_bytes / period.seconds

    def _state_after(self, count: int) -> _LogRateFilter:
        """The filter after the first `count` open periods; kept until one of them changes."""
        while len(self._states) < count:
            period = self._busy.periods[len(self._states)]
            state = self._states[-1] if self._states else self._closed
            if not period.is_setup:
                state = state.copy()
                state.observe(period)
            self._states.append(state)
        return self._states[count - 1] if count else self._closed


class LoadEstimator:
    """Raw bytes per second offered to a queue: arrivals weighted by exp(-age / window).

    Before anything was offered the rate is zero, and it grows from there: a first transfer is not a flood. The standard
    deviation is that of shot noise: the arrivals' own count and sizes.

    Args:
        window_s: after so long an arrival weighs 1/e.
    """

    def __init__(self, window_s: float = 10.0) -> None:
        if not math.isfinite(window_s) or window_s <= 0:
            raise FieldError("load.window_s", f"{window_s} is not a positive time", code="estimate.window")
        self._window_s = window_s
        self._sum = 0.0
        self._sum_of_squares = 0.0
        self._at_s = -math.inf
        self._count = 0

    def offered(self, now_s: float, raw_bytes: float) -> None:
        """A transfer arrived at the queue.

        Raises:
            FieldError: a value is not finite, or bytes are negative.
        """
        if not math.isfinite(now_s) or not math.isfinite(raw_bytes) or raw_bytes < 0:
            raise FieldError("offered", f"{raw_bytes} bytes at {now_s} s", code="estimate.offered")
        faded = self._faded(now_s)
        self._sum = self._sum * faded + raw_bytes
        self._sum_of_squares = self._sum_of_squares * faded * faded + raw_bytes * raw_bytes
        self._at_s = max(self._at_s, now_s)
        self._count += 1

    def estimate(self, now_s: float) -> Estimate:
        """The offered rate as known at `now_s`."""
        if self._count == 0:
            return Estimate(0.0, 0.0, math.inf, 0)
        faded = self._faded(now_s)
        mean = self._sum * faded / self._window_s
        sd = math.sqrt(self._sum_of_squares) * faded / self._window_s
        return Estimate(mean, sd, max(0.0, now_s - self._at_s), self._count)

    def _faded(self, now_s: float) -> float:
        return math.exp(-max(0.0, now_s - self._at_s) / self._window_s)
