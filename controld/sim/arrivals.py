"""Traffic that is made up: Poisson arrivals of classes and tenants, with sizes, and shifts of the mix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controld.contract.decision import DEFAULT_CLASS
from controld.contract.errors import FieldError
from controld.sim.record import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficClass:
    """Transfers of one kind.

    Args:
        name: their service class.
        median_bytes, log_sd: log-normal sizes; 0: all of the median size.
        share: of the transfers, relative to the other classes' shares; a greedy tenant has a large one.
        peer: whose queue they wait in.
    """

    name: str = DEFAULT_CLASS
    tenant: str = "default"
    median_bytes: float = 14e6
    log_sd: float = 0.0
    share: float = 1.0
    peer: int = 0

    def __post_init__(self) -> None:
        for name, least in (("median_bytes", 1.0), ("log_sd", 0.0), ("share", 0.0)):
            value = getattr(self, name)
            if not math.isfinite(value) or value < least:
                raise FieldError(f"traffic.{self.name}.{name}", f"{value} is not a finite number of at least {least:g}")

    @property
    def mean_bytes(self) -> float:
        """Expected size."""
        return self.median_bytes * math.exp(self.log_sd**2 / 2)


@dataclass(frozen=True, slots=True)
class MixShift:
    """From some transfer on, classes have other shares.

    Args:
        at_transfer: the first one concerned.
        shares: one for each class, in their order.
        rate_factor: how much denser arrivals are than at the start.
    """

    at_transfer: int
    shares: tuple[float, ...]
    rate_factor: float = 1.0


def generate(
    classes: Sequence[TrafficClass],
    *,
    count: int,
    gap_s: float,
    seed: int,
    shifts: Sequence[MixShift] = (),
    is_poisson: bool = True,
) -> list[Arrival]:
    """So many arrivals; equal arguments give equal arrivals.

    Args:
        gap_s: mean seconds between two of them.
        shifts: rising; the first classes' shares hold before.
        is_poisson: gaps are exponential; else all are `gap_s`.

    Raises:
        FieldError: no class has a share, or a shift has another number of shares.
    """
    if any(len(shift.shares) != len(classes) for shift in shifts):
        raise FieldError("shifts", f"each has {len(classes)} shares, one for each class")
    random = np.random.default_rng(seed)
    gaps = random.exponential(gap_s, count) if is_poisson else np.full(count, gap_s)
    picks, scatter = random.random(count), random.standard_normal(count)
    arrivals: list[Arrival] = []
    now_s = 0.0
    for index in range(count):
        shift = next((shift for shift in reversed(shifts) if index >= shift.at_transfer), None)
        shares = [one.share for one in classes] if shift is None else list(shift.shares)
        now_s += gaps[index] / (shift.rate_factor if shift else 1.0)
        one = classes[_pick(shares, picks[index])]
        size = max(1, round(one.median_bytes * math.exp(one.log_sd * scatter[index])))
        arrivals.append(
            Arrival(at_s=float(now_s), raw_bytes=size, service_class=one.name, tenant=one.tenant, peer=one.peer)
        )
    return arrivals


def one_after_another(
    classes: Sequence[TrafficClass], *, count: int, pause_s: float, seed: int, shifts: Sequence[MixShift] = ()
) -> list[Arrival]:
    """Arrivals for `simulate(..., in_flight=1)`: each comes so long after the one before has ended."""
    made = generate(classes, count=count, gap_s=1.0, seed=seed, shifts=shifts)
    return [
        Arrival(at_s=pause_s, raw_bytes=a.raw_bytes, service_class=a.service_class, tenant=a.tenant, peer=a.peer)
        for a in made
    ]


def gap_for_load(classes: Sequence[TrafficClass], *, load: float, bandwidth_bytes_per_s: float) -> float:
    """The mean gap at which raw bytes offered per second are `load` times the bandwidth.

    Raises:
        FieldError: the load or the bandwidth is not positive.
    """
    if not load > 0 or not bandwidth_bytes_per_s > 0:
        raise FieldError("load", "load and bandwidth are positive")
    total = sum(one.share for one in classes)
    mean_bytes = sum(one.share * one.mean_bytes for one in classes) / total
    return mean_bytes / (load * bandwidth_bytes_per_s)


def _pick(shares: Sequence[float], pick: float) -> int:
    total = sum(shares)
    if not total > 0:
        raise FieldError("traffic", "no class has a share")
    at = pick * total
    for index, share in enumerate(shares):
        at -= share
        if at < 0:
            return index
    return max(index for index, share in enumerate(shares) if share > 0)
