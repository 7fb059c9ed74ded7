"""The plots of KV candidates: a page with the front in space, and a picture for reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from controld.cli.candidate_page import (
    Axis,
    Cell,
    Column,
    Group,
    Mark,
    Point,
    Scene,
    colours_of,
    draw_families,
    new_figure,
    page_of,
    plain,
    short,
    write_files,
)
from controld.cli.candidate_table import alike
from controld.contract.configuration_label import configuration_label
from controld.contract.errors import ControldError

Row = dict[str, Any]

_LOSS_FLOOR_NATS = 1e-6
_PANEL_INCHES = (15.0, 7.0)
_AXES = (
    Axis(name="loss + 1e-6 (nats per token)"),
    Axis(name="encode + decode (ns per raw byte)"),
    Axis(name="wire bytes / raw bytes"),
)
_COLUMNS = (
    Column(name="configuration"), Column(name="loss (nats)", is_number=True), Column(name="at most", is_number=True),
    Column(name="wire / raw", is_number=True), Column(name="ratio", is_number=True),
    Column(name="ns per byte", is_number=True), Column(name="front"), Column(name="where from"),
)  # fmt: skip


def write_plots(rows: Sequence[Row], path: Path) -> list[Path]:
    """Write a page and a picture, or one of them, as `write_files` says.

    Args:
        rows: candidates as `GET /v1/candidates` gives them; those without a measured loss are left out.

    Raises:
        ControldError: there is nothing to plot, matplotlib is needed and not installed, or a file cannot be written.
    """
    plotted = [row for row in rows if row["loss_samples"]]
    if not plotted:
        raise ControldError(
            "there are no candidates with a measured loss to plot", code="cli.plot", hint="controld profile --grid"
        )
    return write_files(path, lambda: page(plotted), lambda target: _write_picture(plotted, target))


def page(rows: Sequence[Row]) -> str:
    """The page of candidates with a measured loss."""
    groups = tuple(Group(title=title, points=tuple(_point(row) for row in members)) for title, members in _groups(rows))
    intro = "Loss, codec time and bytes, each on a log axis; less is better on all three."
    return page_of(Scene(intro=intro, axes=_AXES, columns=_COLUMNS, groups=groups))


def _point(row: Row) -> Point:
    label, upper, ns_per_byte = configuration_label(row["configuration"]), row["loss_upper_nats"], _ns_per_byte(row)
    origin = f"{row['provenance']}, {row['corpus']}"
    mean, error, bytes_ratio, ratio = (
        row["loss_mean_nats"], row["loss_se_nats"], row["bytes_objective"], row["ratio"],
    )  # fmt: skip
    return Point(
        config_id=row["config_id"],
        label=label,
        family=_coder(row),
        front=bool(row["pareto"]),
        at=(_loss(row), ns_per_byte, bytes_ratio),
        cells=(
            Cell(text=label, key=label),
            Cell(text=f"{mean:.5f} ± {error:.5f}", key=mean),
            Cell(text="?" if upper is None else f"{upper:.5f}", key=upper),
            Cell(text=f"{bytes_ratio:.4f}", key=bytes_ratio),
            Cell(text=f"{ratio:.2f}", key=ratio),
            Cell(text=f"{ns_per_byte:.2f}", key=ns_per_byte),
            Cell(text="yes" if row["pareto"] else "", key=0 if row["pareto"] else 1),
            Cell(text=origin, key=origin),
        ),
        facts=(
            ("loss", f"{short(mean)} ± {short(error)} nats"),
            ("at most (95 %)", "?" if upper is None else f"{short(upper)} nats"),
            ("segments", str(row["loss_samples"])),
            ("wire / raw", f"{short(bytes_ratio)} ({ratio:.2f}x)"),
            ("encode + decode", f"{short(ns_per_byte)} ns per byte"),
            ("Pareto front", "yes" if row["pareto"] else "no"),
            ("id", row["config_id"]),
        ),
    )


def _write_picture(rows: Sequence[Row], path: Path) -> None:
    groups = _groups(rows)
    width, height = _PANEL_INCHES
    figure = new_figure(width, height * len(groups))
    colours = _coder_colours(rows)
    parts = figure.subfigures(len(groups), 1, squeeze=False)[:, 0]
    panels = []
    for part, (title, members) in zip(parts, groups, strict=True):
        part.suptitle(f"{plain(title)}\nfilled = on the Pareto front", fontsize=10)
        grid = part.add_gridspec(1, 2, width_ratios=(1, 1.1))
        panels.append((part.add_subplot(grid[0]), members))
        _plot_loss_and_bytes(*panels[-1], colours)
        _plot_space(part.add_subplot(grid[1], projection="3d"), members, colours)
    # Which labels have room is known once everything has its place.
    figure.draw_without_rendering()
    for axes, members in panels:
        label_steps(axes, _staircase(members))
    figure.savefig(path, dpi=130)


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that may be compared, with what they have in common."""
    names = ("workload", "model_fingerprint", "sender_hardware", "receiver_hardware")
    titled = []
    for members in alike(rows, names):
        workload, fingerprint, sender, receiver = (members[0][name] for name in names)
        places = sender if sender == receiver else f"{sender} → {receiver}"
        titled.append((f"workload {workload}, model {fingerprint[:12]}, {places or 'unknown hardware'}", members))
    return titled


def _loss(row: Row) -> float:
    return max(float(row["loss_mean_nats"]), 0.0) + _LOSS_FLOOR_NATS


def _ns_per_byte(row: Row) -> float:
    """On a log axis no time at all has no place: a femtosecond stands for it."""
    return max(float(row["latency_s_per_byte"]), 1e-15) * 1e9


def _coder(row: Row) -> str:
    return str(row["configuration"].get("code", "no coder"))


def _coder_colours(rows: Sequence[Row]) -> dict[str, str]:
    return colours_of(_coder(row) for row in rows)


def _plot_loss_and_bytes(axes: Any, rows: Sequence[Row], colours: dict[str, str]) -> None:
    marks: dict[str, tuple[str, list[Mark]]] = {code: (colour, []) for code, colour in colours.items()}
    for row in rows:
        x, y, error = row["bytes_objective"], _loss(row), row["loss_se_nats"]
        marks[_coder(row)][1].append(Mark(x=x, y=y, error=error, on_front=bool(row["pareto"])))
    draw_families(axes, marks)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(x=0.3)
    _plain_ticks(axes.xaxis)
    axes.set_xlabel("wire bytes / raw bytes")
    axes.set_ylabel("loss + 1e-6 (nats per token), ± standard error")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(title="coder", loc="best", fontsize=8)


def _staircase(rows: Sequence[Row]) -> list[Row]:
    """From the fewest bytes on, the rows that lose less than any with as few bytes: the outline towards the corner."""
    steps: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["bytes_objective"], _loss(row))):
        if not steps or _loss(row) < _loss(steps[-1]):
            steps.append(row)
    return steps


def label_steps(axes: Any, steps: Sequence[Row]) -> None:
    """Name the steps of the outline, the ends first; one whose name would lie on another's has none."""
    taken: list[Any] = []
    for row in (*steps[:1], *steps[:0:-1]):
        text = axes.annotate(
            plain(configuration_label({name: v for name, v in row["configuration"].items() if name != "code"})),
            (row["bytes_objective"], _loss(row)),
            textcoords="offset points",
            xytext=(-6, -4),
            fontsize=7,
            ha="right",
            va="top",
        )
        text.set_in_layout(False)
        box = text.get_window_extent().padded(1.5)
        if any(box.overlaps(other) for other in taken):
            text.remove()
        else:
            taken.append(box)


def _plot_space(axes: Any, rows: Sequence[Row], colours: dict[str, str]) -> None:
    """Matplotlib has no log axes in space: logarithms are drawn and the ticks named by their values."""
    points = [
        (math.log10(_loss(row)), math.log10(_ns_per_byte(row)), math.log10(row["bytes_objective"])) for row in rows
    ]
    floor = min(z for _, _, z in points)
    for row, (x, y, z) in zip(rows, points, strict=True):
        colour = colours[_coder(row)]
        if row["pareto"]:
            axes.plot([x, x], [y, y], [floor, z], color=colour, linewidth=0.7, alpha=0.45)
            axes.scatter([x], [y], [z], color=colour, s=26, edgecolors="white", linewidths=0.4, depthshade=False)
        else:
            axes.scatter([x], [y], [z], color=colour, marker="x", s=12, alpha=0.3)
    names = ("loss + 1e-6 (nats)", "encode + decode (ns per raw byte)", "wire bytes / raw bytes")
    for axis, name, index in zip("xyz", names, range(3), strict=True):
        values = [point[index] for point in points]
        ticks = log_ticks(10 ** min(values), 10 ** max(values))
        getattr(axes, f"set_{axis}ticks")([math.log10(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
        getattr(axes, f"set_{axis}label")(name, labelpad=8)
        getattr(axes, f"{axis}axis").set_tick_params(labelsize=8)
    axes.view_init(elev=22, azim=-128)
    axes.set_box_aspect(None, zoom=0.94)


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, both positive: powers of ten, or on a short axis also their 2 and 5 fold."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
        ticks = [factor * 10.0**decade for decade in decades for factor in factors]
        ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        if len(ticks) >= 3:
            return ticks
    return [low, high] if high > low else [low]


def _plain_ticks(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0, 7.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
