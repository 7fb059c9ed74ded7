"""RateQuant: how many bits each head should get, in closed form.

Source: RateQuant (arXiv 2605.06675), theorem 2. A quantiser's error falls by the factor `decay` with every bit, so that
head i of importance w_i adds w_i * decay ** -b_i. Under a mean of bits the least sum has
b_i = level + ln(w_i) / ln(decay): reverse water-filling. A larger decay spreads the bits less. Each quantiser has its
own decay, about 3.5 for TurboQuant and 5 for KIVI, and keys and values have budgets of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.int64]
Numbers = NDArray[np.float64]

FEWEST_BITS: Final = 2
"""Below, the error no longer falls geometrically, and a head of two levels loses more than all others win."""

MOST_BITS: Final = 8


def water_filling(
    importance: Numbers, mean_bits: float, decay: float, *, fewest: float = FEWEST_BITS, most: float = MOST_BITS
) -> Numbers:
    """Bits as real numbers.

    Args:
        importance: positive, any shape.
        mean_bits: what they shall average, within `fewest` .. `most`.
        decay: over 1.
        fewest: of one head.
        most: of one head.

    Returns:
        float of the shape of `importance`. Heads at a limit leave the others to share what remains.

    Raises:
        ValueError: an argument is out of range.
    """
    if not (decay > 1 and fewest <= mean_bits <= most):
        raise ValueError(f"mean of {mean_bits} bits in {fewest}..{most}, decay {decay}")
    if not importance.size or not (np.isfinite(importance).all() and (importance > 0).all()):
        raise ValueError("importance is positive and finite")
    wanted = np.log(importance) / math.log(decay)
    # The total is piecewise linear in the level; between two neighbouring corners it is a straight line.
    corners = np.unique(np.concatenate([fewest - wanted, most - wanted], axis=None))
    totals = np.array([np.clip(wanted + corner, fewest, most).mean() for corner in corners])
    level = np.interp(mean_bits, totals, corners)
    clipped: Numbers = np.clip(wanted + level, fewest, most)
    return clipped


def allocate_bits(
    importance: Numbers, mean_bits: float, decay: float, *, fewest: int = FEWEST_BITS, most: int = MOST_BITS
) -> Bits:
    """Whole bits: rounded, then one more or less where rounding was least right, until the budget is met.

    Rounding by one common threshold is what the exact optimum over whole bits does, so the weighted error is never
    above that of equal bits.

    Args:
        importance: positive, any shape.
        mean_bits: as in `water_filling`; the sum is `mean_bits` times the heads, rounded.
        decay: over 1.
        fewest: of one head.
        most: of one head.

    Returns:
        int64 of the shape of `importance`; equal importance is served in order of position.

    Raises:
        ValueError: an argument is out of range.
    """
    exact = water_filling(importance, mean_bits, decay, fewest=fewest, most=most).reshape(-1)
    bits = np.rint(exact).astype(np.int64)
    missing = math.floor(mean_bits * exact.size + 0.5) - int(bits.sum())
    change = 1 if missing > 0 else -1
    for _ in range(abs(missing)):
        lack = np.where((bits + change >= fewest) & (bits + change <= most), change * (exact - bits), -np.inf)
        bits[int(np.argmax(lack))] += change
    return bits.reshape(importance.shape)


def fit_decay(bits: Sequence[float], errors: Sequence[float]) -> tuple[float, float]:
    """Amplitude and decay of errors that were measured at several numbers of bits.

    Args:
        bits: at least two different numbers.
        errors: mean squared errors, positive, of the very quantiser that will be used.

    Returns:
        `(amplitude, decay)` of the least-squares line through ln(error).

    Raises:
        ValueError: the errors do not fall.
    """
    slope, intercept = np.polyfit(np.asarray(bits, np.float64), np.log(np.asarray(errors, np.float64)), 1)
    if not slope < 0:
        raise ValueError("errors that do not fall with more bits have no decay")
    return math.exp(intercept), math.exp(-slope)
