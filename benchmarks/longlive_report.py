"""Tables and the plot of `longlive.py`. Measured and published figures never share a table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longlive_front import Point
from longlive_quality import LINEAR, SIGNIFICANT, STEPS, linear_name
from rich.console import Console
from rich.table import Column, Table

EMULATED = "emulated"


def show_decoding(found: Mapping[str, Any], title: str, console: Console) -> None:
    """Modes beside each other, then the ratios."""
    table = Table("decoding", "total s", "sum of DiT s", "sum of VAE s", "most chunks ahead", title=title)
    for mode, row in found["modes"].items():
        cells = (f"{row[name]:.2f}" for name in ("total_s", "dit_s", "vae_s"))
        table.add_row(mode, *cells, str(row["most_ahead"]))
    console.print(table)
    quiet = found["quiet_turns"]
    waited = f"threads waited for a core for {found['core_wait_share']:.0%} of the time (median)"
    machine = f"{quiet} of {found['turns']} turns were quiet and count" if quiet else f"no turn was quiet, {waited}"
    console.print(
        f"asynchronous over max(DiT, VAE) of its own run {found['async_over_limit']:.2f}, over that of the parts alone "
        f"{found['async_over_alone']:.2f}; over decoding in turn {found['async_over_stream']:.2f} (perfect overlap: "
        f"{found['best_over_stream']:.2f}); {machine}\n",
        highlight=False,
    )


def show_history(found: Mapping[str, Any], console: Console) -> None:
    """Bytes of a full window."""
    table = Table("history", "bytes of a full window", "bf16 over it", title="KV bytes as the engine holds them")
    for name, count in found["bytes"].items():
        table.add_row(name, f"{count:,}", f"{found['ratio'][name]:.2f}")
    console.print(table)


def show_windows(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Each precision with each window."""
    table = Table(
        "history", "latent frames", "bytes of a full window", "bf16 over it", "ms a chunk", "of it reading history", "",
        title="Windows: bytes, and one thread's processor time",
        caption="reading was measured by itself; an emulated time is the emulation's, no speed",
    )  # fmt: skip
    wide = {row["window"]: row["kv_bytes"] for row in rows if not row["is_emulated"]}
    for row in rows:
        share = row["reading_s"] / row["chunk_s"]
        table.add_row(
            row["name"], str(row["window"]), f"{row['kv_bytes']:,}", f"{wide[row['window']] / row['kv_bytes']:.2f}",
            f"{row['chunk_s'] * 1e3:.1f}", f"{row['reading_s'] * 1e3:.2f} ms, {share:.0%}",
            EMULATED if row["is_emulated"] else "",
        )  # fmt: skip
    console.print(table)


def show_quality(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Every setting by itself."""
    table = Table(
        "setting", "loss (0 perfect, 1 no shape)", "motion", title=f"{rows[0]['sessions']} sessions of held-out prompts"
    )
    for row in rows:
        table.add_row(row["name"], f"{row['loss']:.4f} +- {row['loss_error']:.4f}", f"{row['motion']:.2f}")
    console.print(table)


def show_comparisons(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Paired differences."""
    table = Table(
        "setting", "against", "loss more by", "in SE", "motion more by", "in SE",
        title=f"The same prompts, pair by pair; *: beyond {SIGNIFICANT:g} standard errors",
    )  # fmt: skip
    for row in rows:
        table.add_row(row["name"], row["against"], *_difference_cells(row["loss"]), *_difference_cells(row["motion"]))
    console.print(table)


def _difference_cells(row: Mapping[str, Any]) -> tuple[str, str]:
    sigmas = "-" if row["sigmas"] is None else f"{row['sigmas']:+.1f}"
    return (
        f"{row['mean']:+.4f} +- {row['error']:.4f}",
        f"[bold]{sigmas} *[/bold]" if row["is_significant"] else sigmas,
    )


def show_front(points: Sequence[Point], best: Sequence[Point], console: Console) -> None:
    """All settings, those on the front marked."""
    table = Table(
        "setting", "loss", "ms a chunk", "", "held MB", "front",
        title="Pareto front of loss, processor time and bytes", caption="an emulated time is the emulation's, no speed",
    )  # fmt: skip
    for point in sorted(points, key=lambda point: (point not in best, point.loss)):
        table.add_row(
            point.name, f"{point.loss:.4f}", f"{point.chunk_s * 1e3:.0f}", EMULATED if point.is_emulated else "",
            f"{point.held_bytes / 1e6:.2f}", "yes" if point in best else "",
        )  # fmt: skip
    console.print(table)


def show_ranks(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Equality and bytes."""
    table = Table(
        "ranks", "float64 latents", "float32: equal pixels", "differ by (mean, most)", "bytes sent by a rank, a chunk",
        "s a chunk",
        title="Sequence parallelism (two cores: no speed is claimed)",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            str(row["ranks"]), "equal bits" if row["float64_bits_equal"] else "DIFFERENT",
            f"{row['pixels_equal_share']:.2%}",
            f"{row['mean_pixel_difference']:.2f}, {row['largest_pixel_difference']} of 255",
            f"{row['sent_bytes_per_chunk']:,}", f"{row['chunk_s']:.2f}",
        )  # fmt: skip
    console.print(table)


def show_published(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Cases with what was chosen and why the others were not."""
    table = Table(
        Column("wanted", no_wrap=True), Column("setting", no_wrap=True), "verdict",
        title="PUBLISHED FIGURES (others', nothing measured here): what the controller chooses",
    )  # fmt: skip
    for row in rows:
        published = "as published" if row["is_expected"] else "NOT the published best"
        cells = [f"{row['device']}: {row['case']}", f"({published})"]
        for name, reasons in row["verdicts"].items():
            verdict = "; ".join(reasons if name == row["must_reject"] else map(_without_numbers, reasons))
            if name == row["chosen"]:
                verdict = f"[bold]chosen[/bold]: {row['reason']}"
            first = cells.pop(0) if cells else ""
            table.add_row(first, _shorter(name), verdict or "meets all targets")
        table.add_section()
    console.print(table)


def _shorter(name: str) -> str:
    return name.replace("asynchronous decoding", "async VAE")


def _without_numbers(reason: str) -> str:
    """What is in brackets is in the JSON."""
    return re.sub(r" \([^()]*\)", "", reason)


def plot(report: Mapping[str, Any], points: Sequence[Point], best: Sequence[Point], path: Path) -> None:
    """Quality by steps, the front, and how far denoising runs ahead of a slow decoder.

    Raises:
        SystemExit: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("the plot needs matplotlib: pip install 'controld[plot]'") from None
    matplotlib.use("svg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    by_steps, pareto, queue = figure.subplots(1, 3)
    _plot_steps(by_steps, report["quality"])
    _plot_front(pareto, points, best)
    if "decoding" in report:
        _plot_queue(queue, report)
    else:
        queue.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _plot_queue(axes: Any, report: Mapping[str, Any]) -> None:
    for name, label in (("decoding", "transformer slower"), ("slow_decoder", "decoder slower")):
        ahead = report[name]["ahead"]
        axes.plot(range(1, len(ahead) + 1), ahead, marker="o", linestyle=":", label=label)
    axes.set(xlabel="chunk", ylabel="chunks made and not delivered", title="Back-pressure of the bounded queue")
    axes.set_ylim(0, 4)
    axes.legend()


def _plot_steps(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    by_name = {row["name"]: row for row in rows}
    for place, name in enumerate(LINEAR):
        found = [(steps, by_name[linear_name(name, steps)]) for steps in STEPS if linear_name(name, steps) in by_name]
        if found:
            shift = 1 + 0.03 * place
            axes.errorbar(
                [steps * shift for steps, _ in found], [row["loss"] for _, row in found],
                yerr=[row["loss_error"] for _, row in found], label=name, marker="o", capsize=3,
            )  # fmt: skip
    axes.set(xlabel="denoising steps", ylabel="loss on held-out prompts, with standard error", xscale="log")
    axes.set_xticks(STEPS, [str(steps) for steps in STEPS])
    axes.minorticks_off()
    axes.set_title("Quality by steps (bars: over sessions, not of differences)")
    axes.legend()


def _plot_front(axes: Any, points: Sequence[Point], best: Sequence[Point]) -> None:
    for point in points:
        on_front = point in best
        axes.scatter(
            point.held_bytes / 1e6, point.loss, s=point.chunk_s * 1e3, marker="s" if point.is_emulated else "o",
            color="tab:blue" if on_front else "lightgrey", alpha=0.7,
        )  # fmt: skip
        if on_front:
            axes.annotate(point.name, (point.held_bytes / 1e6, point.loss), fontsize=6, ha="left", va="bottom")
    axes.set(xlabel="bytes held (MB)", ylabel="loss on held-out prompts")
    axes.set_title("Blue: front. Area: processor time (square: emulated)", fontsize=10)
