"""The plot of candidates: loss against ratio with error bars, and all three objectives in space."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import Any

from controld.contract.configuration_label import configuration_label
from controld.contract.errors import ControldError

_LOSS_FLOOR_NATS = 1e-6
_MAX_LABELS = 12


def write_plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the plot; the suffix decides the format.

    Args:
        rows: candidates as `GET /v1/candidates` gives them, of one or more workloads.

    Raises:
        ControldError: there is nothing to plot, or matplotlib is not installed.
    """
    if not rows:
        raise ControldError("there are no candidates to plot", code="cli.plot", hint="controld profile --grid")
    try:
        # A backend without a display, and without pyplot's global state.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ControldError(
            f"matplotlib is missing: {error}", code="cli.plot", hint="pip install 'controld[plot]'"
        ) from error
    figure = Figure(figsize=(13, 5.6), layout="constrained")
    _plot_loss_and_ratio(figure.add_subplot(1, 2, 1), rows)
    _plot_space(figure.add_subplot(1, 2, 2, projection="3d"), rows)
    workloads = sorted({row["workload"] for row in rows})
    figure.suptitle(f"candidates for {', '.join(workloads)}: filled and labelled = on the Pareto front")
    if path.suffix == ".html":
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=110)
        path.write_text(_page(rows, base64.b64encode(image.getvalue()).decode()))
    else:
        figure.savefig(path, dpi=130)


def _loss(row: dict[str, Any]) -> float:
    return max(float(row["loss_mean_nats"]), 0.0) + _LOSS_FLOOR_NATS


def _coder_colours(rows: list[dict[str, Any]]) -> dict[str, str]:
    coders = sorted({str(row["configuration"].get("code", "")) for row in rows})
    return {code: f"C{index % 10}" for index, code in enumerate(coders)}


def _plot_loss_and_ratio(axes: Any, rows: list[dict[str, Any]]) -> None:
    for code, colour in _coder_colours(rows).items():
        label: str | None = code
        for on_front in (True, False):
            chosen = [r for r in rows if r["configuration"].get("code", "") == code and bool(r["pareto"]) is on_front]
            if not chosen:
                continue
            axes.errorbar(
                [row["ratio"] for row in chosen],
                [_loss(row) for row in chosen],
                yerr=[row["loss_se_nats"] for row in chosen],
                fmt="o",
                color=colour,
                markerfacecolor=colour if on_front else "none",
                markersize=5,
                capsize=3,
                linewidth=1,
                label=label,
            )
            label = None
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        held = best.get(row["lossy_id"])
        if row["pareto"] and (held is None or row["ratio"] > held["ratio"]):
            best[row["lossy_id"]] = row
    for row in sorted(best.values(), key=lambda row: row["ratio"])[-_MAX_LABELS:]:
        axes.annotate(
            configuration_label({k: v for k, v in row["configuration"].items() if k != "code"}),
            (row["ratio"], _loss(row)),
            textcoords="offset points",
            xytext=(6, -9),
            fontsize=7,
        )
    axes.set_yscale("log")
    axes.margins(x=0.15)
    axes.set_xlabel("ratio (raw bytes / wire bytes)")
    axes.set_ylabel("loss (nats per token) at the worst prompt length, +- standard error")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(title="coder", loc="upper left")


def _plot_space(axes: Any, rows: list[dict[str, Any]]) -> None:
    import math

    colours = _coder_colours(rows)
    for row in rows:
        colour = colours[str(row["configuration"].get("code", ""))]
        axes.scatter(
            [math.log10(_loss(row))],
            [row["ratio"]],
            [row["latency_s_per_byte"] * 1e9],
            color=colour,
            marker="o" if row["pareto"] else "x",
            alpha=1.0 if row["pareto"] else 0.35,
        )
    axes.set_xlabel("log10 loss (nats)")
    axes.set_ylabel("ratio")
    axes.set_zlabel("encode + decode (ns per raw byte)")


def _page(rows: list[dict[str, Any]], image: str) -> str:
    head = ("configuration", "loss (nats)", "at most", "ratio", "ns per byte", "front", "where from")
    body = [
        (
            configuration_label(row["configuration"]),
            f"{row['loss_mean_nats']:.5f} ± {row['loss_se_nats']:.5f}",
            "?" if row["loss_upper_nats"] is None else f"{row['loss_upper_nats']:.5f}",
            f"{row['ratio']:.2f}",
            f"{row['latency_s_per_byte'] * 1e9:.2f}",
            "yes" if row["pareto"] else "",
            f"{row['provenance']}, {row['corpus']}",
        )
        for row in rows
    ]
    cells = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in body)
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in head)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>controld: candidates</title>
<style>
body {{ font: 14px sans-serif; margin: 2em }}
td, th {{ padding: 2px 10px; text-align: left; border-bottom: 1px solid #ddd }}
img {{ max-width: 100% }}
</style>
<h1>Candidates</h1>
<img alt="loss against ratio, and all objectives in space" src="data:image/png;base64,{image}">
<table><tr>{titles}</tr>
{cells}
</table>
</html>
"""
