"""Expected gain in hypervolume where only the loss is uncertain.

A trial measures the loss of a lossy part; what each of its coders carries and takes is known beforehand. So only one of
the three objectives is random, and the expectation needs no sampling. For a point with cost (b, t) and loss l, the gain
is the integral over x from l to the reference of A(x), the area that (b, t) dominates and no front point with a loss of
at most x does. Over a Gaussian loss that is the integral of A(x) P(l <= x).

All axes are minimised and scaled as in `controld.candidates.pareto`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controld.candidates.pareto import REFERENCE
from controld.candidates.statistics import normal_cdf

Array = NDArray[np.float64]

SLICES = 40
"""Steps of the integral over the loss."""

_BLOCK = 512
"""Points at once: their tables stay in the cache, and in memory that the allocator keeps."""


def expected_improvement(front: Array, costs: Array, mean: Array, deviation: Array, *, slices: int = SLICES) -> Array:
    """Expected gain of each point.

    Args:
        front: scaled (loss, bytes, seconds) of what was measured, `[f, 3]`; may hold dominated points.
        costs: scaled (bytes, seconds) of the points, `[n, 2]`.
        mean, deviation: of the points' scaled loss, `[n]`; the deviation is positive.
        slices: steps of the integral; few are enough to screen.

    Returns:
        `[n]`, never negative.
    """
    edges = np.linspace(0.0, REFERENCE[0], slices + 1)
    centres = (edges[1:] + edges[:-1]) / 2
    width = edges[1] - edges[0]
    gain = np.zeros(len(costs))
    ordered = front[np.argsort(front[:, 0], kind="stable")] if len(front) else front
    counts = np.searchsorted(ordered[:, 0], centres, side="right")
    area, last = None, -1
    for centre, count in zip(centres, counts, strict=True):
        if area is None or count != last:
            area, last = exclusive_area(ordered[:count, 1:], costs), int(count)
        gain += area * normal_cdf((centre - mean) / deviation)
    return np.asarray(gain * width)


def exclusive_area(front: Array, costs: Array) -> Array:
    """The area that each of `costs` `[n, 2]` dominates below the reference and no point of `front` `[f, 2]` does."""
    right, top = REFERENCE[1], REFERENCE[2]
    stairs = _staircase(front)
    # Between two steps the front's height is constant; before the first one it is the reference.
    starts = np.concatenate(([0.0], stairs[:, 0]))
    ends = np.concatenate((stairs[:, 0], [right]))
    heights = np.concatenate(([top], stairs[:, 1]))
    area = np.empty(len(costs))
    for first in range(0, len(costs), _BLOCK):
        block = slice(first, first + _BLOCK)
        x = np.clip(costs[block, 0], 0.0, right)[:, None]
        y = np.clip(costs[block, 1], 0.0, top)[:, None]
        widths = np.maximum(ends - np.maximum(starts, x), 0.0)
        area[block] = np.einsum("ij,ij->i", widths, np.maximum(heights - y, 0.0))
    return area


def _staircase(points: Array) -> Array:
    """Non-dominated points inside the reference by their first coordinate, `[s, 2]`."""
    clipped = np.maximum(points, 0.0)
    inside = clipped[(clipped[:, 0] < REFERENCE[1]) & (clipped[:, 1] < REFERENCE[2])]
    if not len(inside):
        return np.empty((0, 2))
    inside = inside[np.lexsort((inside[:, 1], inside[:, 0]))]
    lowest = np.minimum.accumulate(inside[:, 1])
    keep = np.concatenate(([True], inside[1:, 1] < lowest[:-1]))
    stairs: Array = inside[keep]
    return stairs
