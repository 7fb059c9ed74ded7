"""What changes while a simulation runs: the link's rate, and how an arm differs from its profile."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from controld.contract.errors import FieldError
from controld.contract.quantity import parse_duration_s, parse_rate_bytes_per_s

_STALLED = 1e-3
_HINT = 'write 100Mbit; steps by time: "0s=2Gbit,60s=100Mbit"; a ramp: "60s~100Mbit"; by transfers: "0=2Gbit,50=1Gbit"'


@dataclass(frozen=True, slots=True)
class RatePoint:
    """From here on the link has this rate.

    Args:
        at: seconds, or transfers begun.
        ramp: whether the rate moves in a straight line from the point before to this one; by time only.
    """

    at: float
    bytes_per_s: float
    ramp: bool = False


@dataclass(frozen=True)
class RateSchedule:
    """The link's rate as a function of time, or of the number of transfers that have begun.

    Args:
        points: rising; the first is at 0.
        by_transfers: whether points count transfers and not seconds.

    Raises:
        FieldError: no points, not rising, a rate that is not positive, or a ramp by transfers.
    """

    points: tuple[RatePoint, ...]
    by_transfers: bool = False
    _times: tuple[float, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.points or self.points[0].at != 0 or self.points[0].ramp:
            raise FieldError("link", "a schedule begins at 0 with a step")
        for before, after in zip(self.points, self.points[1:], strict=False):
            if not before.at < after.at < math.inf:
                raise FieldError("link", f"the point at {after.at:g} does not come after the one at {before.at:g}")
        for point in self.points:
            if not (math.isfinite(point.bytes_per_s) and point.bytes_per_s > 0):
                raise FieldError("link", f"{point.bytes_per_s:g} bytes per second is not a positive finite rate")
            if point.ramp and self.by_transfers:
                raise FieldError("link", "a ramp runs over time, not over transfers")
        object.__setattr__(self, "_times", tuple(point.at for point in self.points))

    @classmethod
    def constant(cls, bytes_per_s: float) -> RateSchedule:
        """One rate for ever."""
        return cls((RatePoint(0.0, bytes_per_s),))

    @classmethod
    def steps(cls, *points: tuple[float, float], by_transfers: bool = False) -> RateSchedule:
        """Steps from (seconds or transfers, bytes per second)."""
        return cls(tuple(RatePoint(at, rate) for at, rate in points), by_transfers)

    @classmethod
    def parse(cls, text: str, *, field: str = "link") -> RateSchedule:
        """A rate, or points joined by commas: `0s=2Gbit,60s=100Mbit`, `60s~1Gbit` for a ramp, `50=1Gbit` by transfers.

        Raises:
            FieldError: anything else.
        """
        if "=" not in text and "~" not in text:
            return cls.constant(_rate(text, field))
        points: list[RatePoint] = []
        kinds: set[bool] = set()
        for index, part in enumerate(text.split(",")):
            path = f"{field}[{index}]"
            mark = next((mark for mark in "=~" if mark in part), None)
            if mark is None:
                raise FieldError(path, f"{part.strip()!r} is not a moment and a rate", hint=_HINT)
            at, rate = (side.strip() for side in part.split(mark, 1))
            is_count = at.isascii() and at.isdigit()
            counts = is_count and at != "0"
            kinds |= {counts} if at != "0" else set()
            moment = float(at) if is_count else parse_duration_s(at, field=path)
            points.append(RatePoint(moment, _rate(rate, path), mark == "~"))
        if len(kinds) > 1:
            raise FieldError(field, "some points are moments and some count transfers", hint=_HINT)
        # "0=2Gbit" alone is the same either way.
        return cls(tuple(points), by_transfers=kinds == {True})

    def rate(self, now_s: float, transfers: int) -> float:
        """Bytes per second at a moment."""
        if len(self.points) == 1:
            return self.points[0].bytes_per_s
        index = max(0, bisect_right(self._times, transfers if self.by_transfers else now_s) - 1)
        point = self.points[index]
        if index + 1 < len(self.points) and self.points[index + 1].ramp:
            after = self.points[index + 1]
            return point.bytes_per_s + (after.bytes_per_s - point.bytes_per_s) * (now_s - point.at) / (
                after.at - point.at
            )
        return point.bytes_per_s

    def best_bytes_per_s(self, transfers: int) -> float:
        """No transfer that begins after so many others meets a better rate."""
        if self.by_transfers:
            return self.rate(0.0, transfers)
        return max(point.bytes_per_s for point in self.points)

    def finish_s(self, start_s: float, size_bytes: float, transfers: int) -> float:
        """When `size_bytes` are through, if they start at `start_s` and have the link to themselves."""
        if self.by_transfers:
            return start_s + size_bytes / self.rate(start_s, transfers)
        if start_s >= self._times[-1]:
            return start_s + size_bytes / self.points[-1].bytes_per_s
        now_s, left = start_s, size_bytes
        index = max(0, bisect_right(self._times, now_s) - 1)
        while index + 1 < len(self.points):
            until_s, ramps = self._times[index + 1], self.points[index + 1].ramp
            low = self.rate(now_s, transfers)
            high = self.points[index + 1].bytes_per_s if ramps else low
            carried = (low + high) / 2 * (until_s - now_s)
            if carried >= left:
                slope = (high - low) / (until_s - now_s)
                # The positive root of low t + slope t^2 / 2 = left, in the form that survives slope 0.
                return now_s + 2 * left / (low + math.sqrt(max(0.0, low * low + 2 * slope * left)))
            left -= carried
            now_s, index = until_s, index + 1
        return now_s + left / self.points[-1].bytes_per_s


def _rate(text: str, path: str) -> float:
    rate = parse_rate_bytes_per_s(text.strip(), field=path)
    if rate < _STALLED:
        raise FieldError(path, f'"{text.strip()}" is no rate at which anything ends')
    return rate


class Trait(StrEnum):
    """What of an arm can differ from its profile."""

    ENCODE = "encode"
    DECODE = "decode"
    BYTES = "bytes"
    LOSS = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """From a moment on, an arm is not what its profile says.

    Args:
        factor: multiplies the profile's value; of several drifts that hold, the product.
        arm_id: which arm; None: every coded one.
        traits: what it changes.
        from_transfer, until_transfer: by number of transfers begun; `until` excluded.
        from_s, until_s: and by time.
    """

    factor: float
    arm_id: str | None = None
    traits: tuple[Trait, ...] = (Trait.ENCODE, Trait.DECODE)
    from_transfer: int = 0
    until_transfer: float = math.inf
    from_s: float = 0.0
    until_s: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise FieldError("drift.factor", f"{self.factor} is not a positive finite number")

    def holds(self, arm_id: str, now_s: float, transfers: int) -> bool:
        """Whether it concerns the arm now."""
        return (
            self.arm_id in (None, arm_id)
            and self.from_transfer <= transfers < self.until_transfer
            and self.from_s <= now_s < self.until_s
        )


def drift_factor(drifts: Sequence[Drift], trait: Trait, arm_id: str, now_s: float, transfers: int) -> float:
    """The product of the drifts that hold."""
    factor = 1.0
    for drift in drifts:
        if trait in drift.traits and drift.holds(arm_id, now_s, transfers):
            factor *= drift.factor
    return factor
