"""`controld candidates`: the profiles of a workload, as a table, as JSON or as a plot."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from controld.cli.admin_client import AdminClient
from controld.cli.command import print_json
from controld.cli.console import console
from controld.contract.configuration_label import configuration_label
from controld.contract.errors import ControldError

SUMMARY = "show profiles, their quality, bytes and time, and the Pareto front"
EXAMPLES = """\
examples:
  controld candidates
  controld candidates --workload dialogue --pareto
  controld candidates --max-loss 0.02               only what a class with that limit could use
  controld candidates --plot front.html             loss against ratio, with error bars, and in three dimensions
  controld candidates --json | jq '.[] | select(.pareto) | .config_id'

Loss is in nats per token at the worst prompt length; "at most" is its one-sided 95 % upper bound, which is what
policies compare with max_quality_loss_nats. Encode and decode are MB of raw KV per second at the median transfer.
"""

_PLOT_SUFFIXES = (".html", ".png", ".svg")


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--workload", help="only this workload")
    parser.add_argument("--pareto", action="store_true", help="only the Pareto front")
    parser.add_argument("--max-loss", type=float, metavar="NATS", help="only those whose upper bound is at most this")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot: .html, .png or .svg")


def run(arguments: Namespace) -> int:
    if arguments.plot is not None and arguments.plot.suffix not in _PLOT_SUFFIXES:
        raise ControldError(
            f"{arguments.plot}: unknown kind of plot", code="cli.plot", hint=f"one of {', '.join(_PLOT_SUFFIXES)}"
        )
    rows = AdminClient.from_arguments(arguments).get("/v1/candidates", workload=arguments.workload)["candidates"]
    rows = sorted((row for row in rows if _wanted(row, arguments)), key=_order)
    if arguments.plot is not None:
        from controld.cli.candidate_plot import write_plot

        write_plot(rows, arguments.plot)
    if arguments.json:
        print_json(rows)
    elif rows:
        _show(rows)
        if arguments.plot is not None:
            print(f"plot: {arguments.plot}")
    else:
        print("no profiles; measure some: controld profile --grid")
    return 0


def _wanted(row: dict[str, Any], arguments: Namespace) -> bool:
    upper = row["loss_upper_nats"]
    if arguments.max_loss is not None and (upper is None or upper > arguments.max_loss):
        return False
    return bool(row["pareto"]) or not arguments.pareto


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model_fingerprint"], row["workload"], row["loss_mean_nats"], -row["ratio"]


def megabytes_per_s(row: dict[str, Any], stage: str) -> float:
    """Raw megabytes per second of `encode` or `decode` at the median transfer."""
    volume = float(row["median_transfer_bytes"])
    seconds = float(row[stage]["a_s"]) + float(row[stage]["b_s_per_byte"]) * volume
    return volume / seconds / 1e6 if seconds > 0 else float("inf")


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    out = console()
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["workload"], row["model_fingerprint"], row["sender_hardware"], row["receiver_hardware"])
        groups.setdefault(key, []).append(row)
    for (workload, fingerprint, sender, receiver), members in groups.items():
        places = sender if sender == receiver else f"{sender} -> {receiver}"
        title = f"workload {workload}, model {fingerprint[:12]}, {places}, {members[0]['corpus']}"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in ("id", "configuration"):
            table.add_column(name, no_wrap=True)
        for name in ("loss", "at most", "n@tokens", "ratio", "enc MB/s", "dec MB/s", "ms at V*"):
            table.add_column(name, justify="right", no_wrap=True)
        for name in ("front", "measured"):
            table.add_column(name, no_wrap=True)
        for row in members:
            table.add_row(*_cells(row))
        out.print(table)
        out.print(f"V* = {members[0]['median_transfer_bytes'] / 1e6:.1f} MB of raw KV, in the plane's frames\n")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    upper = row["loss_upper_nats"]
    measured = time.strftime("%Y-%m-%d %H:%M", time.gmtime(row["measured_unix_s"]))
    return (
        row["config_id"][:8],
        configuration_label(row["configuration"]),
        f"{row['loss_mean_nats']:.5f} +- {row['loss_se_nats']:.5f}",
        "?" if upper is None else f"{upper:.5f}",
        f"{row['loss_samples']}@{row['worst_prompt_tokens']}",
        f"{row['ratio']:.2f}",
        f"{megabytes_per_s(row, 'encode'):.0f}",
        f"{megabytes_per_s(row, 'decode'):.0f}",
        f"{row['latency_s_per_byte'] * row['median_transfer_bytes'] * 1e3:.0f}",
        "*" if row["pareto"] else "",
        f"{measured} {row['provenance']}",
    )
