"""What runs are compared by: regret, slowdown, fairness, percentiles."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from controld.contract.errors import FieldError
from controld.controller.fairness import jain_index
from controld.sim.alone import service_alone_s
from controld.sim.deciders.base import Menu
from controld.sim.record import Run, TransferRecord
from controld.sim.world import World

PERCENTILES = (50, 90, 99)


def regret(run: Run, best: Run, segment: tuple[int, int] | None = None) -> float:
    """Seconds that a run took more than another one for the same arrivals, as a fraction of the other's.

    Args:
        segment: only arrivals from the first to before the second number; None: all.

    Raises:
        FieldError: the runs are not of the same arrivals, or the segment is empty.
    """
    _require_same(run, best)
    chosen = slice(None) if segment is None else slice(*segment)
    mine, others = (_seconds(one.records[chosen]) for one in (run, best))
    if not len(mine):
        raise FieldError("segment", f"{segment} holds no transfer")
    return float(mine.sum() / others.sum() - 1)


def slowdowns(run: Run, world: World, menu: Menu) -> np.ndarray:
    """Seconds of each transfer over what it would take alone on a link that has rested, on its best arm; shape [n]."""
    known: dict[tuple[str, int, float, int], float] = {}
    result = np.empty(len(run.records))
    drifting = bool(world.drifts)
    for position, record in enumerate(run.records):
        rate = world.link.schedule.rate(record.started_s, record.index)
        key = (record.service_class, record.raw_bytes, rate, record.index if drifting else 0)
        if key not in known:
            known[key] = min(
                service_alone_s(world, arm, record.raw_bytes, now_s=record.started_s, begun=record.index)
                for arm in menu.of_class(record.service_class)
            )
        result[position] = record.total_s / known[key]
    return result


def jain(values: Sequence[float] | np.ndarray, weights: Sequence[float] | np.ndarray | None = None) -> float:
    """Jain's index, (sum x)^2 / (n sum x^2): 1 where all have the same, 1 / n where one has all.

    Args:
        weights: what each is entitled to; values are divided by them.

    Raises:
        FieldError: no values, or one that is not positive and finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if weights is not None:
        array = array / np.asarray(weights, dtype=np.float64)
    if not len(array) or not np.isfinite(array).all() or (array <= 0).any():
        raise FieldError("values", "Jain's index is of positive finite numbers, one at least")
    return jain_index(array.tolist())


def tenant_slowdowns(run: Run, slowdown: np.ndarray) -> dict[str, float]:
    """Mean slowdown of each tenant's transfers."""
    by_tenant: dict[str, list[float]] = defaultdict(list)
    for record, value in zip(run.records, slowdown, strict=True):
        by_tenant[record.tenant].append(float(value))
    return {tenant: float(np.mean(values)) for tenant, values in sorted(by_tenant.items())}


def summarise(run: Run) -> dict[str, Any]:
    """A run in figures, JSON-ready: seconds from hand-over to the last acknowledgement, bytes, arms, loss."""
    records = run.records
    total = _seconds(records)
    raw_bytes = sum(record.raw_bytes for record in records)
    wire_bytes = sum(record.wire_bytes for record in records)
    return {
        "decider": run.decider,
        "transfers": len(records),
        "mean_s": float(total.mean()),
        **{f"p{p}_s": float(np.percentile(total, p)) for p in PERCENTILES},
        "mean_wait_s": float(np.mean([record.wait_s for record in records])),
        "raw_bytes": raw_bytes,
        "wire_bytes": wire_bytes,
        "compressed_share": sum(record.arm_id != "raw" for record in records) / len(records),
        "explored": sum(record.explored for record in records),
        "mean_loss_nats": float(np.mean([record.loss_nats for record in records])),
        "arms": dict(Counter(record.arm_id for record in records).most_common()),
    }


def _seconds(records: Sequence[TransferRecord]) -> np.ndarray:
    return np.array([record.total_s for record in records])


def _require_same(one: Run, other: Run) -> None:
    pairs = zip(one.records, other.records, strict=False)
    if len(one.records) != len(other.records) or any(
        (a.index, a.raw_bytes, a.tenant) != (b.index, b.raw_bytes, b.tenant) for a, b in pairs
    ):
        raise FieldError("runs", f"{one.decider} and {other.decider} are not of the same arrivals")
