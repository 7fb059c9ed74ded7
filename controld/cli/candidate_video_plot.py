"""The plots of video candidates: a page with loss, speed and memory in space, and a picture for reports."""

from __future__ import annotations

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
from controld.cli.candidate_table import alike, in_common, own_label
from controld.contract.configuration_label import setting_label
from controld.contract.errors import ControldError
from controld.contract.quantity import format_size

Row = dict[str, Any]

_PANEL_INCHES = (13.0, 5.5)
_AXES = (
    Axis(name="loss (beyond the reference setting)", is_log=False),
    Axis(name="ms per frame, one session"),
    Axis(name="memory of one session (MB)"),
)
_COLUMNS = (
    Column(name="setting"), Column(name="loss", is_number=True), Column(name="at most", is_number=True),
    Column(name="ms per frame", is_number=True), Column(name="FPS", is_number=True),
    Column(name="memory", is_number=True), Column(name="drift", is_number=True), Column(name="motion", is_number=True),
    Column(name="front"), Column(name="where from"),
)  # fmt: skip

_MEMORY = {
    "weights": "weights",
    "kv": "KV window",
    "activation": "activations",
    "session": "a further session, beside its KV",
}


def write_video_plots(rows: Sequence[Row], path: Path) -> list[Path]:
    """Write a page and a picture, or one of them, as `write_files` says.

    Args:
        rows: `video_candidates` as `GET /v1/candidates` gives them; those without a measured loss, or of unknown
            memory, have no place on the axes and are left out.

    Raises:
        ControldError: there is nothing to plot, matplotlib is needed and not installed, or a file cannot be written.
    """
    plotted = [row for row in rows if row["loss_mean"] is not None and row["memory_bytes"]]
    if not plotted:
        raise ControldError(
            "there are no video candidates with a measured loss and memory to plot", code="cli.plot",
            hint="controld candidates --kind video lists those that there are",
        )  # fmt: skip
    return write_files(path, lambda: video_page(plotted), lambda target: _write_picture(plotted, target))


def video_page(rows: Sequence[Row]) -> str:
    """The page of candidates whose loss and memory are known."""
    groups = tuple(_group(title, members) for title, members in _groups(rows))
    intro = (
        "Loss, seconds of a frame with decoding for one session alone (by the cost model) and its memory; less is"
        " better on all three."
    )
    return page_of(Scene(intro=intro, axes=_AXES, columns=_COLUMNS, groups=groups))


def _group(title: str, rows: Sequence[Row]) -> Group:
    common = in_common(rows)
    whole = f"{title}; all: {setting_label(common)}" if common else title
    return Group(title=whole, points=tuple(_point(row, own_label(row, common)) for row in rows))


def _point(row: Row, label: str) -> Point:
    upper, frame_s = row["loss_upper"], row["seconds_per_frame"]
    mean, error, memory, on_front = row["loss_mean"], row["loss_se"], row["memory_bytes"], bool(row["pareto"])
    drift, motion = row["drift"], row["motion"]
    return Point(
        config_id=row["config_id"],
        label=label,
        family=_precision(row),
        front=on_front,
        at=_place(row),
        cells=(
            Cell(text=label, key=label),
            Cell(text=f"{mean:.4f} ± {error:.4f}", key=mean),
            Cell(text="?" if upper is None else f"{upper:.4f}", key=upper),
            Cell(text=f"{frame_s * 1e3:.2f}", key=frame_s),
            Cell(text=short(1 / frame_s), key=1 / frame_s),
            Cell(text=format_size(memory), key=memory),
            Cell(text="?" if drift is None else short(drift), key=drift),
            Cell(text="?" if motion is None else short(motion), key=motion),
            Cell(text="yes" if on_front else "", key=0 if on_front else 1),
            Cell(text=row["provenance"], key=row["provenance"]),
        ),
        facts=(
            ("loss", f"{short(mean)} ± {short(error)}"),
            ("at most (95 %)", "?" if upper is None else short(upper)),
            ("segments", str(row["loss_samples"])),
            ("one session", f"{short(frame_s * 1e3)} ms per frame, {short(1 / frame_s)} FPS"),
            ("a pass", f"{short(row['forward_s'] * 1e3)} ms"),
            ("decoding a chunk", f"{short(row['vae_s'] * 1e3)} ms, {row['frames_per_chunk']} frames"),
            *((name, format_size(row["memory"][f"{part}_bytes"])) for part, name in _MEMORY.items()),
            ("Pareto front", "yes" if on_front else "no"),
            ("id", row["config_id"]),
        ),
    )


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that may be compared, with what they have in common."""
    titled = []
    for members in alike(rows, ("workload", "model_fingerprint", "hardware", "source")):
        row = members[0]
        place = f"{row['hardware'] or 'unknown hardware'}, {row['source']}"
        titled.append((f"workload {row['workload']}, model {row['model_fingerprint'][:12]}, {place}", members))
    return titled


def _precision(row: Row) -> str:
    """Of weights and activations: what colours tell apart."""
    values = row["configuration"]
    return "/".join(str(values[name]) for name in ("weights", "activations") if name in values) or "any precision"


def _place(row: Row) -> tuple[float, float, float]:
    return row["loss_mean"], row["seconds_per_frame"] * 1e3, row["memory_bytes"] / 1e6


def _write_picture(rows: Sequence[Row], path: Path) -> None:
    groups = _groups(rows)
    width, height = _PANEL_INCHES
    figure = new_figure(width, height * len(groups))
    colours = colours_of(map(_precision, rows))
    parts = figure.subfigures(len(groups), 1, squeeze=False)[:, 0]
    for part, (title, members) in zip(parts, groups, strict=True):
        part.suptitle(f"{plain(title)}\nfilled = on the Pareto front", fontsize=10)
        left, right = part.subplots(1, 2)
        _plot_loss(left, members, 1, colours)
        _plot_loss(right, members, 2, colours)
        left.legend(title="weights/activations", loc="best", fontsize=8)
    figure.savefig(path, dpi=130)


def _plot_loss(axes: Any, rows: Sequence[Row], index: int, colours: dict[str, str]) -> None:
    """Loss over one of the other two objectives."""
    marks: dict[str, tuple[str, list[Mark]]] = {family: (colour, []) for family, colour in colours.items()}
    for row in rows:
        x, y, error = _place(row)[index], row["loss_mean"], row["loss_se"]
        marks[_precision(row)][1].append(Mark(x=x, y=y, error=error, on_front=bool(row["pareto"])))
    draw_families(axes, marks)
    axes.set_xlabel(_AXES[index].name)
    axes.set_ylabel(f"{_AXES[0].name}, ± standard error")
    axes.margins(x=0.1)
    axes.grid(visible=True, alpha=0.2)
