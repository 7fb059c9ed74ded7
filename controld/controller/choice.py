"""The choice among the arms that pass: the least cost; within 3 % better quality, then the arm in use, then time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controld.controller.knobs.base import Array

NEAR = 1.03
"""Arms within this factor of the best are as good; quality decides, then what is in use."""

SETTLED = 1.015
"""While the arm in use is near the best, another one must be this near to replace it: no flapping at the rim."""

LOSS_SLACK_NATS = 1e-4
_FORBIDDEN = 1e300

Mask = NDArray[np.bool_]


def choose(
    cost: Array, allowed: Mask, losses: Array, rank: Array, incumbent: NDArray[np.intp]
) -> tuple[NDArray[np.intp], Mask]:
    """Winner [S, B, L], and who was near it: least cost; within 3 % better quality, then the arm in use, then time."""
    costs = _only(cost, allowed)
    best = costs.min(axis=0)
    near = costs <= NEAR * best
    in_use = _settle(near, costs <= SETTLED * best, incumbent)
    near_losses = _only(losses, near)
    equal = near & (near_losses <= near_losses.min(axis=0) * 1.1 + LOSS_SLACK_NATS)
    ranks = _only(rank, equal)
    winner = _first_least(ranks)
    if in_use is not None:
        # The arm in use stays while its time is near the least of them; there is one at most.
        kept = equal & in_use & (ranks <= NEAR * ranks.min(axis=0))
        winner = np.where(kept.any(axis=0), incumbent, winner)
    return winner, near


def _only(values: Array, mask: Mask) -> Array:
    """`np.where(mask, values, np.inf)` with another number for infinity, and several times as fast."""
    found = np.multiply(~mask, _FORBIDDEN)
    found += values
    return found


def _settle(near: Mask, nearer: Mask, incumbent: NDArray[np.intp]) -> Mask | None:
    """Narrow `near` where the arm in use is among them; which arm is in use where, None where none is."""
    if not (incumbent >= 0).any():
        return None
    in_use = np.arange(near.shape[0])[:, None, None, None] == incumbent[None]
    settled = (near & in_use).any(axis=0)
    near &= nearer | in_use | ~settled
    return np.asarray(in_use)


def _first_least(values: Array) -> NDArray[np.intp]:
    """`np.argmin` along the first axis, several times as fast as it where that axis is short."""
    least = values.min(axis=0)
    rows = np.zeros(values.shape[1:], dtype=np.intp)
    for row in range(len(values) - 1, 0, -1):
        rows[values[row] == least] = row
    rows[values[0] == least] = 0
    return rows
