"""The plots of a replay: how long transfers took, and when, by decider; a page that stands alone, or a picture."""

from __future__ import annotations

import html
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from controld.cli.candidate_page import COLOURS
from controld.contract.errors import ControldError
from controld.contract.quantity import format_duration, format_size
from controld.sim.record import Run
from controld.sim.schedule import RateSchedule

_INCHES = (12.0, 9.0)
_WINDOWS = 60


def write_plot(runs: Sequence[Run], document: dict[str, Any], schedule: RateSchedule, path: Path) -> None:
    """Write a page or a picture, by the path's suffix.

    Raises:
        ControldError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        # A backend without a display, and without pyplot's global state.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ControldError(
            f"matplotlib is missing: {error}", code="cli.plot", hint='pip install "controld[plot]"'
        ) from error
    figure = Figure(figsize=_INCHES, layout="constrained")
    draw(figure, runs, schedule)
    try:
        if path.suffix == ".html":
            path.write_text(page(_svg(figure), document), encoding="utf-8")
        else:
            figure.savefig(path, dpi=130)
    except OSError as error:
        raise ControldError(f"{path}: cannot be written: {error.strerror}", code="cli.file") from error


def draw(figure: Any, runs: Sequence[Run], schedule: RateSchedule) -> None:
    """Three panels: the distribution of seconds, their medians over the arrivals, and the link and controld's arms."""
    top, middle, bottom = figure.subplots(3, 1, height_ratios=(1.2, 1.2, 0.8))
    count = len(runs[0].records)
    edges = np.linspace(0, count, min(_WINDOWS, count) + 1).astype(int)
    for index, run in enumerate(runs):
        look = _look(run.decider, COLOURS[index % len(COLOURS)])
        seconds = np.array([record.total_s for record in run.records])
        top.plot(np.sort(seconds), (np.arange(count) + 1) / count, label=run.decider, **look)
        medians = [np.median(seconds[a:b]) for a, b in itertools.pairwise(edges)]
        middle.plot((edges[:-1] + edges[1:]) / 2, medians, marker=".", markersize=3, **look)
    for axes in (top, middle, bottom):
        axes.grid(visible=True, which="both", alpha=0.2)
    top.set(xscale="log", xlabel="seconds from hand-over to the last acknowledgement", ylabel="share of transfers")
    figure.legend(*top.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle("Simulated, not measured: what would have happened", fontsize=11)
    middle.set(yscale="log", xlabel="transfer", ylabel="seconds, median")
    records = runs[0].records
    rates = [schedule.rate(record.started_s, record.index) * 8 / 1e6 for record in records]
    bottom.plot(range(count), rates, color="#5b6470", drawstyle="steps-post", label="link")
    bottom.set(yscale="log", xlabel="transfer", ylabel="link, Mbit/s")
    ours = next((run for run in runs if run.decider == "controld"), None)
    if ours is not None:
        arms = sorted({record.arm_id for record in ours.records})
        axes = bottom.twinx()
        axes.scatter(range(count), [arms.index(r.arm_id) for r in ours.records], s=4, color="#d1692e", alpha=0.5)
        axes.set_yticks(range(len(arms)), [arm[:8] for arm in arms], fontsize=7)
        axes.set_ylabel("controld's arm")


def _look(decider: str, colour: str) -> dict[str, Any]:
    """controld is a broad line, and the oracle a dashed one on top of it: they often lie on each other."""
    if decider == "controld":
        return {"color": colour, "linewidth": 3.2, "zorder": 3}
    if decider == "oracle":
        return {"color": "#222222", "linewidth": 1.3, "linestyle": (0, (4, 2)), "zorder": 4}
    return {"color": colour, "linewidth": 1.3, "zorder": 2}


def page(svg: str, document: dict[str, Any]) -> str:
    """One HTML file: no script, no network."""
    about = document["replay"]
    header = ("decider", "mean", "P50", "P90", "P99", "to oracle", "on the wire", "coded", "loss (nats)")
    rows = [
        (
            row["decider"],
            *(format_duration(row[f"{name}_s"]) for name in ("mean", "p50", "p90", "p99")),
            "-" if row["regret"] is None else f"{row['regret']:+.1%}",
            format_size(row["wire_bytes"]),
            f"{row['compressed_share']:.0%}",
            f"{row['mean_loss_nats']:.4f}",
        )
        for row in document["deciders"]
    ]
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    names = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    said = html.escape(
        f"{about['trace']}: {about['transfers']} transfers, {format_size(about['raw_bytes'])} of KV in "
        f"{format_duration(about['seconds'])}; policy {about['policy']}; link {about['link']}; "
        f"profiles: {about['profiles_from']}; noise {about['noise']}, seed {about['seed']}"
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>controld: a replay</title>
<style>
 body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
 table {{ border-collapse: collapse; margin: 1rem 0 }} td, th {{ border: 1px solid #ccc; padding: .3rem .6rem }}
 td + td {{ text-align: right }} svg {{ max-width: 100%; height: auto }}
</style></head><body>
<h1>What would have happened</h1>
<p>Simulated, not measured: {said}.</p>
<table><tr>{names}</tr>
{cells}</table>
{svg}
</body></html>
"""


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
