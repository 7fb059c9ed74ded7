"""The ground truth that profiling engines are compared on: every lossy part of the benchmark's space, measured once.

    python benchmarks/profiling_truth.py --out build/benchmarks/truth-1.jsonl --shard 1/2
    python benchmarks/profiling_truth.py --out build/benchmarks/truth-2.jsonl --shard 2/2
    python benchmarks/profiling_truth.py --table benchmarks/data/profiling_truth.csv.gz build/benchmarks/truth-*.jsonl

A run can be stopped and started again: it goes on where its file ends. Parts come in the order of their ids, which are
hashes, so that any first few of them are a random sample. Each process uses one thread; start one a core.

Per part: the loss of each segment, and on the first segment the wire bytes and the seconds of every coder, which must
all decode to the same values. The table's seconds are not those of the part but of its *stages*: the median over all
parts that differ in magnitudes only, so that the noise of a clock is no objective.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import io
import json
import platform
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from controld.contract.configuration import CODER_PARAMETER, Configuration
from controld.contract.errors import ControldError
from controld.profiling.search.observation import VariantCost

PROMPT_TOKENS: Final = 384
CONTINUATION_TOKENS: Final = 64
SEGMENTS: Final = 2
BATCH_PARTS: Final = 2
"""Parts in one forward pass. One takes a tenth longer each; four are no faster than two."""

MAGNITUDES: Final = frozenset(
    [f"{part}_{name}" for part in ("key", "value") for name in ("levels", "low_levels", "low_percent", "bits")]
    + ["step", "sink_tokens", "window_tokens"]
)
"""Parameters that codec time hardly depends on."""

_FEW: Final = 20
"""Stages that fewer parts share are timed `_REPEATS` times in each of them."""
_REPEATS: Final = 5
_REPORT_EVERY: Final = 200
_VERSIONS: Final = ("torch", "transformers", "zstandard", "numpy")


class TruthFileError(ControldError):
    """A file of the ground truth cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Truth:
    """The table.

    Args:
        header: how it was made.
        parts: lossy parts.
        loss_nats, loss_se_nats: `[parts]`, mean and standard error over the segments.
        segment_losses: `[parts, segments]`, nats a token.
        wire_bytes: of each part by coder, of one prompt.
        costs: of each part, one of each coder.
    """

    header: Mapping[str, Any]
    parts: tuple[Configuration, ...]
    loss_nats: NDArray[np.float64]
    loss_se_nats: NDArray[np.float64]
    segment_losses: NDArray[np.float64]
    wire_bytes: tuple[Mapping[str, int], ...]
    costs: tuple[tuple[VariantCost, ...], ...]


def stage_key(lossy: Configuration) -> str:
    """What parts of equal codec time have in common."""
    return json.dumps({name: value for name, value in lossy.items() if name not in MAGNITUDES}, sort_keys=True)


def load_truth(path: Path) -> Truth:
    """Read the table.

    Raises:
        TruthFileError: it is not there, or not such a table.
    """
    try:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        header = json.loads(lines[0])
        rows = list(csv.DictReader(lines[1:]))
        raw_bytes, coders = header["raw_bytes"], header["coders"]
        losses = np.array([[float(x) for x in row["segment_losses"].split()] for row in rows]).reshape(len(rows), -1)
        wire_bytes = [{code: int(row[f"{code}_bytes"]) for code in coders if row[f"{code}_bytes"]} for row in rows]
        return Truth(
            header=header,
            parts=tuple(Configuration.from_json(row["lossy"]) for row in rows),
            loss_nats=np.array([float(row["loss_nats"]) for row in rows]),
            loss_se_nats=np.array([float(row["loss_se_nats"]) for row in rows]),
            segment_losses=losses,
            wire_bytes=tuple(wire_bytes),
            costs=tuple(
                tuple(
                    VariantCost(
                        variant=code,
                        size_ratio=size / raw_bytes,
                        seconds_per_unit=float(row[f"{code}_seconds_per_byte"]),
                    )
                    for code, size in sizes.items()
                )
                for row, sizes in zip(rows, wire_bytes, strict=True)
            ),
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError, ControldError) as error:
        raise TruthFileError(
            f"{path} is no ground truth: {error!r}",
            code="truth.malformed",
            hint="make it with python benchmarks/profiling_truth.py --table",
        ) from error


def read_rows(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]], int]:
    """What a run has written so far.

    Returns:
        The header (None in a file without a whole line), the rows, and how many bytes are whole lines.

    Raises:
        TruthFileError: a whole line is damaged.
    """
    content = path.read_bytes() if path.exists() else b""
    end = content.rfind(b"\n") + 1
    try:
        lines = [json.loads(line) for line in content[:end].splitlines()]
        header = lines[0]["header"] if lines else None
        rows = lines[1:]
        for row in rows:
            Configuration(row["lossy"])
    except (ValueError, KeyError, TypeError, AttributeError, ControldError) as error:
        raise TruthFileError(f"{path}: a line is damaged: {error!r}", code="truth.malformed") from error
    return header, rows, end


def write_table(sources: Sequence[Path], target: Path) -> dict[str, Any]:
    """Make the table of what one run, or all shards of one, have measured.

    Returns:
        Its header.

    Raises:
        TruthFileError: the files are of different runs, or parts are missing.
    """
    headers: list[dict[str, Any]] = []
    rows: dict[str, dict[str, Any]] = {}
    for source in sources:
        header, found, _ = read_rows(source)
        if header is None:
            raise TruthFileError(f"{source} is empty", code="truth.malformed")
        headers.append(header)
        rows |= {Configuration(row["lossy"]).config_id: row for row in found}
    first = headers[0]
    for source, header in zip(sources, headers, strict=True):
        if _made_alike(header) != _made_alike(first):
            raise TruthFileError(f"{source} and {sources[0]} were not made alike", code="truth.mixed")
    if len(rows) != first["parts"]:
        raise TruthFileError(
            f"{len(rows)} of {first['parts']} parts are measured",
            code="truth.incomplete",
            hint="let the runs end, and name the files of all shards",
        )
    measured = {part_id: row for part_id, row in sorted(rows.items()) if not row.get("infeasible")}
    coders = list(dict.fromkeys(code for row in measured.values() for code in row["coders"]))
    seconds_per_byte = _stage_table(measured.values(), first["raw_bytes"])
    header = {
        **_made_alike(first),
        "measured_unix_s": [min(h["started_unix_s"] for h in headers), max(h["started_unix_s"] for h in headers)],
        "rows": len(measured),
        "infeasible": len(rows) - len(measured),
        "coders": coders,
    }
    text = io.StringIO()
    text.write(json.dumps(header, sort_keys=True) + "\n")
    names = ["lossy", "loss_nats", "loss_se_nats", "segment_losses"]
    names += [f"{code}_{name}" for code in coders for name in ("bytes", "seconds_per_byte")]
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    for row in measured.values():
        lossy = Configuration(row["lossy"])
        losses = [float(f"{loss:.7g}") for loss in row["losses"]]
        line: dict[str, Any] = {
            "lossy": lossy.canonical_json,
            "loss_nats": f"{statistics.fmean(losses):.7g}",
            "loss_se_nats": f"{statistics.stdev(losses) / len(losses) ** 0.5:.4g}",
            "segment_losses": " ".join(f"{loss:.7g}" for loss in losses),
        }
        for code, (wire_bytes, _, _) in row["coders"].items():
            line[f"{code}_bytes"] = wire_bytes
            line[f"{code}_seconds_per_byte"] = f"{seconds_per_byte[stage_key(lossy), code]:.4g}"
        writer.writerow(line)
    target.parent.mkdir(parents=True, exist_ok=True)
    # No time stamp: the same measurements give the same file.
    target.write_bytes(gzip.compress(text.getvalue().encode(), compresslevel=9, mtime=0))
    return header


def _stage_table(rows: Iterable[Mapping[str, Any]], raw_bytes: int) -> dict[tuple[str, str], float]:
    """Encode and decode seconds a raw byte, by what parts of equal codec time have in common, and by coder."""
    seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        key = stage_key(Configuration(row["lossy"]))
        for code, (_, encode_s, decode_s) in row["coders"].items():
            seconds[key, code].append(encode_s + decode_s)
    return {key: statistics.median(values) / raw_bytes for key, values in seconds.items()}


def _made_alike(header: Mapping[str, Any]) -> dict[str, Any]:
    """What shards of one run have in common."""
    return {name: value for name, value in header.items() if name not in ("shard", "started_unix_s")}


def measure(out: Path, *, model: Path, artefacts: Path, shard: tuple[int, int], limit: int | None) -> None:
    """Measure the parts that `out` does not hold yet, and append them.

    Args:
        shard: which of how many, from 1.
        limit: how many of the shard's parts at most, those measured before included.

    Raises:
        TruthFileError: `out` was made otherwise.
    """
    import torch
    from profiling_space import bench_space, model_space
    from profiling_truth_bench import TruthBench, Wanted

    torch.set_num_threads(1)
    space = bench_space(model_space(model, artefacts))
    parts = sorted(space.enumerate(lossy_only=True), key=lambda part: part.config_id)
    alike = Counter(map(stage_key, parts))
    number, count = shard
    wanted = parts[number - 1 :: count][:limit]
    bench = TruthBench(
        model,
        artefacts,
        prompt_tokens=PROMPT_TOKENS,
        continuation_tokens=CONTINUATION_TOKENS,
        segments=SEGMENTS,
        batch_parts=BATCH_PARTS,
    )
    header = {
        "model": bench.identity.name,
        "model_fingerprint": bench.identity.fingerprint,
        "artefacts": sorted(bench.artefacts),
        "corpus": bench.corpus_label,
        "prompt_tokens": PROMPT_TOKENS,
        "continuation_tokens": CONTINUATION_TOKENS,
        "segments": SEGMENTS,
        "raw_bytes": bench.raw_bytes,
        "space_sha256": hashlib.sha256(space.to_json().encode()).hexdigest(),
        "parts": len(parts),
        "machine": machine_name(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _VERSIONS},
        "shard": f"{number}/{count}",
        "started_unix_s": round(time.time()),
    }
    known, rows, end = read_rows(out)
    if known is not None and _made_alike(known) != _made_alike(header):
        changed = sorted(name for name, value in _made_alike(header).items() if known.get(name) != value)
        raise TruthFileError(f"{out} was made with other {', '.join(changed)}", code="truth.mixed", hint="other --out")
    done = {Configuration(row["lossy"]).config_id for row in rows}
    left = [
        Wanted(
            lossy=part,
            codes=tuple(str(full[CODER_PARAMETER]) for full in space.coders(part)),
            repeats=1 if alike[stage_key(part)] >= _FEW else _REPEATS,
        )
        for part in wanted
        if part.config_id not in done
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip
    start_s = time.monotonic()
    with out.open("ab") as file, bar:
        file.truncate(end)
        if known is None:
            file.write(json.dumps({"header": header}, sort_keys=True).encode() + b"\n")
        shown = bar.add_task("measuring", total=len(wanted), completed=len(wanted) - len(left))
        for position, part in enumerate(bench.measure(left), start=1):
            row: dict[str, Any] = {"lossy": dict(part.lossy), "losses": part.losses, "infeasible": part.infeasible}
            row["coders"] = {
                code: (timing.wire_bytes, round(timing.encode_s, 6), round(timing.decode_s, 6))
                for code, timing in part.coders.items()
            }
            file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
            file.flush()
            bar.advance(shown)
            if not console.is_terminal and (position % _REPORT_EVERY == 0 or position == len(left)):
                each_s = (time.monotonic() - start_s) / position
                minutes = each_s * (len(left) - position) / 60
                print(f"{position} of {len(left)}, {each_s:.2f} s each, {minutes:.0f} min left", file=sys.stderr)


def machine_name() -> str:
    """The processor, as its vendor writes it, and how it is used."""
    from dataplanes.sglang.hardware import device_name

    return f"{device_name()}, one thread a process"


def _shard(text: str) -> tuple[int, int]:
    number, slash, count = text.partition("/")
    if not slash or not number.isdecimal() or not count.isdecimal() or not 1 <= int(number) <= int(count):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 1 <= I <= N")
    return int(number), int(count)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/models/smollm2-135m-instruct"), metavar="DIR")
    parser.add_argument("--artefacts", type=Path, default=Path("build/models/artefacts"), metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/truth.jsonl"), help="measure into this file")
    parser.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N", help="measure every Nth part, from the Ith"
    )
    parser.add_argument("--limit", type=int, metavar="K", help="measure the first K parts of the shard only")
    parser.add_argument("--table", type=Path, metavar="CSV.GZ", help="make the table of measured files instead")
    parser.add_argument("sources", type=Path, nargs="*", metavar="JSONL", help="with --table: the files of all shards")
    options = parser.parse_args()
    if (options.table is None) != (not options.sources):
        parser.error("--table and the measured files go together")
    try:
        if options.table is None:
            measure(
                options.out,
                model=options.model,
                artefacts=options.artefacts,
                shard=options.shard,
                limit=options.limit,
            )
        else:
            header = write_table(options.sources, options.table)
            print(f"rows={header['rows']} infeasible={header['infeasible']} bytes={options.table.stat().st_size}")
    except ControldError as error:
        raise SystemExit(f"{error.code}: {error}") from error


if __name__ == "__main__":
    main()
