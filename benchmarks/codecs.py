"""Quality by bytes: the calibrated transform beside every published preset at its best, on texts nothing was fitted on.

    python benchmarks/codecs.py [--segments 6] [--texts gsm8k.jsonl] [--quick] [--out build/benchmarks/codecs.json]

Split: documents go to a held-out, a calibration or a served part by a hash of their text; losses are measured on the
held-out part, everything was fitted on the calibration part. Domains: the Python manual (calibrated on), Python's own
library (calibrated on) and whatever `--texts` names (not calibrated on, unless the artefact says so). A ratio is raw
bytes over all bytes of all frames, headers and tables that are sent included; calibrated tables are not sent. A loss is
the mean KL(raw || coded) in nats a token over 128 tokens of the real continuation; its standard error is over segments.
Speeds are of one thread's processor time, beside memcpy in the same run. From them follows each codec's break-even
bandwidth, below which it is faster than raw: one stage after the other (`sequential`) or all at once (`overlapped`).

Outside implementations (`outside_codecs.py`) stand beside ours on the same prompts where they are installed; for each
that is not, a line says so.

`--quick` takes prompts from `build/benchmarks/codecs-kv.pt` (made by the full run, else made on the spot), a few
configurations and one segment a domain.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from break_even import CodecSpeed
from outside_codecs import Absent, OutsideCodec, TokenDropper, find_outside, shortened
from rich.console import Console
from rich.progress import track
from rich.table import Table

from controld.contract.configuration import Configuration
from dataplanes.kvcodec import ArtefactShelf, HeadProfile, KVCodec, KVLayout, PredictiveArtefact, decode_frame
from dataplanes.kvcodec.presets import PRESETS
from dataplanes.sglang.model_identity import identify_model
from dataplanes.sglang.profiler.corpus import Corpus, python_manual, python_sources, read_corpus
from dataplanes.sglang.profiler.quality import Prompt, QualityMeter, bank_for, load_model
from dataplanes.sglang.profiler.wire_codec import FrameCodec, layout_of

LIMITS = (0.02, 0.05)
FRONT = "controld"
LEVELS = "levels"
OUTPUT = Path("build/benchmarks")
QUICK_PRESETS = ("kvserve", "cachegen")
LENGTHS = (256, 512, 1024, 2048)
LINK_BYTES_PER_S = 100e6 / 8
"""The link on which every codec is asked whether it wins: 100 Mbit/s."""


@dataclass(frozen=True, slots=True)
class Method:
    """A named family of configurations from which the best is taken at each loss."""

    name: str
    configurations: tuple[Configuration, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration on one domain.

    Args:
        losses: by segment, nats a token.
    """

    method: str
    configuration: Configuration
    domain: str
    raw_bytes: int
    wire_bytes: int
    losses: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Raw over wire bytes."""
        return self.raw_bytes / self.wire_bytes

    @property
    def loss(self) -> float:
        """Mean over segments."""
        return statistics.fmean(self.losses)

    @property
    def error(self) -> float:
        """Standard error over segments."""
        count = len(self.losses)
        return statistics.stdev(self.losses) / math.sqrt(count) if count > 1 else math.nan


def ratio_at(points: Iterable[Point], limit: float) -> float:
    """The ratio that a family reaches at a loss: along its own front, in logarithms, never beyond its measured points.

    NaN where even its finest point loses more; its coarsest point's ratio where that loses less.
    """
    front: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: max(point.loss, 1e-7)):
        if not front or point.ratio > front[-1][1]:
            front.append((max(point.loss, 1e-7), point.ratio))
    below = [entry for entry in front if entry[0] <= limit]
    above = [entry for entry in front if entry[0] > limit]
    if not below:
        return math.nan
    if not above:
        return below[-1][1]
    (loss_a, ratio_a), (loss_b, ratio_b) = below[-1], above[0]
    share = math.log(limit / loss_a) / math.log(loss_b / loss_a)
    return ratio_a * (ratio_b / ratio_a) ** share


def levels_family() -> tuple[Configuration, ...]:
    """Our own tuning of plain levels: rotated, keys by channel and values by token, the first token kept."""
    pairs = ((8, 4), (10, 5), (10, 6), (12, 6), (14, 7), (16, 8), (20, 10))
    fixed = {"transform": "hadamard", "quantise": "levels", "code": "entropy", "sink_tokens": 1}
    axes = {"key_axis": "channel", "key_group": 64, "value_axis": "token", "value_group": 64}
    return tuple(Configuration({**fixed, **axes, "key_levels": k, "value_levels": v}) for k, v in pairs)


def front_family(artefact: PredictiveArtefact) -> tuple[Configuration, ...]:
    """The calibrated transform at every step that it has tables for."""
    fixed = {"transform": "klt", "quantise": "uniform", "artefact": artefact.artefact_id, "code": "rans"}
    return tuple(Configuration({**fixed, "step": step}) for step in artefact.steps)


def methods(layout: KVLayout, artefact: PredictiveArtefact, profile_id: str, *, quick: bool) -> list[Method]:
    """The front, our levels, and every published preset with its tunings."""
    found = [Method(FRONT, front_family(artefact)), Method(LEVELS, levels_family())]
    for name, preset in PRESETS.items():
        if quick and name not in QUICK_PRESETS:
            continue
        tunings = preset.tunings(layout, profile_id if preset.needs_head_profile else None)
        found.append(Method(name, tunings))
    if quick:
        found = [Method(method.name, method.configurations[1:5:2]) for method in found]
    return found


class Bench:
    """A model with its prompts by domain, and what codecs need of it."""

    def __init__(self, model_dir: Path, artefacts_dir: Path, corpora: Sequence[Corpus], segments: int) -> None:
        identity = identify_model(model_dir)
        self.layout = layout_of(identity, page_tokens=64)
        self.artefacts = ArtefactShelf.of_folder(artefacts_dir, identity.fingerprint)
        held = list(self.artefacts.values())
        predictive = [one for one in held if isinstance(one, PredictiveArtefact)]
        profiles = [one for one in held if isinstance(one, HeadProfile)]
        if not predictive or not profiles:
            raise SystemExit(f"no artefacts of this model in {artefacts_dir}: run make setup")
        self.artefact, self.head_profile = predictive[0], profiles[0]
        self.segments = segments
        self.model_dir = model_dir
        self.model = load_model(model_dir)
        self.meter = QualityMeter(self.model)
        self.banks = {corpus.name: bank_for(self.meter, model_dir, corpus) for corpus in corpora}

    def prompts(self, tokens: int, segments: int) -> dict[str, list[Prompt]]:
        """By domain."""
        return {name: [bank.prompt(tokens, index) for index in range(segments)] for name, bank in self.banks.items()}

    def measure(
        self, method: str, configuration: Configuration, domain: str, prompts: Sequence[Prompt], **frames: int
    ) -> Point:
        """Through the real bytes of every prompt."""
        codec = FrameCodec(configuration, self.layout, artefacts=self.artefacts, **frames)
        wire, losses = 0, []
        for prompt in prompts:
            coded = codec.encode(prompt.planes)
            wire += sum(frame.numel() for frame in coded)
            losses.append(self.meter.measure_planes(prompt, codec.decode(coded, prompt.tokens)).loss_nats)
        raw = sum(prompt.raw_bytes for prompt in prompts)
        return Point(method, configuration, domain, raw, wire, tuple(losses))

    def measure_outside(self, outside: OutsideCodec | TokenDropper, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Ratio and loss of an outside implementation."""
        wire, losses = 0.0, []
        for prompt in prompts:
            if isinstance(outside, OutsideCodec):
                coded = outside.encode(torch.as_tensor(prompt.planes))
                wire += coded.wire_bytes
                losses.append(self.meter.measure_planes(prompt, outside.decode(coded)).loss_nats)
            else:
                kept = shortened(outside, prompt.planes)
                # In the pool's type; the order of tokens needs no bytes.
                wire += sum(plane.numel() * 2 for pair in kept for plane in pair)
                losses.append(self._loss_of_shortened(prompt, kept))
        raw = sum(prompt.raw_bytes for prompt in prompts)
        error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else math.nan
        return {
            "name": outside.name, "ratio": raw / wire, "loss": statistics.fmean(losses), "error": error,
            "losses": losses,
        }  # fmt: skip

    def _loss_of_shortened(self, prompt: Prompt, kept: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """KL(raw || coded) where the cache holds fewer tokens and the continuation stays at its positions."""
        from transformers import DynamicCache

        with torch.inference_mode():
            cache = DynamicCache()
            for layer, (keys, values) in enumerate(kept):
                cache.update(keys, values, layer)
            positions = torch.arange(prompt.tokens, prompt.tokens + prompt.continuation.shape[1])[None]
            logits = self.model(
                prompt.continuation, past_key_values=cache, position_ids=positions, use_cache=True
            ).logits
            log_probs = logits[0].float().log_softmax(-1)
        terms = prompt.raw_log_probs.exp() * (prompt.raw_log_probs - log_probs)
        return float(terms.sum(-1, dtype=torch.float64).mean())


def fastest_s(work: Callable[[], object], repeats: int) -> float:
    """Least processor time of this thread over repeats."""
    times = []
    for _ in range(repeats):
        start_s = time.thread_time()
        work()
        times.append(time.thread_time() - start_s)
    return min(times)


def speeds(
    bench: Bench,
    prompt: Prompt,
    chosen: dict[str, tuple[Configuration, float]],
    outside: Sequence[OutsideCodec],
    repeats: int,
) -> list[dict[str, Any]]:
    """Encode and decode of pieces of 64 tokens in one thread, and memcpy and outside codecs on the same bytes.

    Args:
        chosen: configurations by name, with the ratio that each has over whole prompts: it depends on the piece.
    """
    torch.set_num_threads(1)
    planes = torch.as_tensor(prompt.planes)[:, 64:128].contiguous()
    raw_bytes = planes.numel() * planes.element_size()
    large = torch.as_tensor(prompt.planes).contiguous()
    target = torch.empty_like(large)
    memcpy = large.numel() * large.element_size() / fastest_s(lambda: target.copy_(large), 4 * repeats)
    rows: list[dict[str, Any]] = [{"name": "memcpy", "encode": memcpy, "decode": memcpy, "ratio": 1.0}]
    request = {"first_token": 64, "request_tokens": 1024}
    for name, (configuration, ratio) in chosen.items():
        codec = KVCodec(configuration, bench.layout, artefacts=bench.artefacts)
        buffer = torch.zeros(codec.max_frame_bytes(64, 64), dtype=torch.uint8)
        frame = buffer[: codec.encode_into(planes, buffer, **request)].clone()
        out = torch.empty_like(planes)
        encode_s = fastest_s(lambda codec=codec, buffer=buffer: codec.encode_into(planes, buffer, **request), repeats)
        decode_s = fastest_s(lambda frame=frame, out=out: decode_frame(frame, out, artefacts=bench.artefacts), repeats)
        rows.append(_speed_row(name, raw_bytes, raw_bytes / ratio, encode_s, decode_s))
    rows += [_outside(name, code, large, repeats) for name, code in _outside_coders().items()]
    for one in outside:
        coded = one.encode(planes)
        encode_s = fastest_s(lambda one=one: one.encode(planes), repeats)
        decode_s = fastest_s(lambda one=one, coded=coded: one.decode(coded), repeats)
        rows.append(_speed_row(one.name, raw_bytes, coded.wire_bytes, encode_s, decode_s))
    for row in rows:
        row["encode_of_memcpy"], row["decode_of_memcpy"] = row["encode"] / memcpy, row["decode"] / memcpy
    return rows


def _speed_row(name: str, raw_bytes: int, wire_bytes: float, encode_s: float, decode_s: float) -> dict[str, Any]:
    speed = CodecSpeed(
        ratio=raw_bytes / wire_bytes,
        encode_bytes_per_s=raw_bytes / encode_s,
        decode_bytes_per_s=raw_bytes / decode_s,
    )
    return {
        "name": name,
        "encode": speed.encode_bytes_per_s,
        "decode": speed.decode_bytes_per_s,
        "ratio": speed.ratio,
        "break_even_bytes_per_s": speed.sequential_bytes_per_s,
        "break_even_overlapped_bytes_per_s": speed.overlapped_bytes_per_s,
        "gain_at_100_mbit": speed.sequential_gain(LINK_BYTES_PER_S),
        "gain_at_100_mbit_overlapped": speed.overlapped_gain(LINK_BYTES_PER_S),
    }


def _outside_coders() -> dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], Any]]]:
    import zstandard

    level_1, back = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    found: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], Any]]] = {
        "zstandard level 1, raw bytes": (level_1.compress, back.decompress)
    }
    try:
        import blosc2
        import lz4.block
    except ImportError:
        return found
    found["lz4, raw bytes"] = (lz4.block.compress, lz4.block.decompress)
    found["blosc2 shuffle and zstd, raw bytes"] = (
        lambda data: blosc2.compress(data, typesize=2, clevel=1, codec=blosc2.Codec.ZSTD),
        blosc2.decompress,
    )
    return found


def _outside(
    name: str, code: tuple[Callable[[bytes], bytes], Callable[[bytes], Any]], planes: torch.Tensor, repeats: int
) -> dict[str, Any]:
    data = planes[:, :64].contiguous().view(torch.uint8).numpy().tobytes()
    coded = code[0](data)
    encode_s, decode_s = fastest_s(lambda: code[0](data), repeats), fastest_s(lambda: code[1](coded), repeats)
    return _speed_row(name, len(data), len(coded), encode_s, decode_s)


def _best_near(points: Sequence[Point], limit: float) -> Configuration:
    """The configuration with the most ratio whose mean loss over all domains is within a limit, else the finest."""
    by_configuration: dict[Configuration, list[Point]] = {}
    for point in points:
        by_configuration.setdefault(point.configuration, []).append(point)

    def loss(configuration: Configuration) -> float:
        return statistics.fmean(loss for point in by_configuration[configuration] for loss in point.losses)

    within = [configuration for configuration in by_configuration if loss(configuration) <= limit]
    if not within:
        return min(by_configuration, key=loss)
    return max(within, key=lambda configuration: by_configuration[configuration][0].ratio)


def _trends(bench: Bench, chosen: dict[str, Configuration], segments: int, console: Console) -> list[dict[str, Any]]:
    """Loss and ratio by prompt length, and by how the request is cut into frames."""
    rows = []
    domain = next(iter(bench.banks))
    for tokens in LENGTHS:
        prompts = bench.prompts(tokens, segments)[domain]
        for name, configuration in chosen.items():
            point = bench.measure(name, configuration, domain, prompts)
            rows.append({"name": name, "tokens": tokens, "frame_tokens": 65, **_row(point)})
    prompts = bench.prompts(1024, segments)[domain]
    for frame_tokens in (64, 128, 256, 1024):
        for name, configuration in chosen.items():
            frame_bytes = frame_tokens * bench.layout.token_bytes
            point = bench.measure(name, configuration, domain, prompts, frame_bytes=frame_bytes)
            rows.append({"name": name, "tokens": 1024, "frame_tokens": frame_tokens, **_row(point)})
    table = Table("codec", "prompt", "frame", "ratio", "loss (nats)", title=f"By length and by chunking, {domain}")
    for row in rows:
        table.add_row(
            row["name"], str(row["tokens"]), str(row["frame_tokens"]), f"{row['ratio']:.2f}",
            f"{row['loss']:.5f} +- {row['error']:.5f}",
        )  # fmt: skip
    console.print(table)
    return rows


def _row(point: Point) -> dict[str, Any]:
    return {"ratio": point.ratio, "loss": point.loss, "error": point.error, "losses": list(point.losses)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/models/smollm2-135m-instruct"))
    parser.add_argument("--artefacts", type=Path, default=Path("build/models/artefacts"))
    parser.add_argument("--texts", type=Path, action="append", default=[], help="another domain; may be repeated")
    parser.add_argument("--segments", type=int, default=6, help="of each domain (default: 6)")
    parser.add_argument("--quick", action="store_true", help="a look in under 50 seconds")
    parser.add_argument("--out", type=Path, default=OUTPUT / "codecs.json")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    segments = 1 if options.quick else options.segments
    corpora = [python_manual(), python_sources(), *(read_corpus(path) for path in options.texts)]
    bench = Bench(options.model, options.artefacts, corpora, segments)
    kept = OUTPUT / "codecs-kv.pt"
    if options.quick and kept.is_file():
        prompts = {name: [bench.meter.prompt(*kv)] for name, kv in torch.load(kept).items()}
    else:
        prompts = bench.prompts(512, segments)
        torch.save({name: (found[0].planes, found[0].continuation) for name, found in prompts.items()}, kept)
    profile = bench.head_profile
    families = methods(bench.layout, bench.artefact, profile.profile_id, quick=options.quick)
    work = [(family, c, domain) for family in families for c in family.configurations for domain in prompts]
    points = [
        bench.measure(family.name, configuration, domain, prompts[domain])
        for family, configuration, domain in track(work, "measuring", console=Console(stderr=True))
    ]
    report = _report(bench, points, console)
    by_name = {family.name: [p for p in points if p.method == family.name] for family in families}
    chosen = {name: _best_near(found, LIMITS[0]) for name, found in by_name.items()}
    codecs: list[OutsideCodec] = []
    if not options.quick:
        codecs, droppers, absent = find_outside(bench.layout.planes[0].head_dim)
        asked = [prompt for found in prompts.values() for prompt in found]
        report["outside"] = [bench.measure_outside(one, asked) for one in (*codecs, *droppers)]
        report["outside_absent"] = {one.name: one.reason for one in absent}
        _show_outside(report["outside"], points, console)
        _show_absent(absent, console)
    ratios = {(point.method, point.configuration): point.ratio for point in _pooled(points)}
    timed = {name: (configuration, ratios[name, configuration]) for name, configuration in chosen.items()}
    report["speeds"] = speeds(bench, next(iter(prompts.values()))[0], timed, codecs, 5 if options.quick else 25)
    _show_speeds(report["speeds"], console)
    if not options.quick:
        best = report["best_preset"]
        report["trends"] = _trends(bench, {n: chosen[n] for n in (FRONT, LEVELS, best)}, min(segments, 4), console)
        options.out.write_text(json.dumps(report, indent=1))
        console.print(f"written to {options.out}")
    front = next(row for row in report["speeds"] if row["name"] == FRONT)
    print(
        f"ratio_at_0.02={report['ratio_at']['0.02'][FRONT]:.2f} best_preset={report['best_preset']}:"
        f"{report['ratio_at']['0.02'][report['best_preset']]:.2f} encode_GBps={front['encode'] / 1e9:.3f} "
        f"decode_GBps={front['decode'] / 1e9:.3f}"
    )


def _report(bench: Bench, points: Sequence[Point], console: Console) -> dict[str, Any]:
    """All points, and what each family reaches at the limits: over all domains together, and by domain."""
    names = list(dict.fromkeys(point.method for point in points))
    domains = list(dict.fromkeys(point.domain for point in points))
    together = _pooled(points)
    at: dict[str, dict[str, float]] = {
        f"{limit:g}": {name: ratio_at([p for p in together if p.method == name], limit) for name in names}
        for limit in LIMITS
    }
    by_domain = {
        f"{limit:g}": {
            domain: {
                name: ratio_at([p for p in points if p.method == name and p.domain == domain], limit) for name in names
            }
            for domain in domains
        }
        for limit in LIMITS
    }
    published = [name for name in names if name not in (FRONT, LEVELS)]
    low = at[f"{LIMITS[0]:g}"]
    best = max(published, key=lambda name: -1.0 if math.isnan(low[name]) else low[name])
    front = Table("step", *domains, "all", title="The front: ratio at loss (nats)")
    for configuration in dict.fromkeys(p.configuration for p in points if p.method == FRONT):
        cells = [p for p in (*points, *together) if p.configuration == configuration]
        front.add_row(str(configuration["step"]), *(f"{p.ratio:6.2f} at {p.loss:.4f} +- {p.error:.4f}" for p in cells))
    console.print(front)
    table = Table("method", *(f"{d} @ {limit:g}" for limit in LIMITS for d in (*domains, "all")), title="Ratio at loss")
    for name in sorted(names, key=lambda name: -(0 if math.isnan(low[name]) else low[name])):
        row = [
            value
            for limit in (f"{limit:g}" for limit in LIMITS)
            for value in (*(by_domain[limit][domain][name] for domain in domains), at[limit][name])
        ]
        table.add_row(name, *("-" if math.isnan(value) else f"{value:.2f}" for value in row))
    console.print(table)
    for limit, ratios in at.items():
        print(f"at {limit} nats: {FRONT} over {best} {ratios[FRONT] / ratios[best]:.2f}")
    return {
        "machine": {"python": platform.python_version(), "torch": torch.__version__, "processor": platform.processor()},
        "artefact": {"id": bench.artefact.artefact_id, "texts": list(bench.artefact.texts)},
        "best_preset": best,
        "ratio_at": at,
        "ratio_at_by_domain": by_domain,
        "points": [
            {"method": p.method, "configuration": dict(p.configuration), "domain": p.domain, **_row(p)} for p in points
        ],
    }


def _pooled(points: Sequence[Point]) -> list[Point]:
    """Each configuration over all domains together."""
    grouped: dict[tuple[str, Configuration], list[Point]] = {}
    for point in points:
        grouped.setdefault((point.method, point.configuration), []).append(point)
    return [
        Point(
            method,
            configuration,
            "all",
            sum(p.raw_bytes for p in found),
            sum(p.wire_bytes for p in found),
            tuple(loss for p in found for loss in p.losses),
        )
        for (method, configuration), found in grouped.items()
    ]


def _show_outside(rows: Sequence[dict[str, Any]], points: Sequence[Point], console: Console) -> None:
    """Outside implementations, and what the front reaches at the loss of each; that goes into the rows, too."""
    table = Table("outside implementation", "ratio", "loss (nats)", "ours at that loss", title="All domains together")
    front = [point for point in _pooled(points) if point.method == FRONT]
    for row in rows:
        row["front_ratio"] = ratio_at(front, row["loss"])
        table.add_row(
            row["name"], f"{row['ratio']:.2f}", f"{row['loss']:.4f} +- {row['error']:.4f}",
            "-" if math.isnan(row["front_ratio"]) else f"{row['front_ratio']:.2f}",
        )  # fmt: skip
    console.print(table)


def _show_absent(absent: Sequence[Absent], console: Console) -> None:
    for one in absent:
        console.print(f"not measured: {one.name} ({one.reason})", highlight=False)


def _show_speeds(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Speeds beside memcpy; and break-even bandwidths with what a link of 100 Mbit/s makes of them."""
    table = Table(
        "codec",
        "ratio",
        "encode MB/s",
        "of memcpy",
        "decode MB/s",
        "of memcpy",
        title="One thread, pieces of 64 tokens",
    )
    for row in rows:
        table.add_row(
            row["name"], f"{row['ratio']:.2f}", f"{row['encode'] / 1e6:.0f}", f"{row['encode_of_memcpy']:.3f}",
            f"{row['decode'] / 1e6:.0f}", f"{row['decode_of_memcpy']:.3f}",
        )  # fmt: skip
    console.print(table)
    even = Table(
        "codec", "sequential Mbit/s", "overlapped Mbit/s", "gain at 100 Mbit/s", "overlapped",
        title="Faster than raw below this bandwidth; raw time over coded time at 100 Mbit/s",
    )  # fmt: skip
    coded = [row for row in rows if "gain_at_100_mbit" in row]
    for row in sorted(coded, key=lambda row: -row["gain_at_100_mbit"]):
        limits = [row[f"break_even{kind}_bytes_per_s"] for kind in ("", "_overlapped")]
        even.add_row(
            row["name"], *(f"{limit * 8 / 1e6:.0f}" if limit else "never" for limit in limits),
            f"{row['gain_at_100_mbit']:.2f}", f"{row['gain_at_100_mbit_overlapped']:.2f}",
        )  # fmt: skip
    console.print(even)
    losers = [row["name"] for row in coded if row["gain_at_100_mbit"] <= 1]
    print(
        f"faster than raw at 100 Mbit/s, one stage after the other: {len(coded) - len(losers)} of {len(coded)}; "
        f"not: {', '.join(losers) or 'none'}"
    )


if __name__ == "__main__":
    main()
