"""The reference video engine: asynchronous decoding, history in NVFP4, W4A4 by steps, the front, ranks; and the choice.

    python benchmarks/longlive.py [--quick] [--sessions N] [--parts decoding,...] [--out build/benchmarks/longlive.json]

Parts, each with a table: `decoding` (a clip in the three modes against max(DiT, VAE); and with a decoder that is
slower than the transformer, where the bounded queue holds denoising back), `history` (KV bytes; with two windows, and a
chunk's time), `quality` (losses on held-out prompts, compared session by session), `front` (of loss, processor time and
bytes), `ranks` (1, 2 and 4 processes), `published` (the controller on others' published figures of the real
LongLive-2.0: nothing that was measured is in its table).

All else is measured on this machine's CPU, one torch thread for the transformer and one for the decoder. Formats below
bf16 are emulated: their bytes and losses are theirs, their times are not. `--quick` takes fewer sessions and settings
and two ranks: its losses show that the benchmark runs, not which setting is better.

The last line gives the asynchronous clip's time over max(DiT, VAE) of the same run, and the history's bytes in bf16
over those in NVFP4. It exits with 1 where ranks do not give one rank's bits, or the choice is not the published best.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from longlive_decoding import measure_decoding
from longlive_front import front, measure_costs, points_of
from longlive_published import CASES, decide
from longlive_quality import (
    BF16,
    USUAL_STEPS,
    comparison_row,
    comparisons,
    linear_name,
    measure,
    measure_history_bytes,
    setting_row,
    settings,
)
from longlive_ranks import measure_ranks
from longlive_report import (
    plot,
    show_comparisons,
    show_decoding,
    show_front,
    show_history,
    show_published,
    show_quality,
    show_ranks,
    show_windows,
)
from longlive_windows import measure_windows
from rich.console import Console
from rich.progress import track

from dataplanes.longlive.profiler.identity import model_fingerprint
from dataplanes.longlive.reference.checkpoint import TRAINED_NAME

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("decoding", "history", "quality", "front", "ranks", "published")
QUICK_SESSIONS = 6
SESSIONS = 192
CLAIMS = (
    (linear_name(BF16, 2), linear_name(BF16, USUAL_STEPS)),
    (linear_name("W4A4", USUAL_STEPS), linear_name(BF16, USUAL_STEPS)),
    (linear_name("W4A4 4over6", USUAL_STEPS), linear_name(BF16, USUAL_STEPS)),
)
"""Differences that should be beyond chance: 2 against 4 steps, W4A4 (by either block rule) against bf16."""


def decoding_part(report: dict[str, Any], checkpoint: str, console: Console, *, quick: bool) -> None:
    """Both cases of who is slower."""
    chunks, turns, most_turns = (16, 2, 3) if quick else (24, 8, 24)
    for name, slow, title in (
        ("decoding", False, "Asynchronous decoding: the transformer is slower"),
        ("slow_decoder", True, "Back-pressure: the decoder is slower (one layer, one step, untrained)"),
    ):
        report[name] = measure_decoding(chunks, turns, checkpoint, most_turns=most_turns, slow_decoder=slow)
        show_decoding(report[name], title, console)


def quality_part(report: dict[str, Any], checkpoint: str, sessions: int, console: Console, *, quick: bool) -> None:
    """Losses and paired differences."""
    asked = {one.name: one for one in settings(quick=quick)}
    found = track(
        measure(list(asked.values()), sessions, checkpoint), "settings", len(asked) + 1, console=console, transient=True
    )  # fmt: skip
    known = dict(found)
    report["quality"] = [setting_row(quality, asked.get(name)) for name, quality in known.items()]
    report["comparisons"] = [comparison_row(name, against, known) for name, against in comparisons(known)]
    show_quality(report["quality"], console)
    show_comparisons(report["comparisons"], console)
    for row in report["comparisons"]:
        if (row["name"], row["against"]) in CLAIMS:
            beyond = "beyond" if row["loss"]["is_significant"] else "NOT beyond"
            moved = "beyond" if row["motion"]["is_significant"] else "NOT beyond"
            print(
                f"{row['name']} against {row['against']}: loss differs {beyond} 3 standard errors, motion {moved}"
                + (f" (only {sessions} sessions)" if quick else "")
            )


def front_part(report: dict[str, Any], checkpoint: str, console: Console, plot_path: Path, *, quick: bool) -> None:
    """Costs of what has a loss, the front, and the plot."""
    configurations = {one.name: one.configuration for one in settings(quick=quick)}
    costs = measure_costs(configurations, 5 if quick else 24, checkpoint)
    points = points_of(report["quality"], costs)
    best = front(points)
    report["front"] = [
        {**costs[point.name], "name": point.name, "is_emulated": point.is_emulated, "on_front": point in best}
        for point in points
    ]
    show_front(points, best, console)
    plot(report, points, best, plot_path)
    console.print(f"plot: {plot_path}")


def holds(report: dict[str, Any]) -> bool:
    """Whether what must be so is: ranks give one rank's bits, and published figures their best setting."""
    ranks, cases = report.get("ranks", ()), report.get("published_figures", ())
    return all(row["float64_bits_equal"] for row in ranks) and all(case["is_expected"] for case in cases)


def last_line(report: dict[str, Any]) -> str:
    """The two figures, as measured; `-` for a part that was left out."""
    limit = report["decoding"]["async_over_limit"] if "decoding" in report else None
    ratio = report["history"]["ratio"]["KV nvfp4"] if "history" in report else None
    numbers = ("-" if value is None else f"{value:.2f}" for value in (limit, ratio))
    return "async_over_limit={} kv_bytes_ratio={}".format(*numbers)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under 50 seconds on two free cores")
    parser.add_argument("--sessions", type=int, help=f"for a loss ({SESSIONS}; quick: {QUICK_SESSIONS}); at least 2")
    parser.add_argument("--parts", type=lambda text: tuple(text.split(",")), default=PARTS, help=",".join(PARTS))
    parser.add_argument("--checkpoint", default=TRAINED_NAME, help="folder with weights in place of the project's")
    parser.add_argument("--out", type=Path, default=ROOT / "build/benchmarks/longlive.json")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.parts) - set(PARTS)):
        parser.error(f"--parts: {unknown[0]!r} is none of {', '.join(PARTS)}")
    if "front" in arguments.parts and "quality" not in arguments.parts:
        parser.error("--parts: front needs quality")
    if arguments.sessions is not None and arguments.sessions < 2:
        parser.error("--sessions: one has no standard error")
    return arguments


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    quick, checkpoint, parts = arguments.quick, arguments.checkpoint, arguments.parts
    sessions = arguments.sessions or (QUICK_SESSIONS if quick else SESSIONS)
    console, begin = Console(width=None if sys.stdout.isatty() else 130), time.monotonic()
    report: dict[str, Any] = {
        "question": "what do asynchronous decoding, NVFP4 and fewer steps win and cost in the reference engine?",
        "quick": quick,
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "weights": model_fingerprint(checkpoint),
        "load_before": os.getloadavg(),
    }
    if "decoding" in parts:
        decoding_part(report, checkpoint, console, quick=quick)
    if "history" in parts:
        report["history"] = measure_history_bytes(checkpoint)
        report["history"]["windows"] = measure_windows(8 if quick else 40, checkpoint)
        show_history(report["history"], console)
        show_windows(report["history"]["windows"], console)
    if "quality" in parts:
        quality_part(report, checkpoint, sessions, console, quick=quick)
    if "front" in parts:
        front_part(report, checkpoint, console, arguments.out.with_suffix(".svg"), quick=quick)
    if "ranks" in parts:
        report["ranks"] = measure_ranks((1, 2) if quick else (1, 2, 4), 6, checkpoint)
        show_ranks(report["ranks"], console)
    if "published" in parts:
        report["published_figures"] = [decide(case) for case in CASES]
        show_published(report["published_figures"], console)
    report |= {"load_after": os.getloadavg(), "seconds": time.monotonic() - begin}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"{report['seconds']:.0f} s; written to {arguments.out}", highlight=False)
    print(last_line(report))
    return 0 if holds(report) else 1


if __name__ == "__main__":
    sys.exit(main())
