"""Is an arm anywhere in a cell slower than raw? What holds at the corners of its size and bandwidth bins, decides.

Predicting every arm at four corners of every cell under every load is most of the work of deciding, and most of it is
needless. Where one server is the busiest in every cell, the wait only grows with the seconds that an arm takes of it.
So an arm that takes no more of it than raw, and is served no later, is not slower under any load; one that takes more
of both is slower under every load. That is seen from the arms at rest, at corners that neighbouring cells share. Arms
of which neither holds are predicted in full.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controld.controller.grid import Points
from controld.controller.knobs.base import Array, Knob, Prediction, StageModels, busiest_servers

RAW_ROW = 0
_UNSTABLE_S = 1e15

Mask = NDArray[np.bool_]


def ranked(prediction: Prediction) -> Array:
    """One number to rank by: seconds where stable; where not, above every stable arm and in the order of rho."""
    rank = np.array(prediction.total_s)
    np.multiply(prediction.rho, _UNSTABLE_S, out=rank, where=prediction.rho >= 1.0)
    return rank


def not_slower_at_corners(
    knob: Knob, models: StageModels, factors: Array, points: Points, *, share: float, other_work: Array | None
) -> Mask:
    """Arms that are at no corner of a cell slower than raw; shape [arms, S, B, L], or L = 1 where load does not matter.

    For the arguments see `Knob.predict`.
    """
    at_rest = knob.at_rest(models, factors, points.crossings)
    service = at_rest.service_s
    if other_work is None:
        busy = at_rest.server_s.max(axis=0)
    else:
        servers = busiest_servers(at_rest.server_s, other_work)
        if len(servers) > 1:
            return _predicted(knob, models, factors, points, share, other_work)
        busy = at_rest.server_s[servers[0]]
    not_slower = (service <= service[RAW_ROW]) & (busy <= busy[RAW_ROW])
    slower = (service > service[RAW_ROW]) & (busy > busy[RAW_ROW])
    found = _at_all_corners(not_slower)
    open_rows = np.flatnonzero(~(not_slower | slower).all(axis=(1, 2, 3)))
    if not len(open_rows):
        return found
    rows = np.append(RAW_ROW, open_rows[open_rows != RAW_ROW])
    full = _predicted(knob, models.rows(rows), factors[rows], points, share, other_work)
    found = np.broadcast_to(found, (len(models), *full.shape[1:])).copy()
    found[rows] = full
    return found


def _at_all_corners(mask: Mask) -> Mask:
    """From crossings [arms, S + 1, B + 1, 1] to cells [arms, S, B, 1]."""
    sizes = mask[:, :-1] & mask[:, 1:]
    return np.asarray(sizes[:, :, :-1] & sizes[:, :, 1:])


def _predicted(
    knob: Knob, models: StageModels, factors: Array, points: Points, share: float, other_work: Array | None
) -> Mask:
    """By predicting all of it. Raw is the first row."""
    found: Mask | None = None
    for context in points.corners:
        rank = ranked(knob.predict(models, factors, context, share=share, other_work=other_work))
        not_slower = rank <= rank[RAW_ROW]
        found = not_slower if found is None else found & not_slower
    assert found is not None
    return found
