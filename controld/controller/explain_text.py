"""Explanations as people read them in a terminal."""

from __future__ import annotations

import math

from controld.contract.decision import RAW, RECOMPUTE
from controld.contract.quantity import format_duration, format_rate, format_size
from controld.controller.energy import COEFFICIENTS, Coefficient
from controld.controller.explain import ArmExplanation, CellExplanation, TransferExplanation
from controld.controller.goals import Objective

_HEAD = ("arm", "loss", "encode", "wire", "decode", "wait", "total", "verdict")


def cell_text(cell: CellExplanation, *, table_version: int | None = None, drawn: str | None = None) -> str:
    """A table of all arms with one line of context above it and the corrections below it."""
    head = [
        f"class {cell.service_class}, tenant {cell.tenant}, tier {cell.tier}, link {cell.link_group},"
        f" objective {cell.objective.value}{_slo(cell)}",
        f"table {f'v{table_version}' if table_version else '(hypothetical)'}: {_bins(cell)}",
    ]
    rows: list[tuple[str, ...]] = [(_HEAD[0], f"{_HEAD[1]} (<= {cell.max_quality_loss_nats:g})", *_HEAD[2:])]
    by_energy = cell.objective is Objective.ENERGY
    rows += [_row(arm, drawn, show_joules=by_energy) for arm in cell.arms]
    energy = [f"energy        estimated: {', '.join(_coefficient(one) for one in COEFFICIENTS)}"] if by_energy else []
    return "\n".join([*head, *_columns(rows), *_corrections(cell, drawn or cell.winner), *energy])


def _coefficient(one: Coefficient) -> str:
    return f"{one.name} {one.value:g} {one.unit}"


def transfer_text(explanation: TransferExplanation) -> str:
    """The decision of one transfer and what then happened."""
    effect = explanation.effect
    lines = [f"transfer {effect.transfer_id}  {format_size(effect.raw_bytes)} raw, {effect.tokens} tokens"]
    if explanation.cell is None:
        reason = effect.reason or "no table was consulted"
        lines.append(f"class {effect.service_class}, tier {effect.tier}, link {effect.link_group}: raw, {reason}")
    else:
        lines.append(cell_text(explanation.cell, table_version=explanation.table_version, drawn=effect.arm_id))
        lines.append(
            f"drawn for     {format_size(effect.expected_bytes or effect.raw_bytes)} at"
            f" {format_rate(effect.bandwidth_bytes_per_s)}, load {effect.load:.2g}"
            f"{', exploring' if effect.explored else ''}"
        )
    if explanation.predicted is not None:
        p = explanation.predicted
        lines.append(f"expected      {_stages(p.encode_s, p.wire_s, p.decode_s, p.wait_s, p.total_s)}")
    observed = _stages(effect.encode_s, effect.wire_s, effect.decode_s, effect.wait_s, effect.wait_s + effect.total_s)
    ratio = f", {effect.raw_bytes / effect.wire_bytes:.2f}x fewer bytes" if effect.wire_bytes else ""
    lines.append(f"observed      {observed}  {effect.path.value}, {effect.verdict.value}{ratio}")
    if effect.reconstruction_error is not None:
        lines.append(
            f"self-check    reconstruction error {effect.reconstruction_error:.4g} in the frame that was looked at"
        )
    if effect.reason and explanation.cell is not None:
        lines.append(f"reason        {effect.reason}")
    return "\n".join(lines)


def _slo(cell: CellExplanation) -> str:
    return "" if cell.slo_s is None else f", SLO {format_duration(cell.slo_s)} at P{cell.slo_percentile:g}"


def _bins(cell: CellExplanation) -> str:
    low, high = cell.size_bytes
    size = f"{format_size(low)} - {format_size(high)}" if math.isfinite(high) else f"over {format_size(low)}"
    low, high = cell.bandwidth_bytes_per_s
    rate = f"{format_rate(low)} - {format_rate(high)}" if math.isfinite(high) else f"over {format_rate(low)}"
    low, high = cell.load
    load = f"{low:g} - {high:g}" if math.isfinite(high) else f"over {low:g}"
    return f"size {size}, bandwidth {rate}, load {load}"


def _row(arm: ArmExplanation, drawn: str | None, *, show_joules: bool) -> tuple[str, ...]:
    coded = arm.arm_id not in (RAW, RECOMPUTE)
    name = f"{arm.arm_id[:4]} {arm.label}" if coded else arm.arm_id
    loss = "0"
    if coded:
        bound = f"{arm.loss_upper_nats:.4f}" if math.isfinite(arm.loss_upper_nats) else "unknown"
        loss = f"{arm.loss_mean_nats:.4f} (ub {bound})"
    text = f"DRAWN, {arm.text}" if arm.arm_id == drawn else arm.text
    if show_joules:
        text = f"{text}; {arm.energy_j:.2g} J"
    return (
        name + (" *" if arm.foreign else ""),
        loss,
        format_duration(arm.encode_s),
        format_duration(arm.wire_s) if arm.arm_id != RECOMPUTE else "-",
        format_duration(arm.decode_s) if coded else "-",
        format_duration(arm.wait_s) if math.isfinite(arm.wait_s) else "-",
        format_duration(arm.total_s) if math.isfinite(arm.total_s) else "-",
        text,
    )


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]


def _corrections(cell: CellExplanation, arm_id: str) -> list[str]:
    arm = cell.arm(arm_id)
    lines = []
    if arm is not None:
        learned = [
            f"{c.stage} x{c.factor:.2f} ({c.observations:.0f} obs)" for c in arm.corrections if c.observations >= 0.5
        ]
        lines.append(f"corrections   {', '.join(learned) or 'none yet'}")
    if any(arm.foreign for arm in cell.arms):
        lines.append("* times were measured on other hardware")
    return lines


def _stages(encode_s: float, wire_s: float, decode_s: float, wait_s: float, total_s: float) -> str:
    return (
        f"encode {format_duration(encode_s)}, wire {format_duration(wire_s)}, decode {format_duration(decode_s)},"
        f" wait {format_duration(wait_s) if math.isfinite(wait_s) else 'without end'},"
        f" total {format_duration(total_s) if math.isfinite(total_s) else 'without end'}"
    )
