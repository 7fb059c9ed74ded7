"""Which arm is the fastest at which bandwidth, exactly: the lower envelope of the arms' times over x = 1 / bandwidth.

At rest a transfer's time is a straight line in x: the codec's seconds plus wire bytes times x. Where chunks overlap it
is the larger of two lines, one bound by the slowest codec stage and one by the wire. So an arm is the maximum of a few
lines, two arms can only change their order where two of these lines cross, and between neighbouring crossings one arm
wins throughout: no grid of bandwidths is needed, and no interval is missed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controld.contract.errors import FieldError
from controld.controller.knobs.base import Array

_ROUNDING = 1e-9
_SLOWEST_LINK_S_PER_BYTE = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Arms as maxima of lines `intercept + slope * x`, x in seconds per byte.

    Args:
        intercept_s: seconds at unlimited bandwidth, shape [arms, lines, sizes]; finite and not negative.
        slope_bytes: bytes that have to cross the link, same shape; finite and not negative.
    """

    intercept_s: Array
    slope_bytes: Array

    def __post_init__(self) -> None:
        if self.intercept_s.ndim != 3 or self.intercept_s.shape != self.slope_bytes.shape:
            raise FieldError(
                "lines", f"shapes {self.intercept_s.shape} and {self.slope_bytes.shape}, not twice [A, L, S]"
            )
        if not self.intercept_s.size:
            raise FieldError("lines", "no arm, or no size")
        for name in ("intercept_s", "slope_bytes"):
            values = getattr(self, name)
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise FieldError(f"lines.{name}", "must be finite and not negative")

    def seconds(self, x_s_per_byte: Array) -> Array:
        """Each arm's seconds; `x_s_per_byte` has shape [points, sizes], the result [arms, points, sizes]."""
        return np.asarray(
            (self.intercept_s[:, :, None] + self.slope_bytes[:, :, None] * x_s_per_byte[None, None]).max(axis=1)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Bandwidths, (low, high) in bytes per second with 0 and infinity at the rims, at which one arm is the fastest."""

    arm: int
    low_bytes_per_s: float
    high_bytes_per_s: float


def lower_envelope(lines: Lines) -> tuple[tuple[Interval, ...], ...]:
    """For each size the intervals of bandwidth with their fastest arms, from the fastest link to the slowest.

    The intervals of a size meet without gaps and cover every bandwidth. Of arms that are equal throughout the first
    wins.
    """
    kept = _undominated(lines)
    part = Lines(intercept_s=lines.intercept_s[kept], slope_bytes=lines.slope_bytes[kept])
    crossings = _crossings(part)
    # One point inside every interval between neighbouring crossings, and one beyond the last.
    inner = (crossings[:-1] + crossings[1:]) / 2
    beyond = np.where(crossings[-1:] > 0, crossings[-1:] * 2, 1.0)
    winners = kept[np.argmin(part.seconds(np.concatenate([inner, beyond])), axis=0)]
    return tuple(_merged(winners[:, size], crossings[:, size]) for size in range(winners.shape[1]))


def _undominated(lines: Lines) -> NDArray[np.intp]:
    """Arms that another one does not beat, or equal and precede, in all lines of all sizes."""
    intercept, slope = lines.intercept_s, lines.slope_bytes
    kept: list[int] = []
    order = np.argsort(intercept.sum(axis=(1, 2)), kind="stable")
    for arm in order.tolist():
        beaten = (
            (intercept[kept] <= intercept[arm]).all(axis=(1, 2)) & (slope[kept] <= slope[arm]).all(axis=(1, 2))
            if kept
            else np.zeros(0, dtype=np.bool_)
        )
        if not beaten.any():
            kept.append(arm)
    return np.array(sorted(kept), dtype=np.intp)


def _crossings(lines: Lines) -> Array:
    """x >= 0 at which lines of different arms cross, shape [crossings, sizes], sorted; zero is the first.

    A pair that does not cross stands as another zero, which makes an empty interval and changes nothing.
    """
    arms, count, sizes = lines.intercept_s.shape
    intercept = lines.intercept_s.reshape(arms * count, sizes)
    slope = lines.slope_bytes.reshape(arms * count, sizes)
    first, second = np.triu_indices(arms * count, k=1)
    different = first // count != second // count
    first, second = first[different], second[different]
    steeper = slope[first] - slope[second]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        x = (intercept[second] - intercept[first]) / steeper
    x = np.where((x > 0) & (x <= _SLOWEST_LINK_S_PER_BYTE), x, 0.0)
    return np.sort(np.concatenate([np.zeros((1, sizes)), x]), axis=0)


def _merged(winners: NDArray[np.intp], crossings: Array) -> tuple[Interval, ...]:
    intervals: list[Interval] = []
    ends = np.append(crossings[1:], math.inf)
    high = math.inf
    for arm, start, end in zip(winners.tolist(), crossings.tolist(), ends.tolist(), strict=True):
        # Crossings that are one but for rounding enclose nothing.
        if end <= start * (1 + _ROUNDING):
            continue
        low = 1 / end if end < math.inf else 0.0
        if intervals and intervals[-1].arm == arm:
            high = intervals.pop().high_bytes_per_s
        intervals.append(Interval(arm=arm, low_bytes_per_s=low, high_bytes_per_s=high))
        high = low
    return tuple(intervals)
