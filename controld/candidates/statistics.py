"""One-sided confidence bounds of a mean, and the normal distribution on arrays."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_T_95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753,
    1.746, 1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697,
)  # fmt: skip
Z_95 = 1.6448536269514722


def t_quantile_95(degrees_of_freedom: int) -> float:
    """The 95 % quantile of Student's t; infinite below one degree of freedom.

    Source: tabulated to 30 degrees, beyond them the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5).
    """
    if degrees_of_freedom < 1:
        return math.inf
    if degrees_of_freedom <= len(_T_95):
        return _T_95[degrees_of_freedom - 1]
    z, n = Z_95, degrees_of_freedom
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def upper_bound_95(mean: float, standard_error: float, samples: int) -> float:
    """One-sided 95 % upper confidence bound of a mean, by Student's t.

    Fewer than two samples bound nothing: the result is infinite. NaN in, infinity out (a gate must fail closed).
    """
    if samples < 2 or not math.isfinite(mean) or not math.isfinite(standard_error) or standard_error < 0:
        return math.inf
    return mean + t_quantile_95(samples - 1) * standard_error


def normal_cdf(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """P(Z <= x) elementwise, absolute error below 8e-8 (Abramowitz and Stegun 26.2.17); NaN stays NaN."""
    t = 1.0 / (1.0 + 0.2316419 * np.abs(x))
    tail = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = np.exp(-0.5 * x * x) * (tail / math.sqrt(2 * math.pi))
    return np.where(x >= 0, 1.0 - upper, upper)
