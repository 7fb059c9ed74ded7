"""The CPU reference engine: asynchronous decoding, NVFP4 history, four-bit weights, ranks; each beside its limit.

    python benchmarks/longlive.py [--quick] [--output build/benchmarks/longlive.json]

Times are wall times of the same clip in one process, one torch thread for the transformer and one for the decoder, the
best of several runs in turn. Losses are `QualityMeter`'s, on clips that are held out, with the standard error of the
difference to the full setting clip by clip. Everything is measured on this machine's CPU; formats below bf16 are
emulated, so that their bytes and losses are theirs and their times are not.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from controld.contract.configuration import Configuration, Value
from dataplanes.longlive.engine import LoadSpec, SessionSpec
from dataplanes.longlive.reference.checkpoint import TRAINED_NAME, full_transformer
from dataplanes.longlive.reference.engine import ReferenceEngine
from dataplanes.longlive.reference.exchange import NoExchange
from dataplanes.longlive.reference.generator import Generator
from dataplanes.longlive.reference.kv_tensor import KvRule
from dataplanes.longlive.reference.model import ModelShape
from dataplanes.longlive.reference.parallel import RankGroup, RankModel
from dataplanes.longlive.reference.quality import Quality, QualityMeter
from dataplanes.longlive.reference.rolling_cache import CacheLimits, ChunkPlace
from dataplanes.longlive.reference.setting import FULL
from dataplanes.longlive.reference.shapes import Prompt

W4A4: dict[str, Value] = {"weights": "nvfp4", "activations": "nvfp4", "block_rule": "plain"}
W4A4_FOUR_OVER_SIX: dict[str, Value] = {**W4A4, "block_rule": "4over6"}
KV4: dict[str, Value] = {"kv": "nvfp4", "kv_smooth": "token_mean"}
QUICK: tuple[dict[str, Value], ...] = ({"steps": 2}, KV4, W4A4)
ALL: tuple[dict[str, Value], ...] = (
    *({"steps": steps} for steps in (1, 2, 8)),
    {"kv": "fp8", "kv_smooth": "none"},
    {"kv": "nvfp4", "kv_smooth": "none"},
    KV4,
    {**W4A4, "activations": "bf16"},
    *({**W4A4, "steps": steps} for steps in (1, 2, 4, 8)),
    *({**W4A4_FOUR_OVER_SIX, "steps": steps} for steps in (2, 4)),
    {**W4A4_FOUR_OVER_SIX, **KV4, "steps": 2},
)


def changed(change: dict[str, Value]) -> Configuration:
    """The full setting with other values."""
    return Configuration({**FULL, **change})


def film(vae: str, chunks: int) -> tuple[float, float]:
    """Seconds of all steps of a clip, and of closing it."""
    engine = ReferenceEngine()
    engine.load(LoadSpec(checkpoint=TRAINED_NAME, setting=changed({"vae": vae})))
    engine.open(SessionSpec(session_id="clip", prompt="a yellow cross moves around"))
    begin = time.perf_counter()
    for _ in range(chunks):
        engine.step("clip")
    stepped = time.perf_counter()
    engine.close("clip")
    return stepped - begin, time.perf_counter() - stepped


def measure_decoding(chunks: int, runs: int) -> dict[str, float]:
    """Asynchronous and synchronous decoding against denoising alone and decoding alone."""
    best: dict[str, float] = {}
    for _ in range(runs):
        denoising, decoding = film("batch", chunks)
        found = {
            "denoising_alone_s": denoising,
            "decoding_alone_s": decoding,
            "stream_s": sum(film("stream", chunks)),
            "async_s": sum(film("async", chunks)),
        }
        best = {name: min(seconds, best.get(name, seconds)) for name, seconds in found.items()}
    limit = max(best["denoising_alone_s"], best["decoding_alone_s"])
    return {
        **best,
        "async_over_limit": best["async_s"] / limit,
        "async_over_stream": best["async_s"] / best["stream_s"],
    }


def measure_history() -> dict[str, float]:
    """Bytes of full windows in bf16 over those in NVFP4, as the engine holds them."""
    held = []
    for change in ({}, {"kv": "nvfp4", "kv_smooth": "none"}):
        engine = ReferenceEngine()
        engine.load(LoadSpec(checkpoint=TRAINED_NAME, setting=changed({**change, "steps": 1})))
        engine.open(SessionSpec(session_id="clip", prompt="a yellow cross moves around"))
        for _ in range(5):
            report = engine.step("clip").report
        held.append(report.memory.kv_bytes)
    return {"bf16_bytes": held[0], "nvfp4_bytes": held[1], "kv_bytes_ratio": held[0] / held[1]}


def measure_quality(changes: Sequence[dict[str, Value]], clips: int) -> list[dict[str, Any]]:
    """Loss and motion of settings, and what they lose beyond the full one."""
    meter = QualityMeter()
    reference = meter.measure(FULL, range(clips))
    rows = [_row("VAE alone", meter.reconstruct(range(clips)), reference), _row("full", reference, reference)]
    for change in changes:
        rows.append(_row(json.dumps(change), meter.measure(changed(change), range(clips)), reference))
        print(_line(rows[-1]), flush=True)
    return rows


def _row(name: str, quality: Quality, reference: Quality) -> dict[str, Any]:
    beyond, error = quality.excess(reference)
    return {
        "setting": name,
        "loss": quality.loss,
        "loss_standard_error": quality.standard_error,
        "motion": quality.motion,
        "beyond_full": beyond,
        "beyond_full_standard_error": error,
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['setting']:90} loss {row['loss']:.4f}, beyond full {row['beyond_full']:+.4f} "
        f"+- {row['beyond_full_standard_error']:.4f}, motion {row['motion']:.2f}"
    )


def check_ranks() -> dict[str, bool]:
    """Whether 2 and 4 ranks make the bits of one, in float64."""
    shape, limits, rule = (
        ModelShape(),
        CacheLimits(window=3, sink=1, pins_shot=False),
        KvRule(plain_dtype=torch.float64),
    )
    found = {}
    alone = Generator(full_transformer(TRAINED_NAME, shape).double(), NoExchange())
    expected = _latents(alone, limits, rule)
    for ranks in (2, 4):
        group = RankGroup(RankModel(checkpoint=TRAINED_NAME, shape=shape, precisions=()), ranks)
        try:
            found[f"{ranks}_ranks_equal"] = torch.equal(_latents(group, limits, rule), expected)
        finally:
            group.stop()
    return found


def _latents(generator: Generator | RankGroup, limits: CacheLimits, rule: KvRule) -> torch.Tensor:
    generator.open("clip", limits, rule)
    made = [generator.make("clip", ChunkPlace(chunk=chunk), Prompt(1, 2, 3), 0, 2) for chunk in range(4)]
    return torch.cat([chunk.latents for chunk in made])


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="under 50 seconds: fewer chunks, clips and settings")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks/longlive.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    decoding = measure_decoding(*((16, 2) if arguments.quick else (48, 4)))
    print(json.dumps({name: round(value, 3) for name, value in decoding.items()}), flush=True)
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "decoding": decoding,
        "history": measure_history(),
        "quality": measure_quality(QUICK, 6) if arguments.quick else measure_quality(ALL, 24),
    }
    if not arguments.quick:
        result["ranks"] = check_ranks()
        print(json.dumps(result["ranks"]), flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1))
    print(
        f"async_over_limit={decoding['async_over_limit']:.2f} kv_bytes_ratio={result['history']['kv_bytes_ratio']:.2f}"
    )


if __name__ == "__main__":
    main()
