"""A policy edit's consequences as people read them in a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from controld.contract.quantity import format_duration, format_rate, format_size
from controld.controller.compare import ArmSide, ClassChange, RangeChange
from controld.planning.policy_diff import Fate, PolicyChange

_HEAD = ("size", "bandwidth", "load", "cells", "before", "after", "time", "loss", "why")


def changes_text(changes: Sequence[PolicyChange], generation: int) -> str:
    """Everything that would change; one line where nothing would."""
    lines = [line for change in changes if change.fate is not Fate.SAME for line in _policy(change)]
    return "\n".join(lines or [f"nothing would change: this is what generation {generation} says"])


def _policy(change: PolicyChange) -> Iterator[str]:
    yield f"policy {change.name} for {change.selector.kind}/{change.selector.deployment}: {change.fate.value}"
    yield from (f"  note: {note}" for note in change.notes)
    for setting in change.settings:
        before, after = (side if side is not None else "(none)" for side in (setting.before, setting.after))
        yield f"  {setting.path}: {before} -> {after}"
    for item in change.classes:
        when = "were" if item.fate is Fate.ADDED else "will be"
        yield f"  class {item.name} {item.fate.value}: its requests {when} those of {item.requests}"
    for decision in change.decisions:
        if decision.changed:
            yield from _decision(decision)
    same = [d for d in change.decisions if not d.changed]
    if same:
        yield f"no decision changes for {', '.join(f'{d.service_class} ({d.tier})' for d in same)}"


def _decision(change: ClassChange) -> Iterator[str]:
    was = "" if change.before_class == change.service_class else f" (its requests were {change.before_class}'s)"
    yield ""
    yield (
        f"class {change.service_class}{was}, tier {change.tier}, link {change.link_group}:"
        f" {change.changed} of {change.cells} cells change"
        + (f", with {change.transfers_changed} of its {change.transfers} newest transfers" if change.transfers else "")
    )
    rows = [_HEAD, *(_row(item) for item in change.ranges)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
    for row in rows:
        yield "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
    if change.cells_beside:
        yield f"  and {change.cells_beside} cells in smaller ranges; in all: " + ", ".join(
            f"{_short(a)} -> {_short(b)} {cells}" for a, b, cells in change.moves
        )


def _row(item: RangeChange) -> tuple[str, ...]:
    before, after = item.before, item.after
    factor = after.total_s / before.total_s if math.isfinite(before.total_s) and math.isfinite(after.total_s) else 0.0
    return (
        _interval(item.size_bytes, format_size),
        _interval(item.bandwidth_bytes_per_s, format_rate),
        _interval(item.load, lambda value: f"{value:g}"),
        str(item.cells),
        _name(before),
        _name(after),
        f"{_time(before)} -> {_time(after)}" + (f" (x{factor:.2f})" if factor else ""),
        f"{before.loss_mean_nats:.4f} -> {after.loss_mean_nats:.4f}",
        f"{_short(before.arm_id)}: {item.why}; {_short(after.arm_id)}: {after.text}",
    )


def _interval(ends: tuple[float, float], show: Callable[[float], str]) -> str:
    low, high = ends
    if low <= 0 and math.isinf(high):
        return "any"
    if math.isinf(high):
        return f"over {show(low)}"
    return f"under {show(high)}" if low <= 0 else f"{show(low)} - {show(high)}"


def _name(side: ArmSide) -> str:
    return side.arm_id if side.label == side.arm_id else f"{_short(side.arm_id)} {side.label}"


def _short(arm_id: str) -> str:
    return arm_id if len(arm_id) < 12 else arm_id[:4]


def _time(side: ArmSide) -> str:
    return format_duration(side.total_s) if math.isfinite(side.total_s) else "no end"
