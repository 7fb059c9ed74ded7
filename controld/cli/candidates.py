"""`controld candidates`: the profiles of a workload, as a table, as JSON or as a plot; and profiles in and out."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Literal

from controld.cli.admin_client import AdminClient
from controld.cli.command import print_json
from controld.cli.console import console
from controld.contract.configuration_label import configuration_label
from controld.contract.errors import ControldError

SUMMARY = "show profiles, their quality, bytes and time, and the Pareto front; carry them from daemon to daemon"
EXAMPLES = """\
examples:
  controld candidates
  controld candidates --workload dialogue --pareto
  controld candidates --max-loss 0.02               only what a class with that limit could use
  controld candidates --plot plots/                 plots/front.html (turn it, point at it) and plots/front.png
  controld candidates --json | jq '.[] | select(.pareto) | .config_id'
  controld candidates --envelope --bytes 20MB --max-loss 0.02    which is the fastest at which bandwidth
  controld candidates --export candidates.json      every profile, to keep or to carry elsewhere
  controld candidates --import candidates.json      all or nothing; of the same measurement the newer one stays
  controld candidates --import-kvserve 5090.json --workload qa    a profile library of KVServe, for a connected model

Loss is in nats per token at the worst prompt length; "at most" is its one-sided 95 % upper bound, which is what
policies compare with max_quality_loss_nats. Encode and decode are MB of raw KV per second at the median transfer.
KVServe's accuracies are no loss: what comes from there has none, passes no limit, and its times are priors.

A configuration such as "had s1 w32 K12/c64 V6/t64 entropy" reads from left to right:
  had        the transform: Hadamard; nothing where there is none
  s1 w32     the first token and the last 32 are carried as they are
  K12/c64    keys in 12 levels; c: 64 tokens of a channel share a scale, t: 64 channels of a token and head do
  V6/t64     values, likewise; a number format stands instead of both (fp8_e4m3, nvfp4), or "lossless"
  entropy    the coder: none, bitpack, zstd or entropy; any other knob stands as name=value
"""

_PLOT_SUFFIXES = (".html", ".png", ".svg")
_MAX_SHOWN_UNMAPPED = 20


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--workload", help="only this workload; with --import-kvserve: whose profiles they become")
    parser.add_argument("--pareto", action="store_true", help="only the Pareto front")
    parser.add_argument("--max-loss", type=float, metavar="NATS", help="only those whose upper bound is at most this")
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--plot", type=Path, metavar="PATH", help="write plots: a folder for front.html and front.png, or one file"
    )
    action.add_argument(
        "--envelope", action="store_true", help="which candidate is the fastest at which bandwidth, for --bytes"
    )
    action.add_argument("--export", type=Path, metavar="FILE", help="write every profile as one JSON document")
    action.add_argument("--import", type=Path, metavar="FILE", dest="import_file", help="read what --export wrote")
    action.add_argument("--import-kvserve", type=Path, metavar="FILE", help="read a profile library of KVServe")
    parser.add_argument("--bytes", metavar="SIZE", help="--envelope: raw bytes of the transfer (default: the median)")
    parser.add_argument(
        "--model", metavar="FINGERPRINT", help="--import-kvserve: the model it is for, found by its name unless given"
    )


def run(arguments: Namespace) -> int:
    if arguments.model is not None and arguments.import_kvserve is None:
        raise ControldError("--model goes with --import-kvserve", code="cli.usage")
    if arguments.bytes is not None and not arguments.envelope:
        raise ControldError("--bytes goes with --envelope", code="cli.usage")
    filters = arguments.pareto or arguments.max_loss is not None
    if arguments.import_kvserve is not None and filters:
        raise ControldError(
            "--import-kvserve takes every profile", code="cli.usage", hint="leave --pareto and --max-loss out"
        )
    chosen = arguments.export or arguments.import_file
    if chosen is not None and (arguments.workload or filters):
        raise ControldError("--export and --import take every profile", code="cli.usage", hint="leave the filters out")
    client = AdminClient.from_arguments(arguments)
    if arguments.export is not None:
        return _export(client, arguments)
    if arguments.import_file is not None or arguments.import_kvserve is not None:
        return _import(client, arguments)
    return _list(client, arguments)


def _list(client: AdminClient, arguments: Namespace) -> int:
    if arguments.plot is not None and arguments.plot.suffix and arguments.plot.suffix not in _PLOT_SUFFIXES:
        raise ControldError(
            f"{arguments.plot}: unknown kind of plot",
            code="cli.plot",
            hint=f"a folder, or a file that ends in {', '.join(_PLOT_SUFFIXES)}",
        )
    answer = client.get("/v1/candidates", workload=arguments.workload)
    stored = answer["candidates"]
    for problem in answer.get("problems", ()):
        print(f"{problem['where']}: {problem['what']}", file=sys.stderr)
    rows = sorted((row for row in stored if _wanted(row, arguments)), key=_order)
    if arguments.envelope and rows:
        from controld.cli.candidate_envelope import show_envelopes

        show_envelopes(rows, arguments)
        return 0
    written: list[Path] = []
    if arguments.plot is not None:
        from controld.cli.candidate_plot import write_plots

        written = write_plots(rows, arguments.plot)
    if arguments.json:
        print_json(rows)
    elif rows:
        _show(rows)
        for path in written:
            print(f"plot: {path}")
    else:
        print(_why_none(client, arguments, len(stored)))
    return 0


def _why_none(client: AdminClient, arguments: Namespace, of_workload: int) -> str:
    """What to say where nothing is shown: what the filters hide, or that nothing is there."""
    filters = [
        name
        for name, given in (("--pareto", arguments.pareto), ("--max-loss", arguments.max_loss is not None))
        if given
    ]
    if of_workload:
        return f"none of {_profiles(of_workload)} passes {' and '.join(filters)}"
    everything = client.get("/v1/candidates")["candidates"] if arguments.workload else []
    if everything:
        workloads = ", ".join(sorted({row["workload"] for row in everything}))
        return f"no profiles of workload {arguments.workload}; there are {_profiles(len(everything))} of {workloads}"
    return "no profiles; measure some: controld profile --grid"


def _profiles(count: int) -> str:
    return "1 profile" if count == 1 else f"{count} profiles"


def _export(client: AdminClient, arguments: Namespace) -> int:
    document = client.get("/v1/candidates/export")
    target: Path = arguments.export
    scratch = target.with_name(target.name + ".partial")
    try:
        scratch.write_text(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
        scratch.replace(target)
    except OSError as error:
        raise ControldError(f"{target}: cannot be written: {error.strerror}", code="cli.file") from error
    outcome = {"file": str(target), "profiles": len(document["profiles"])}
    if arguments.json:
        print_json(outcome)
    else:
        print(f"{outcome['profiles']} profiles: {target}")
    return 0


def _import(client: AdminClient, arguments: Namespace) -> int:
    source: Path = arguments.import_file or arguments.import_kvserve
    try:
        content = source.read_bytes()
    except OSError as error:
        raise ControldError(f"{source}: cannot be read: {error.strerror}", code="cli.file") from error
    kind = "controld" if arguments.import_file is not None else "kvserve"
    outcome = client.post(
        "/v1/candidates/import", content, format=kind, model=arguments.model, workload=arguments.workload
    )
    if arguments.json:
        print_json(outcome)
        return 0
    print(f"{outcome['stored']} of {outcome['profiles']} profiles stored, {outcome['kept']} are no newer than ours")
    unmapped = outcome["unmapped"]
    if unmapped:
        print(f"{len(unmapped)} have no counterpart here:")
    for one in unmapped[:_MAX_SHOWN_UNMAPPED]:
        print(f"  {one['profile_id']}: {one['reason']}")
    if len(unmapped) > _MAX_SHOWN_UNMAPPED:
        print(f"  and {len(unmapped) - _MAX_SHOWN_UNMAPPED} more; --json lists all")
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
    from rich.markup import escape
    from rich.table import Table

    out = console()
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["workload"], row["model_fingerprint"], row["sender_hardware"], row["receiver_hardware"])
        groups.setdefault(key, []).append(row)
    for (workload, fingerprint, sender, receiver), members in groups.items():
        places = sender if sender == receiver else f"{sender} -> {receiver}"
        title = f"workload {workload}, model {fingerprint[:12]}, {places}, {members[0]['corpus']}"
        table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False)
        cells = [_cells(row) for row in members]
        for name, *column in zip(_COLUMNS, *cells, strict=True):
            # Ids and numbers are never cut: what gives way is the configuration, then where it was measured.
            kept = 8 if name in _FLEXIBLE else max(map(len, (name, *column)))
            justify: Literal["left", "right"] = "right" if name in _NUMBERS else "left"
            table.add_column(name, no_wrap=True, min_width=kept, overflow="ellipsis", justify=justify)
        for row_cells in cells:
            table.add_row(*map(escape, row_cells))
        out.print(table)
        out.print(f"V* = {members[0]['median_transfer_bytes'] / 1e6:.1f} MB of raw KV, in the plane's frames\n")


_COLUMNS = (
    "id", "configuration", "loss", "at most", "n@tokens", "ratio", "enc MB/s", "dec MB/s", "ms at V*", "front",
    "measured",
)  # fmt: skip
_NUMBERS = _COLUMNS[2:9]
_FLEXIBLE = ("configuration", "measured")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    upper, samples = row["loss_upper_nats"], row["loss_samples"]
    # Profiles that came without a measurement of ours have no date either.
    when = row["measured_unix_s"]
    measured = time.strftime("%Y-%m-%d %H:%M ", time.gmtime(when)) if when else ""
    return (
        row["config_id"],
        configuration_label(row["configuration"]),
        f"{row['loss_mean_nats']:.5f} +- {row['loss_se_nats']:.5f}" if samples else "?",
        "?" if upper is None else f"{upper:.5f}",
        f"{samples}@{row['worst_prompt_tokens']}" if samples else "0",
        f"{row['ratio']:.2f}",
        f"{megabytes_per_s(row, 'encode'):.0f}",
        f"{megabytes_per_s(row, 'decode'):.0f}",
        f"{row['latency_s_per_byte'] * row['median_transfer_bytes'] * 1e3:.0f}",
        "*" if row["pareto"] else "",
        f"{measured}{row['provenance']}",
    )
