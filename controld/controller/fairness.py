"""Sharing a link between tenants: their weights, and how fair an outcome is.

Codec choice is not weighted by tenant: nobody's quality limit is relaxed for another. The weights are for the order of
the queue, which the data plane keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from controld.contract.errors import FieldError


def normalised_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Shares that sum to one, in proportion to the weights.

    Raises:
        FieldError: no tenant, or a weight that is not finite and positive.
    """
    if not weights:
        raise FieldError("tenants", "is empty")
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight <= 0:
            raise FieldError(f"tenants.{name}.weight", f"{weight} is not a finite positive number")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def jain_index(values: Sequence[float]) -> float:
    """Jain's fairness index of non-negative values: 1 when all are equal, 1/n when one has all; NaN for none."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares > 0 else math.nan
