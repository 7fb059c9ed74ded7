"""`controld candidates --envelope`: which candidate is the fastest at which bandwidth, by profile, on an idle link."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from controld.candidates.profile import StageTime
from controld.cli.command import print_json
from controld.cli.console import console
from controld.contract.configuration_label import configuration_label
from controld.contract.decision import RAW
from controld.contract.errors import FieldError
from controld.contract.quantity import format_duration, format_rate, format_size, parse_size_bytes
from controld.controller.envelope import Interval, Lines, lower_envelope
from controld.controller.goals import RAW_OVERHEAD
from controld.controller.knobs.base import Corrections, StageModels
from controld.controller.knobs.kv_transfer import KvTransfer

Row = Mapping[str, Any]


def show_envelopes(rows: Sequence[Row], arguments: Namespace) -> None:
    """Print one envelope for each workload, model and pair of machines, from the slowest link to the fastest.

    Raises:
        FieldError: `--bytes` is not a positive size.
    """
    size_bytes = None if arguments.bytes is None else parse_size_bytes(arguments.bytes, field="--bytes")
    if size_bytes is not None and size_bytes <= 0:
        raise FieldError("--bytes", "must be above zero")
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = (row["workload"], row["model_fingerprint"], row["sender_hardware"], row["receiver_hardware"])
        groups.setdefault(key, []).append(row)
    documents = [_document(key, members, size_bytes) for key, members in groups.items()]
    if arguments.json:
        print_json(documents)
        return
    for document in documents:
        _print(document)


def _document(key: tuple[str, ...], rows: Sequence[Row], size_bytes: float | None) -> dict[str, Any]:
    workload, fingerprint, sender, receiver = key
    size = float(rows[0]["median_transfer_bytes"]) if size_bytes is None else size_bytes
    lines = profile_lines(rows, size)
    [intervals] = lower_envelope(lines)
    return {
        "workload": workload,
        "model_fingerprint": fingerprint,
        "sender_hardware": sender,
        "receiver_hardware": receiver,
        "bytes": size,
        "intervals": sorted(
            (_interval(interval, rows, lines) for interval in intervals), key=lambda item: item["low_bytes_per_s"]
        ),
    }


def profile_lines(rows: Sequence[Row], size_bytes: float) -> Lines:
    """Raw, and then every profile, as the cost model has them before anything was learned; one size."""
    encode = [RAW_OVERHEAD, *(StageTime(**row["encode"]) for row in rows)]
    decode = [StageTime(0.0, 0.0), *(StageTime(**row["decode"]) for row in rows)]
    models = StageModels(
        encode_a_s=np.array([time.a_s for time in encode]),
        encode_b_s_per_byte=np.array([time.b_s_per_byte for time in encode]),
        decode_a_s=np.array([time.a_s for time in decode]),
        decode_b_s_per_byte=np.array([time.b_s_per_byte for time in decode]),
        wire_share=np.array([1.0, *(1.0 / row["ratio"] for row in rows)]),
        framed=np.array([False, *(True for _ in rows)]),
    )
    return KvTransfer().lines(models, Corrections.none(len(models)).factors(), np.array([size_bytes]))


def _interval(interval: Interval, rows: Sequence[Row], lines: Lines) -> dict[str, Any]:
    """One interval; the gain is raw's time over the arm's at both ends, in the limit where there is none."""
    row = rows[interval.arm - 1] if interval.arm else None

    def gain(rate: float) -> float:
        if rate == 0:
            top, bottom = (float(lines.slope_bytes[arm].max()) for arm in (0, interval.arm))
        else:
            x = np.array([[0.0 if math.isinf(rate) else 1.0 / rate]])
            top, bottom = (float(lines.seconds(x)[arm, 0, 0]) for arm in (0, interval.arm))
        return top / bottom

    def seconds(rate: float) -> float | None:
        return None if rate == 0 else float(lines.seconds(np.array([[1.0 / rate]]))[interval.arm, 0, 0])

    low, high = interval.low_bytes_per_s, interval.high_bytes_per_s
    return {
        "low_bytes_per_s": low,
        "high_bytes_per_s": high if math.isfinite(high) else None,
        "config_id": RAW if row is None else row["config_id"],
        "configuration": RAW if row is None else configuration_label(row["configuration"]),
        "loss_mean_nats": 0.0 if row is None else row["loss_mean_nats"],
        "loss_upper_nats": 0.0 if row is None else row["loss_upper_nats"],
        "ratio": 1.0 if row is None else row["ratio"],
        "seconds_at_low": seconds(low),
        "seconds_at_high": seconds(high)
        if math.isfinite(high)
        else float(lines.seconds(np.zeros((1, 1)))[interval.arm, 0, 0]),
        "gain_at_low": gain(low),
        "gain_at_high": gain(high),
    }


def _print(document: Mapping[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    sender, receiver = document["sender_hardware"], document["receiver_hardware"]
    places = sender if sender == receiver else f"{sender} -> {receiver}"
    title = f"workload {document['workload']}, model {document['model_fingerprint'][:12]}, {places}"
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False)
    for name in ("bandwidth", "id", "configuration"):
        table.add_column(name, no_wrap=True)
    for name in ("loss at most", "ratio", "time", "faster than raw"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in document["intervals"]:
        low, high = item["low_bytes_per_s"], item["high_bytes_per_s"]
        upper = item["loss_upper_nats"]
        gains = sorted((item["gain_at_low"], item["gain_at_high"]))
        table.add_row(
            _rates(low, high),
            escape(item["config_id"][:8]),
            escape(item["configuration"]),
            "?" if upper is None else f"{upper:.5f}",
            f"{item['ratio']:.2f}",
            _times(item["seconds_at_high"], item["seconds_at_low"]),
            "" if item["config_id"] == RAW else f"x{gains[0]:.2f} - x{gains[1]:.2f}",
        )
    out = console()
    out.print(table)
    out.print(
        f"{format_size(document['bytes'])} of raw KV on an idle link, by profile; what was learned is not in it\n"
    )


def _rates(low: float, high: float | None) -> str:
    if high is None:
        return f"over {format_rate(low)}" if low else "any"
    return f"{format_rate(low)} - {format_rate(high)}" if low else f"under {format_rate(high)}"


def _times(least: float, most: float | None) -> str:
    return f"over {format_duration(least)}" if most is None else f"{format_duration(least)} - {format_duration(most)}"
