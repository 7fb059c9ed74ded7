"""What is tried to learn: how a class's exploration share is parted among the arms that did not win a cell."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controld.candidates.statistics import normal_cdf
from controld.controller.knobs.base import STAGES, Array, Prediction, Stage
from controld.controller.never_worse import RAW_ROW

HOPELESS = 1.10
"""An arm whose lower bound is this factor above raw is not explored."""

EXPLORE_UNITS = 64
_LEAST_CHANCE = 0.01
_LEAST_Z = -2.4
"""Below it the chance is surely less."""


def log_variance(prediction: Prediction, variances: Array) -> Array:
    """Variance of the log of the service time, to first order: each stage weighs by its part of the time."""
    encode, wire, decode = prediction.encode_s, prediction.wire_s, prediction.decode_s
    total = encode + wire + decode
    by_stage = {stage: variances[:, index][:, None, None, None] for index, stage in enumerate(STAGES)}
    return np.asarray(
        (
            encode**2 * by_stage[Stage.ENCODE]
            + wire**2 * (by_stage[Stage.BYTES] + by_stage[Stage.WIRE])
            + decode**2 * by_stage[Stage.DECODE]
        )
        / np.maximum(total, 1e-12) ** 2
    )


def explore_units(
    rank: Array, lower: Array, variance: Array, winner: NDArray[np.intp], open_to: NDArray[np.bool_]
) -> NDArray[np.uint8]:
    """Parts of the exploration share, by each arm's chance to be faster than the winner.

    A transfer's draw from these weights is a Thompson draw by probability matching; computing the chances instead of
    sampling them keeps tables equal while evidence is equal. As long as any arm has a chance the whole share is spent,
    or a settled table would never notice that an arm became better. Parts are powers of two, so that small news do not
    make a new table.
    """
    best = np.take_along_axis(rank, winner[None], axis=0)
    best_variance = np.take_along_axis(np.broadcast_to(variance, rank.shape), winner[None], axis=0)
    # Most arms are out of the question in most cells: the costly functions are taken of the others only.
    widest = np.sqrt(variance.max(axis=(1, 2, 3)) + best_variance.max())[:, None, None, None]
    open_to = open_to & (lower <= HOPELESS * rank[RAW_ROW]) & (rank < np.exp(-_LEAST_Z * widest + 1e-6) * best)
    arm, cell = np.nonzero(open_to.reshape(len(rank), -1))
    other = arm != winner.reshape(-1)[cell]
    at, cell = (arm * winner.size + cell)[other], cell[other]
    best, best_variance = best.reshape(-1), best_variance.reshape(-1)
    spread = np.sqrt(np.maximum(variance.reshape(-1)[at // rank.shape[-1]] + best_variance[cell], 1e-12))
    z = np.log(best[cell] / rank.reshape(-1)[at]) / spread
    likely = z >= _LEAST_Z
    at, cell, chance = at[likely], cell[likely], normal_cdf(z[likely])
    chance[chance < _LEAST_CHANCE] = 0.0
    parts = EXPLORE_UNITS * chance / np.maximum(np.bincount(cell, chance, winner.size), _LEAST_CHANCE)[cell]
    units = np.zeros(rank.shape, dtype=np.uint8)
    units.reshape(-1)[at] = np.where(parts >= 1.0, np.exp2(np.floor(np.log2(np.maximum(parts, 1.0)))), 0.0)
    return units
