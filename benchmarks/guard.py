"""How soon does the quality guard find a codec that got worse, how often is it wrong, and what does a look cost?

Run as `python benchmarks/guard.py [--quick] [--model DIR] [--out FILE]`. Three parts:

- Simulated streams through the production guard and the production sampling (1 % of the transfers, by hash): after a
  healthy beginning the error grows 1.25-, 1.5-, 2- or 4-fold; counted are transfers until the arm is pinned off, and
  pins in 10,000 healthy transfers. Log errors scatter normally with the spreads below; the profile saw twelve segments
  of them.
- What a look costs: decoding and comparing one piece of 1.5 MB beside encoding it, in one run.
- With `--model`, real prompts through the profiler: how errors of healthy frames scatter for some configurations, how
  far their level lies from one text to another, and how soon a codec made worse by a hidden switch is found.

The last line gives the mean delay for a doubled error, in transfers, and pins in 10,000 healthy transfers, at the
middle spread. One look in a hundred: a delay of 300 transfers is three looks.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from controld.contract.configuration import Configuration
from controld.contract.decision import is_sampled
from controld.contract.effect import Effect, Half, Verdict
from controld.contract.effect import Path as TransferPath
from controld.controller.error_test import ErrorNorm
from controld.controller.quality_guard import Expectation, Look, QualityGuard
from dataplanes.kvcodec import KVCodec, KVDtype, KVLayout, decode_frame
from dataplanes.kvcodec.layout import ChunkPlanes
from dataplanes.kvcodec.reconstruction import chunk_error, reconstruction_error

ROOT = Path(__file__).resolve().parent.parent
SHARE = 0.01
SPREADS = (0.01, 0.15, 0.4)
"""The first is what frames of SmolLM2-135M show, and more (`--model`); the others are for configurations whose frames
differ, as those that keep a window at the request's end."""

FACTORS = (1.25, 1.5, 2.0, 4.0)
HEALTHY_TRANSFERS = 10_000
NORMAL_ERROR = 0.03
SEGMENTS = 12
ARM = "0123456789abcdef"

LEVELS: dict[str, Any] = {
    "transform": "hadamard", "quantise": "levels", "sink_tokens": 0, "key_levels": 12, "key_axis": "channel",
    "key_group": 64, "value_levels": 6, "value_axis": "token", "value_group": 64, "code": "bitpack",
}  # fmt: skip


class Stream:
    """Transfers of one arm whose checked frames have errors of this spread around a level."""

    def __init__(self, seed: int, spread: float) -> None:
        self._random = np.random.default_rng(seed)
        self._spread = spread
        self._name = f"s{seed}"
        self.transfers = 0
        profiled = spread * self._random.standard_normal(SEGMENTS)
        norm = ErrorNorm(
            mean=NORMAL_ERROR * math.exp(float(profiled.mean())), log_sd=float(profiled.std(ddof=1)), samples=SEGMENTS
        )
        self.guard = QualityGuard()
        self.guard.expect("model", {("chat", ARM): Expectation(basis="b", norm=norm, measured_unix_s=0.0)})

    def send(self, transfers: int, factor: float, *, until_breach: bool = False) -> int:
        """Send so many; how many breaches the guard saw. A healthy arm is released at once."""
        breaches = 0
        for _ in range(transfers):
            self.transfers += 1
            if not is_sampled(f"{self._name}-{self.transfers}", SHARE):
                continue
            error = NORMAL_ERROR * factor * math.exp(self._spread * self._random.standard_normal())
            if self.guard.observe(checked_effect(self.transfers, error), 1.0) is Look.BREACH:
                breaches += 1
                self.guard.release(ARM)
                if until_breach:
                    break
        return breaches


def checked_effect(number: int, error: float) -> Effect:
    """A verified transfer whose sender looked at a frame."""
    return Effect(
        transfer_id=f"t{number}", half=Half.SENDER, arm_id=ARM, table_version=1, service_class="chat", tier="pd",
        link_group="default", tokens=600, chunks=8, raw_bytes=14_000_000, wire_bytes=3_000_000, encode_s=0.1,
        wire_s=1.0, decode_s=0.1, wait_s=0.0, total_s=1.2, path=TransferPath.CODED, verdict=Verdict.VERIFIED,
        reconstruction_error=error,
    )  # fmt: skip


def simulate(spread: float, seeds: int) -> dict[str, Any]:
    """Delays by factor and false alarms for one spread."""
    delays: dict[str, Any] = {}
    for factor in FACTORS:
        waited = []
        for seed in range(seeds):
            stream = Stream(seed, spread)
            stream.send(2_000, 1.0)
            before = stream.transfers
            stream.send(50_000, factor, until_breach=True)
            waited.append(stream.transfers - before)
        delays[f"x{factor:g}"] = {
            "mean": statistics.fmean(waited),
            "p90": float(np.percentile(waited, 90)),
            "longest": max(waited),
        }
    alarms = sum(Stream(1000 + seed, spread).send(HEALTHY_TRANSFERS, 1.0) for seed in range(seeds))
    return {
        "spread": spread,
        "delay_transfers": delays,
        "false_alarms": alarms,
        "healthy_transfers": seeds * HEALTHY_TRANSFERS,
        "false_alarms_in_10000": alarms / seeds,
    }


def look_cost(rounds: int) -> dict[str, float]:
    """Milliseconds of processor time for one piece of 1.5 MB, medians of alternating rounds.

    30 layers, 3 heads of 64, bfloat16, 12 levels for keys and 6 for values; one thread.
    """
    layout = KVLayout.keys_then_values(layers=30, heads=3, head_dim=64, dtype=KVDtype.BFLOAT16, page_tokens=64)
    codec = KVCodec(Configuration(LEVELS), layout)
    planes = torch.randn(60, 64, 3, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    frame = torch.empty(codec.max_frame_bytes(64), dtype=torch.uint8)
    source = layout.chunk(planes)
    times: dict[str, list[float]] = {"encode_ms": [], "copy_ms": [], "decode_ms": [], "compare_ms": []}
    for number in range(rounds + 2):
        marks = [time.thread_time()]
        size = codec.encode_into(planes, frame, first_token=0)
        marks.append(time.thread_time())
        kept = frame[:size].clone()
        marks.append(time.thread_time())
        decoded = decode_frame(kept)
        marks.append(time.thread_time())
        chunk_error(layout, source, ChunkPlanes(decoded.planes, None))
        marks.append(time.thread_time())
        if number >= 2:
            for name, start, end in zip(times, marks, marks[1:], strict=False):
                times[name].append((end - start) * 1e3)
    medians = {name: statistics.median(values) for name, values in times.items()}
    look_ms = medians["copy_ms"] + medians["decode_ms"] + medians["compare_ms"]
    return {**medians, "look_ms": look_ms, "look_over_encode": look_ms / medians["encode_ms"]}


def real_errors(bench: Any, configuration: Configuration, workload: str, segments: range) -> list[float]:
    """Errors of every frame of some real prompts of 1,024 tokens."""
    from dataplanes.sglang.profiler.wire_codec import FRAME_BYTES

    bank, codec = bench.bank_for(workload, 128), bench.codec_for(configuration)
    errors = []
    for segment in segments:
        prompt = bank.prompt(1024, segment)
        received = codec.decode(codec.encode(prompt.planes), prompt.tokens)
        step = max(1, FRAME_BYTES // bench.layout.token_bytes)
        for start in range(0, prompt.tokens - step // 2, step):
            pairs = [
                (plane[start : start + step], back[start : start + step])
                for plane, back in zip(prompt.planes, received, strict=True)
            ]
            half = len(pairs) // 2
            errors.append(reconstruction_error([pairs[:half], pairs[half:]]))
    return errors


def on_real_frames(model: Path, segments: int, texts: Path | None, served_workload: str) -> Iterator[dict[str, Any]]:
    """Scatter of healthy frames, and looks until a hidden switch is found, for some configurations.

    Profiled is on the default texts; served are other segments of the same texts, or of another workload.
    """
    from dataplanes.sglang.profiler.model_bench import ModelBench

    bench = ModelBench(model, texts)
    plain = {**LEVELS, "transform": "none"}
    cases = {
        "hadamard K12 V6": (LEVELS, {**LEVELS, "key_levels": 8, "value_levels": 4}),
        "levels K12 V6": (plain, {**plain, "key_levels": 8, "value_levels": 4}),
        "hadamard K64 V32": ({**LEVELS, "key_levels": 64, "value_levels": 32}, LEVELS),
        "fp8": ({"transform": "none", "quantise": "fp8_e4m3", "sink_tokens": 0, "code": "none"}, LEVELS),
    }
    for name, (good, bad) in cases.items():
        profiled = np.log(real_errors(bench, Configuration(good), "general", range(segments)))
        served = np.log(real_errors(bench, Configuration(good), served_workload, range(segments, 2 * segments)))
        worse = np.log(real_errors(bench, Configuration(bad), served_workload, range(segments, 2 * segments)))
        norm = ErrorNorm(mean=float(np.exp(profiled.mean())), log_sd=float(profiled.std(ddof=1)), samples=len(profiled))
        yield {
            "configuration": name,
            "served": served_workload,
            "normal_error": norm.mean,
            "spread": norm.log_sd,
            "served_over_profiled": float(np.exp(served.mean() - profiled.mean())),
            "frames": len(profiled),
            "switch_grows_error_by": float(np.exp(worse.mean() - served.mean())),
            "looks_until_found": looks_until_found(norm, np.exp(worse)),
            "breaches_of_healthy_frames": breaches(norm, np.exp(served), times=50),
        }


def looks_until_found(norm: ErrorNorm, errors: np.ndarray) -> float:
    """Mean number of looks at frames drawn from these until the guard pins, over 40 orders."""
    counts = []
    for seed in range(40):
        order, guard = np.random.default_rng(seed).choice(errors, 2000), fresh_guard(norm)
        looks = (guard.observe(checked_effect(n, float(error)), 1.0) for n, error in enumerate(order))
        counts.append(next((n for n, look in enumerate(looks, start=1) if look is Look.BREACH), len(order)))
    return statistics.fmean(counts)


def breaches(norm: ErrorNorm, errors: np.ndarray, times: int) -> int:
    """How often the guard pins on healthy frames drawn from these, in `times` times 100 looks (10,000 transfers)."""
    found = 0
    for seed in range(times):
        guard = fresh_guard(norm)
        for number, error in enumerate(np.random.default_rng(seed).choice(errors, 100)):
            if guard.observe(checked_effect(number, float(error)), 1.0) is Look.BREACH:
                found += 1
                guard.release(ARM)
    return found


def fresh_guard(norm: ErrorNorm) -> QualityGuard:
    """A guard that expects this of the arm."""
    guard = QualityGuard()
    guard.expect("model", {("chat", ARM): Expectation(basis="b", norm=norm, measured_unix_s=0.0)})
    return guard


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under twenty seconds")
    parser.add_argument("--model", type=Path, metavar="DIR", help="also on real prompts of this model")
    parser.add_argument("--texts", type=Path, metavar="DIR", help="texts by workload, for --served")
    parser.add_argument("--served", default="general", metavar="WORKLOAD", help="what is served after profiling")
    parser.add_argument("--out", type=Path, default=ROOT / "build/benchmarks/guard.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = 25 if arguments.quick else 400
    simulated = [simulate(spread, seeds) for spread in SPREADS]
    for row in simulated:
        delays = "   ".join(f"{name} {value['mean']:6.0f}" for name, value in row["delay_transfers"].items())
        print(
            f"spread {row['spread']:4.2f}   transfers until pinned: {delays}   "
            f"false alarms: {row['false_alarms']} in {row['healthy_transfers']:,}"
        )
    cost = look_cost(20 if arguments.quick else 200)
    print(
        f"a look at 1.5 MB: {cost['look_ms']:.1f} ms (decode {cost['decode_ms']:.1f}, compare {cost['compare_ms']:.1f})"
        f" beside {cost['encode_ms']:.1f} ms of encoding"
    )
    real = []
    if arguments.model is not None:
        for row in on_real_frames(arguments.model, 4 if arguments.quick else 12, arguments.texts, arguments.served):
            real.append(row)
            print(json.dumps(row))
    middle = simulated[len(simulated) // 2]
    result = {
        "question": "how soon is a worse codec found, how often is the guard wrong, what does a look cost?",
        "quick": arguments.quick,
        "machine": {"processor": platform.machine(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "share": SHARE,
        "simulated": simulated,
        "look_cost": cost,
        "real_frames": real,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"delay_x2={middle['delay_transfers']['x2']['mean']:.0f} "
        f"false_alarms_in_10000={middle['false_alarms_in_10000']:.4g}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
