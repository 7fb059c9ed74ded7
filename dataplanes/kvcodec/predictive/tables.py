"""Scale classes of quantised coefficients, and the coder table of each class.

A class stands for a mean magnitude of symbols; coefficients of any layer that share it share a table. Classes are
fixed by calibration, so that nothing about tables is sent, and depend on no decoded number, so that no rounding on one
side can throw the other out of step.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CLASSES: Final = 64
PROBABILITY_BITS: Final = 12
PROBABILITY_TOTAL: Final = 1 << PROBABILITY_BITS
TABLE_SYMBOLS: Final = 256
"""The most symbols of a table, its escape included."""

_PER_OCTAVE: Final = 4
_OFFSET: Final = 36
_FLOOR: Final = 0.002
_PRIOR_WEIGHT: Final = 2000.0
_RAREST: Final = 2.0**-12


def scale_class(mean_magnitude: Tensor) -> Tensor:
    """uint8: four classes an octave of the mean magnitude of a coefficient's symbols."""
    index = (_PER_OCTAVE * (mean_magnitude + _FLOOR).log2() + _OFFSET).round()
    return index.clamp(0, CLASSES - 1).to(torch.uint8)


def class_magnitude(index: int) -> float:
    """The mean magnitude that a class stands for."""
    return max(float(2.0 ** ((index - _OFFSET) / _PER_OCTAVE)) - _FLOOR, _FLOOR / 4)


def symbol_places(symbols: Tensor) -> Tensor:
    """0, 1, -1, 2, -2, ... -> 0, 1, 2, 3, 4, ..."""
    return torch.where(symbols > 0, 2 * symbols - 1, -2 * symbols)


def frequency_tables(counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Tables from what calibration counted, with a two-sided geometric prior where that is little.

    Args:
        counts: `[classes, 256]` by place; the last place collects everything beyond.

    Returns:
        `[classes, 256]`: each row sums to 2**12. A row's symbols are a prefix; its last one is the escape, and every
        symbol of the prefix has at least 1.
    """
    tables = np.zeros((CLASSES, TABLE_SYMBOLS), np.int32)
    for index in range(CLASSES):
        weights = counts[index].astype(np.float64) + _PRIOR_WEIGHT * _geometric(class_magnitude(index))
        shares = weights / weights.sum()
        tail = shares[::-1].cumsum()[::-1]
        # Both signs of every magnitude, and at least one magnitude.
        symbols = 3
        while symbols + 2 < TABLE_SYMBOLS and tail[symbols] > _RAREST:
            symbols += 2
        row = np.append(shares[:symbols], tail[symbols])
        tables[index, : symbols + 1] = _integers(row)
    return tables


def table_sizes(frequencies: NDArray[np.int32]) -> NDArray[np.int32]:
    """Symbols of each table, the escape included."""
    return np.asarray((frequencies > 0).sum(1), np.int32)


def _geometric(mean_magnitude: float) -> NDArray[np.float64]:
    """Shares by place of a symmetric distribution whose magnitude is geometric with this mean."""
    ratio = mean_magnitude / (1 + mean_magnitude)
    magnitudes = (np.arange(TABLE_SYMBOLS) + 1) // 2
    shares = (1 - ratio) * ratio**magnitudes
    shares[1:] /= 2
    return np.asarray(shares / shares.sum())


def _integers(shares: NDArray[np.float64]) -> NDArray[np.int32]:
    """At least 1 each, summing to 2**12; the commonest symbols take what rounding leaves."""
    row = np.maximum(np.rint(shares * PROBABILITY_TOTAL), 1).astype(np.int32)
    while (over := int(row.sum()) - PROBABILITY_TOTAL) > 0:
        row[row.argmax()] -= min(over, 1)
    row[row.argmax()] -= over
    return row
