"""What differs between two plans: which arm takes whose place where, in ranges of size, bandwidth and load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controld.contract.effect import Effect
from controld.controller.explain import CellExplanation, explain_cell, find_cell
from controld.controller.finite import finite
from controld.controller.plan import TablePlan

MOST_RANGES = 12
"""Ranges of one class that are explained; what lies beside them is counted."""

Mask = NDArray[np.bool_]
Box = tuple[slice, slice, slice]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSide:
    """An arm on one side of a change, in the range's middle cell.

    Args:
        total_s: predicted seconds, waiting included; infinite where the arm cannot carry the load.
        text: what the decision says of it there.
    """

    arm_id: str
    label: str
    loss_mean_nats: float
    loss_upper_nats: float
    total_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeChange:
    """Neighbouring cells in which one arm takes another one's place.

    Args:
        size_bytes, bandwidth_bytes_per_s, load: (low, high); 0 and infinity at the rims.
        transfers: of the recent transfers, those that lie here.
        why: what the decision after the change says of the arm before it.
    """

    size_bytes: tuple[float, float]
    bandwidth_bytes_per_s: tuple[float, float]
    load: tuple[float, float]
    cells: int
    transfers: int
    before: ArmSide
    after: ArmSide
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassChange:
    """One class in one table.

    Args:
        before_class: whose decisions its requests followed before the change; another one's where the class is new.
        cells, changed: how many cells a class has, and in how many the arm is another one.
        transfers, transfers_changed: recent transfers of the class, and those of them that lie in changed cells.
        moves: changed cells by (arm before, arm after), most first.
        ranges: the largest ranges, largest first.
        cells_beside: changed cells outside `ranges`.
    """

    service_class: str
    before_class: str
    tier: str
    link_group: str
    cells: int
    changed: int
    transfers: int
    transfers_changed: int
    moves: tuple[tuple[str, str, int], ...]
    ranges: tuple[RangeChange, ...]
    cells_beside: int

    def to_document(self) -> dict[str, Any]:
        """JSON-ready: infinities are null."""
        document: dict[str, Any] = finite(asdict(self))
        return document


def compare_class(
    before: TablePlan, before_class: str, after: TablePlan, service_class: str, *, recent: Sequence[Effect] = ()
) -> ClassChange:
    """How one class's choices differ; both tables have the same grid and hold the class they are asked for.

    Args:
        recent: sender halves of transfers that were drawn from `before`'s cells; only those of `before_class` count,
            and only where the class keeps its name: of a new class nobody knows which requests will be its own.
    """
    shape, cells = before.grid.shape, int(np.prod(before.grid.shape))
    starts = [_first_cell(table, name) for table, name in ((before, before_class), (after, service_class))]
    old, new = (
        np.array([arm.arm_id for arm in table.arms])[table.winners[start : start + cells]].reshape(shape)
        for table, start in zip((before, after), starts, strict=True)
    )
    traffic = _traffic(before, before_class, recent if before_class == service_class else (), starts[0], cells)
    pairs = [(str(a), str(b)) for a, b in sorted(set(zip(old.flat, new.flat, strict=True))) if a != b]
    masks = {pair: (old == pair[0]) & (new == pair[1]) for pair in pairs}
    boxes = sorted(
        ((box, pair) for pair, mask in masks.items() for box in cover(mask)),
        key=lambda item: -_volume(item[0]),
    )
    ranges = tuple(_range(before, starts[0], after, starts[1], box, pair, traffic) for box, pair in boxes[:MOST_RANGES])
    changed = old != new
    moves = sorted(((a, b, int(mask.sum())) for (a, b), mask in masks.items()), key=lambda move: -move[2])
    return ClassChange(
        service_class=service_class,
        before_class=before_class,
        tier=after.tier,
        link_group=after.link_group,
        cells=cells,
        changed=int(changed.sum()),
        transfers=int(traffic.sum()),
        transfers_changed=int(traffic[changed].sum()),
        moves=tuple(moves),
        ranges=ranges,
        cells_beside=int(changed.sum()) - sum(item.cells for item in ranges),
    )


def cover(mask: Mask) -> list[Box]:
    """Disjoint boxes that together are the mask, shape [S, B, L]; few and large rather than the fewest.

    Each box grows from the first cell that is left, along the axes in whichever order makes it largest.
    """
    left, boxes = mask.copy(), []
    while left.any():
        corner = np.unravel_index(int(np.argmax(left)), left.shape)
        grown = [_grown(left, corner, order) for order in permutations(range(3))]
        box = max(grown, key=_volume)
        left[box] = False
        boxes.append(box)
    return boxes


def _grown(mask: Mask, corner: tuple[np.intp, ...], order: tuple[int, ...]) -> Box:
    low, high = [int(i) for i in corner], [int(i) + 1 for i in corner]
    for axis in order:
        while high[axis] < mask.shape[axis]:
            face = [slice(a, b) for a, b in zip(low, high, strict=True)]
            face[axis] = slice(high[axis], high[axis] + 1)
            if not mask[tuple(face)].all():
                break
            high[axis] += 1
    size, bandwidth, load = (slice(a, b) for a, b in zip(low, high, strict=True))
    return size, bandwidth, load


def _volume(box: Box) -> int:
    return int(np.prod([axis.stop - axis.start for axis in box]))


def _first_cell(table: TablePlan, service_class: str) -> int:
    names = [item.goal.name for item in table.classes]
    return names.index(service_class) * int(np.prod(table.grid.shape))


def _traffic(
    table: TablePlan, service_class: str, recent: Sequence[Effect], start: int, cells: int
) -> NDArray[np.intp]:
    """Recent transfers of a class by cell, shape [S, B, L]."""
    found = [
        find_cell(table, e.service_class, e.expected_bytes or e.raw_bytes, e.bandwidth_bytes_per_s, e.load) - start
        for e in recent
        if (e.tier, e.link_group, e.service_class) == (table.tier, table.link_group, service_class)
        and e.bandwidth_bytes_per_s > 0
    ]
    return np.bincount(np.array(found, dtype=np.intp), minlength=cells).reshape(table.grid.shape)


def _range(
    before: TablePlan,
    before_start: int,
    after: TablePlan,
    after_start: int,
    box: Box,
    pair: tuple[str, str],
    traffic: NDArray[np.intp],
) -> RangeChange:
    grid = before.grid
    middle = int(np.ravel_multi_index([(axis.start + axis.stop) // 2 for axis in box], grid.shape))
    old, new = explain_cell(before, before_start + middle), explain_cell(after, after_start + middle)
    lows = grid.bin_edges(box[0].start, box[1].start, box[2].start)
    highs = grid.bin_edges(box[0].stop - 1, box[1].stop - 1, box[2].stop - 1)
    size, bandwidth, load = ((low[0], high[1]) for low, high in zip(lows, highs, strict=True))
    loser = new.arm(pair[0])
    return RangeChange(
        size_bytes=size,
        bandwidth_bytes_per_s=bandwidth,
        load=load,
        cells=_volume(box),
        transfers=int(traffic[box].sum()),
        before=_side(old, pair[0]),
        after=_side(new, pair[1]),
        why=loser.text if loser is not None else "not a candidate any more",
    )


def _side(cell: CellExplanation, arm_id: str) -> ArmSide:
    arm = cell.arm(arm_id)
    assert arm is not None  # a winner is one of its cell's arms
    return ArmSide(
        arm_id=arm.arm_id,
        label=arm.label,
        loss_mean_nats=arm.loss_mean_nats,
        loss_upper_nats=arm.loss_upper_nats,
        total_s=arm.total_s,
        text=arm.text,
    )
