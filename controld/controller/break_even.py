"""Cells that raw's break-even runs through: the arm that pays in a part of such a cell, and where that part begins.

A cell is a range of sizes and of bandwidths, and an arm that is to win it must be no slower than raw at every corner.
Near the break-even that leaves much to raw that a codec would carry in half the time. But there the border itself is
known: raw's seconds on the wire, size / bandwidth, from which on an arm is quicker; and it hardly bends over the sizes
of one cell. So it goes into the table as a straight line over the size, laid so that it lies nowhere below the border,
and the transfers below it go raw.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controld.controller.grid import Points
from controld.controller.knobs.base import Array, Knob, StageModels

Mask = NDArray[np.bool_]

_SIZES = 9
"""Where in a bin of sizes the border is looked up, its ends included."""

_STEP_LOG = 0.02
"""Lines are laid a multiple of this apart, the next higher one: small news do not make a new table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Each arm's border in each bin of sizes; infinite where it is quicker than raw nowhere.

    Args:
        low_s, high_s: raw's seconds on the wire from which on the arm is quicker, at the bin's lower and upper end and
            on the straight line between them; shape [arms, S].
    """

    low_s: Array
    high_s: Array

    @classmethod
    def of(cls, knob: Knob, models: StageModels, factors: Array, points: Points, *, margin: float) -> BreakEven | None:
        """The borders of all arms, or None where the knob cannot tell.

        Args:
            factors: multipliers by arm and stage.
            margin: how many times quicker than raw an arm must be.
        """
        position = np.linspace(0.0, 1.0, _SIZES)
        ratio = points.size_high / points.size_low
        sizes = points.size_low[:, None] * ratio[:, None] ** position
        border = knob.break_even_raw_s(models, factors, sizes.reshape(-1), margin=margin)
        if border is None:
            return None
        border = border.reshape(len(models), *sizes.shape)
        pays = np.asarray(np.isfinite(border).all(axis=2))
        border = np.where(pays[:, :, None], border, 0.0)
        along = (sizes - sizes[:, :1]) / (sizes[:, -1:] - sizes[:, :1])
        line = border[:, :, :1] + along * (border[:, :, -1:] - border[:, :, :1])
        lift = (border - line).max(axis=2)
        low, high = (_next_higher(border[:, :, end] + lift) for end in (0, -1))
        return cls(low_s=np.where(pays, low, np.inf), high_s=np.where(pays, high, np.inf))

    def pays_somewhere(self, points: Points) -> Mask:
        """Whether an arm is quicker than raw at the largest size and the lowest bandwidth; shape [arms, S, B]."""
        return np.asarray(points.size_high[:, None] / points.bandwidth_low >= self.high_s[:, :, None])

    def lines(self, arm: NDArray[np.intp], points: Points) -> tuple[Array, Array]:
        """The line `a + b V` of the arm given for each bin of sizes: (seconds, seconds per byte); shape of `arm`.

        Args:
            arm: rows, shape [S, ...]; the line of an arm that pays nowhere is zero.
        """
        size = np.arange(len(points.size)).reshape(-1, *[1] * (arm.ndim - 1))
        low, high = (np.where(np.isfinite(end), end, 0.0)[arm, size] for end in (self.low_s, self.high_s))
        slope = (high - low) / (points.size_high - points.size_low)[size]
        return low - slope * points.size_low[size], np.asarray(slope)


def _next_higher(seconds: Array) -> Array:
    """The next higher one of the numbers that lie `_STEP_LOG` apart; zero stays zero."""
    logs = np.log(np.where(seconds > 0, seconds, 1.0))
    return np.where(seconds > 0, np.exp(np.ceil(logs / _STEP_LOG) * _STEP_LOG), 0.0)
