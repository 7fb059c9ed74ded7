"""Candidates as tables, one for each model, workload and place."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from controld.cli.console import console
from controld.contract.configuration_label import configuration_label, setting_label
from controld.contract.quantity import format_size

Row = dict[str, Any]

_KV_COLUMNS = (
    "id", "configuration", "loss", "at most", "n@tokens", "ratio", "enc MB/s", "dec MB/s", "ms at V*", "front",
    "measured",
)  # fmt: skip
_VIDEO_COLUMNS = (
    "id", "setting", "loss", "at most", "n", "ms/pass", "VAE ms", "frames", "FPS", "memory", "weights", "KV",
    "activations", "next one", "drift", "motion", "front", "measured",
)  # fmt: skip
_TEXTS = ("id", "configuration", "setting", "front", "measured")
_FLEXIBLE = ("configuration", "setting", "measured")
_FOLDED = ("n", "VAE ms", "frames", "activations", "drift", "motion", "measured")
"""Where all settings of a table have the same there, it stands below the table once."""


def show_kv(rows: Sequence[Row]) -> None:
    """Print KV candidates."""
    for members in alike(rows, ("workload", "model_fingerprint", "sender_hardware", "receiver_hardware")):
        first = members[0]
        sender, receiver = first["sender_hardware"], first["receiver_hardware"]
        places = sender if sender == receiver else f"{sender} -> {receiver}"
        title = f"workload {first['workload']}, model {first['model_fingerprint'][:12]}, {places}, {first['corpus']}"
        _print_table(title, _KV_COLUMNS, [_kv_cells(row) for row in members])
        console().print(f"V* = {first['median_transfer_bytes'] / 1e6:.1f} MB of raw KV, in the plane's frames\n")


def show_video(rows: Sequence[Row]) -> None:
    """Print video candidates. What all settings of a table have in common stands below it once."""
    from rich.markup import escape

    for members in alike(rows, ("workload", "model_fingerprint", "hardware", "source")):
        first = members[0]
        common = in_common(members)
        place = f"{first['hardware'] or 'unknown hardware'}, {first['source']}"
        title = f"workload {first['workload']}, model {first['model_fingerprint'][:12]}, {place}"
        columns, cells, folded = _fold(_VIDEO_COLUMNS, [_video_cells(row, common) for row in members])
        _print_table(title, columns, cells)
        shared = ", ".join(word for word in (setting_label(common), *folded) if word)
        if shared:
            console().print(escape(f"{'all of them' if len(members) > 1 else 'also'}: {shared}"))
        console().print(
            "loss: beyond the reference setting, in the profiles' unit; FPS: of one session alone, by the cost model;"
            " next one: memory of each further session\n"
        )


def in_common(rows: Sequence[Row]) -> dict[str, Any]:
    """The values that all rows' configurations have; none of a single one's, for it is shown whole."""
    first, *others = (row["configuration"] for row in rows)
    return {
        name: value for name, value in first.items() if others and all(other.get(name) == value for other in others)
    }


def own_label(row: Row, common: Mapping[str, Any]) -> str:
    """A video setting without what it has in common with the others beside it."""
    own = {name: value for name, value in row["configuration"].items() if name not in common}
    return setting_label(own) or "-"


def alike(rows: Sequence[Row], names: Sequence[str]) -> list[list[Row]]:
    """Rows that agree in these fields, and so may be compared, in the order in which the first of each comes."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.values())


def _fold(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]], list[str]]:
    """Columns and cells without the columns that say the same in every row, and what these say."""
    same = {
        index: f"{name} {cells[0][index]}"
        for index, name in enumerate(columns)
        if name in _FOLDED and len({row[index] for row in cells}) == 1
    }
    kept = [index for index in range(len(columns)) if index not in same]
    return [columns[index] for index in kept], [[row[index] for index in kept] for row in cells], list(same.values())


def _print_table(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False)
    for name, *column in zip(columns, *cells, strict=True):
        # Ids and numbers are never cut: what gives way is the configuration, then where it was measured.
        kept = 8 if name in _FLEXIBLE else max(map(len, (name, *column)))
        justify: Literal["left", "right"] = "left" if name in _TEXTS else "right"
        table.add_column(name, no_wrap=True, min_width=kept, overflow="ellipsis", justify=justify)
    for row_cells in cells:
        table.add_row(*map(escape, row_cells))
    console().print(table)


def _kv_cells(row: Row) -> tuple[str, ...]:
    upper, samples = row["loss_upper_nats"], row["loss_samples"]
    return (
        row["config_id"],
        configuration_label(row["configuration"]),
        f"{row['loss_mean_nats']:.5f} +- {row['loss_se_nats']:.5f}" if samples else "?",
        "?" if upper is None else f"{upper:.5f}",
        f"{samples}@{row['worst_prompt_tokens']}" if samples else "0",
        f"{row['ratio']:.2f}",
        f"{_megabytes_per_s(row, 'encode'):.0f}",
        f"{_megabytes_per_s(row, 'decode'):.0f}",
        f"{row['latency_s_per_byte'] * row['median_transfer_bytes'] * 1e3:.0f}",
        "*" if row["pareto"] else "",
        _measured(row),
    )


def _video_cells(row: Row, common: Mapping[str, Any]) -> tuple[str, ...]:
    mean, upper, memory = row["loss_mean"], row["loss_upper"], row["memory"]
    return (
        row["config_id"],
        own_label(row, common),
        "?" if mean is None else f"{mean:.4f} +- {row['loss_se']:.4f}",
        "?" if upper is None else f"{upper:.4f}",
        str(row["loss_samples"]),
        f"{row['forward_s'] * 1e3:.3g}",
        f"{row['vae_s'] * 1e3:.3g}",
        str(row["frames_per_chunk"]),
        f"{1 / row['seconds_per_frame']:.3g}",
        _or_unknown(row["memory_bytes"], format_size),
        *(
            _or_unknown(None if memory is None else memory[name], format_size)
            for name in ("weights_bytes", "kv_bytes", "activation_bytes")
        ),
        _or_unknown(None if memory is None else memory["kv_bytes"] + memory["session_bytes"], format_size),
        _or_unknown(row["drift"], _three_digits),
        _or_unknown(row["motion"], _three_digits),
        "*" if row["pareto"] else "",
        _measured(row),
    )


def _or_unknown(value: float | None, text: Callable[[float], str]) -> str:
    return "?" if value is None else text(value)


def _three_digits(value: float) -> str:
    return f"{value:.3g}"


def _measured(row: Row) -> str:
    """When, and what it came from; what came without a measurement of ours has no date."""
    when = row["measured_unix_s"]
    return (time.strftime("%Y-%m-%d %H:%M ", time.gmtime(when)) if when else "") + str(row["provenance"])


def _megabytes_per_s(row: Row, stage: str) -> float:
    """Raw megabytes per second of `encode` or `decode` at the median transfer."""
    volume = float(row["median_transfer_bytes"])
    seconds = float(row[stage]["a_s"]) + float(row[stage]["b_s_per_byte"]) * volume
    return volume / seconds / 1e6 if seconds > 0 else float("inf")
