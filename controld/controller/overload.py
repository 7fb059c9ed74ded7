"""When more is offered than the servers can do: how good each class's quality may be, so that all of it still fits.

The rule is the two-level one of DiLaServe (arXiv 2606.29094), for any knob with a quality: classes are gone through in
the policy's order, and each is capped at the best quality with which its own work, the work of the classes before it at
their caps, and the *least* work of those behind it fit into every server. What then decides among the arms that need no
more than the cap is the class's own objective. Where nothing fits, the cap is the least work.

If all classes fit at their least work, they fit at their caps: class by class, what is used and what is kept free for
the others add up to no more than there is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controld.controller.knobs.base import Array

SUPPLY = 1.0
"""What one server can do: at this offered work it never rests."""

_SAME = 1e-12

Mask = NDArray[np.bool_]
Rows = NDArray[np.intp]


def quality_caps(
    demands: Sequence[Array], losses: Sequence[Array], usable: Sequence[Mask], *, supply: float = SUPPLY
) -> list[Rows]:
    """The capping arm of each class in every cell.

    Args:
        demands: offered work of each class by server and arm, shapes [servers, arms, *cells].
        losses: quality loss of each class's arms, shapes [arms].
        usable: arms that the class may use, shapes [arms, *cells]; at least one in every cell.
        supply: a server's offered work must stay below it.

    Returns:
        For each class the row of its arm, shape [*cells]: of equal quality the one with less work.
    """
    least = [_least(demand, mask) for demand, mask in zip(demands, usable, strict=True)]
    least_work = [_work(demand, rows) for demand, rows in zip(demands, least, strict=True)]
    behind: list[Array] = [np.zeros_like(least_work[-1])]
    for work in reversed(least_work[1:]):
        behind.append(behind[-1] + work)
    used = np.zeros_like(least_work[0])
    caps = []
    for demand, loss, mask, fallback, kept_free in zip(demands, losses, usable, least, reversed(behind), strict=True):
        fits = mask & ((used + kept_free)[:, None] + demand < supply).all(axis=0)
        losses_here = np.where(fits, loss.reshape(-1, *(1,) * (mask.ndim - 1)), np.inf)
        best = fits & (losses_here <= losses_here.min(axis=0))
        rows = np.where(fits.any(axis=0), _least(demand, best | ~fits.any(axis=0)), fallback)
        caps.append(rows)
        used = used + _work(demand, rows)
    return caps


def within_caps(demand: Array, caps: Rows) -> Mask:
    """Arms that need no more of any server than the capping arm, itself included; shape [arms, *cells]."""
    return np.asarray((demand <= _work(demand, caps)[:, None] * (1 + _SAME)).all(axis=0))


def _least(demand: Array, mask: Mask) -> Rows:
    """The arm with the least work at its busiest server."""
    return np.asarray(np.argmin(np.where(mask, demand.max(axis=0), np.inf), axis=0))


def _work(demand: Array, rows: Rows) -> Array:
    """Work of the chosen arms, shape [servers, *cells]."""
    return np.take_along_axis(demand, rows[None, None], axis=1)[:, 0]
