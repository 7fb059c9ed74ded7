"""Non-dominated sets and hypervolume, by numpy alone. All objectives are minimised."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

REFERENCE = (1.1, 1.1, 1.1)
LOSS_FLOOR_NATS = 1e-6


def non_dominated(objectives: ArrayLike) -> NDArray[np.bool_]:
    """Which points no other point dominates.

    A point dominates another when it is nowhere larger and somewhere smaller. Equal points do not dominate each other,
    so all copies stay. A point with a NaN dominates nothing and is never in the set.

    Args:
        objectives: shape [n, m].

    Returns:
        Mask of shape [n].
    """
    points = np.asarray(objectives, dtype=np.float64)
    if points.size == 0:
        return np.zeros(points.shape[0] if points.ndim else 0, dtype=np.bool_)
    valid = ~np.any(np.isnan(points), axis=1)
    keep = np.array(valid, dtype=np.bool_)
    for index in np.flatnonzero(valid):
        if not keep[index]:
            continue
        point = points[index]
        with np.errstate(invalid="ignore"):
            beaten = (points >= point).all(axis=1) & (points > point).any(axis=1)
        keep &= ~beaten
    return keep


def log_objectives(objectives: ArrayLike, *, loss_floor: float = LOSS_FLOOR_NATS) -> NDArray[np.float64]:
    """(loss, seconds per byte or frame, bytes ratio) to the axes of the hypervolume, shape [n, 3] to [n, 3].

    The axes are log10(loss + floor), the bytes ratio and log10 seconds, in this order.

    Args:
        loss_floor: a loss that far below nobody can tell from none.
    """
    points = np.asarray(objectives, dtype=np.float64).reshape(-1, 3)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.column_stack((np.log10(points[:, 0] + loss_floor), points[:, 2], np.log10(points[:, 1])))


def hypervolume(axes: ArrayLike, *, ideal: ArrayLike, nadir: ArrayLike) -> float:
    """Volume dominated by the points below the reference (1.1, 1.1, 1.1), after scaling to [0, 1].

    Args:
        axes: shape [n, 3], as `log_objectives` gives them; NaN rows count for nothing.
        ideal, nadir: shape [3], the known best and worst of each axis; they become 0 and 1. An axis on which both are
            equal is scaled to 0. Values better than the ideal count as the ideal.

    Returns:
        At most 1.1 cubed.
    """
    low, high = np.asarray(ideal, dtype=np.float64), np.asarray(nadir, dtype=np.float64)
    span = np.where(high > low, high - low, np.inf)
    points = np.asarray(axes, dtype=np.float64).reshape(-1, 3)
    scaled = np.maximum((points - low) / span, 0.0)
    reference = np.array(REFERENCE)
    scaled = scaled[~np.isnan(scaled).any(axis=1) & (scaled < reference).all(axis=1)]
    scaled = scaled[non_dominated(scaled)]
    if not len(scaled):
        return 0.0
    scaled = scaled[np.argsort(scaled[:, 2], kind="stable")]
    upper = np.append(scaled[1:, 2], reference[2])
    volume = 0.0
    for count, depth in enumerate(upper - scaled[:, 2], start=1):
        # Between two levels of the third axis the dominated slice is the area under the first `count` points.
        volume += depth * _area(scaled[:count, :2], reference[:2])
    return float(volume)


def _area(points: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    ordered = points[np.lexsort((points[:, 1], points[:, 0]))]
    best_before = np.minimum.accumulate(np.append(reference[1], ordered[:, 1]))
    height = np.maximum(best_before[:-1] - ordered[:, 1], 0.0)
    return float(np.sum((reference[0] - ordered[:, 0]) * height))
