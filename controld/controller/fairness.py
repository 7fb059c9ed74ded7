"""Fairness between tenants on one link: slowdowns, what is fair to choose, and Jain's index.

A slowdown is a transfer's time over the time that it would take alone on an idle link. Weights act on what a tenant
loses, so that an idle link is fair whatever they are: the weighted slowdown is 1 + w (slowdown - 1), w being the
tenant's weight over the mean of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controld.controller.knobs.base import Array, Prediction

HARMLESS = 1.25
"""Up to this weighted slowdown nobody is thought to suffer, and no class has to give way."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A class as the others see it, in every cell.

    Args:
        service_s: of its current arm, shape [S, B, 1].
        idle_s: what it would take alone on an idle link, shape [S, B, 1]: with its fastest arm where it wants speed;
            where it chose to be slow for something else, with the very arm that it chose.
        weight: of its tenant, over the mean.
    """

    service_s: Array
    idle_s: Array
    weight: float

    def slowdown(self, wait_s: Array) -> Array:
        """Weighted, after such a wait."""
        return weighted_slowdown((self.service_s + wait_s) / self.idle_s, self.weight)


def relative_weights(weight_of_tenant: Mapping[str, float]) -> dict[str, float]:
    """Weights over their mean."""
    mean = sum(weight_of_tenant.values()) / max(1, len(weight_of_tenant))
    return {tenant: weight / mean for tenant, weight in weight_of_tenant.items()}


def weighted_slowdown(slowdown: Array, weight: float) -> Array:
    """See the module."""
    return np.asarray(1.0 + weight * (slowdown - 1.0))


def rival_of(
    prediction: Prediction, usable: NDArray[np.bool_], winner: NDArray[np.intp], weight: float, *, wants_speed: bool
) -> Rival:
    """A class with its current arms.

    Args:
        usable: arms that the class may use at all, shape [arms].
        winner: row of the arm in use, shape [S, B, L].
    """
    service = np.broadcast_to(prediction.service_s, prediction.total_s.shape)
    chosen = np.take_along_axis(service, winner[None], axis=0)[0]
    return Rival(service_s=chosen, idle_s=idle_seconds(prediction, usable) if wants_speed else chosen, weight=weight)


def idle_seconds(prediction: Prediction, usable: NDArray[np.bool_]) -> Array:
    """Of the fastest usable arm alone on an idle link, shape [S, B, 1]."""
    return np.asarray(prediction.service_s[usable].min(axis=0))


def largest_slowdown(
    prediction: Prediction, usable: NDArray[np.bool_], weight: float, rivals: Iterable[Rival], *, wants_speed: bool
) -> Array:
    """The largest weighted slowdown of any class, for each arm that one class may take; shape [arms, S, B, L].

    All classes wait in one queue, so what an arm adds to the wait, it adds to everybody's. Infinite where that arm
    leaves no stable queue. A class that does not want speed has only the others' to care for.
    """
    wait = prediction.wait_s
    largest = np.where(np.isfinite(wait), 1.0, np.inf)
    if wants_speed:
        largest = weighted_slowdown(prediction.total_s / idle_seconds(prediction, usable), weight)
    for rival in rivals:
        largest = np.maximum(largest, rival.slowdown(wait))
    return largest


def fair_arms(
    largest: Array, allowed: NDArray[np.bool_], incumbent: NDArray[np.intp], near: float
) -> NDArray[np.bool_]:
    """The arms whose largest slowdown is harmless or within a factor of the least; the arm in use within its square.

    All of them where nothing that is allowed leaves a stable queue: then the least work is chosen anyway.
    """
    least = np.where(allowed, largest, np.inf).min(axis=0)
    rows = np.arange(largest.shape[0])[:, None, None, None]
    in_use = rows == incumbent[None]
    fair = (largest <= np.maximum(near * least, HARMLESS)) | (in_use & (largest <= near * near * least))
    return np.asarray(fair | ~np.isfinite(least))


def jain_index(values: Sequence[float]) -> float:
    """Jain's fairness index of non-negative values: 1 where all are equal, 1/n where one has everything.

    Args:
        values: finite; none, or nothing but zeros, is fair.
    """
    top = max(values, default=0.0)
    if top <= 0:
        return 1.0
    scaled = [value / top for value in values]
    return sum(scaled) ** 2 / (len(scaled) * sum(value * value for value in scaled))
