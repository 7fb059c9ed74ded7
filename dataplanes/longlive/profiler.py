"""Measures settings of the reference engine: what they lose on held-out clips, what a chunk takes, what they hold.

A grid, not a search: the engine's lossy space restricted to a few values of each parameter. The document is what
`controld candidates --import FILE` reads. Quality is the paired excess over the full setting on the same clips, so the
full setting loses exactly nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from controld.contract.configuration import Configuration, Value
from controld.contract.errors import FieldError
from controld.contract.video import ChunkReport, MemorySplit
from dataplanes.longlive import settings
from dataplanes.longlive.engine import LoadSpec, SessionSpec, VideoEngine
from dataplanes.longlive.reference.checkpoint import TRAINED_NAME, UNTRAINED_NAME
from dataplanes.longlive.reference.engine import ReferenceEngine
from dataplanes.longlive.reference.quality import Quality, QualityMeter
from dataplanes.longlive.reference.setting import FULL, SPACE
from dataplanes.longlive.reference.weights import TRAINED

_log = logging.getLogger(__name__)

FORMAT: Final = "controld-video-profiles"
VERSION: Final = 1
WORKLOAD: Final = "shapes"
PROMPT: Final = "a red square moves sideways"

GRID: Final[Mapping[str, tuple[Value, ...]]] = {
    settings.WEIGHTS: ("bf16", "nvfp4"),
    settings.ACTIVATIONS: ("bf16", "nvfp4"),
    settings.BLOCK_RULE: ("4over6",),
    settings.KV: ("bf16", "nvfp4"),
    settings.KV_SMOOTH: ("token_mean",),
    settings.STEPS: (1, 2, 4),
    settings.WINDOW: (9, 15),
    settings.SINK: (3,),
    settings.MULTI_SHOT: ("yes", "no"),
    settings.VAE: ("async",),
    settings.RANKS: (1,),
}
"""What is measured unless one says otherwise: precision, steps and window."""

_WARM_CHUNKS = 2
_TIMED_CHUNKS = 6
"""With the warm ones, enough to fill the largest window."""


def grid_settings(grid: Mapping[str, Sequence[Value]]) -> Iterator[Configuration]:
    """The points of the restricted space, the full setting first. Raises: FieldError: an unknown parameter or value."""
    yield FULL
    for configuration in SPACE.restrict(grid).enumerate():
        # A small window has no room for a second sink: elsewhere the usual one is enough.
        usual = configuration[settings.WINDOW] == 9 or configuration[settings.MULTI_SHOT] == "yes"
        if configuration != FULL and usual:
            yield configuration


def model_fingerprint(checkpoint: str) -> str:
    """SHA-256 over the weights, hexadecimal; of the untrained ones over their name, for they come from a seed."""
    digest = hashlib.sha256(b"reference")
    if checkpoint == UNTRAINED_NAME:
        return hashlib.sha256(b"reference untrained").hexdigest()
    folder = TRAINED if checkpoint == TRAINED_NAME else Path(checkpoint)
    for name in ("dit.safetensors", "vae.safetensors"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def hardware_name() -> str:
    """As an agent of this process announces itself."""
    return f"cpu/{torch.__version__}/{torch.get_num_threads()}"


def time_setting(
    engine: VideoEngine, configuration: Configuration, checkpoint: str, *, two: bool = False
) -> tuple[tuple[ChunkReport, ...], MemorySplit]:
    """Reports of some chunks of one session, the first ones left out, and the memory at the end.

    Args:
        two: whether a second session follows, so that the memory is that of two.

    Raises:
        EngineError: the setting is refused.
    """
    engine.load(LoadSpec(checkpoint=checkpoint, setting=configuration))
    try:
        engine.open(SessionSpec(session_id="profile", prompt=PROMPT, seed=1))
        reports = [engine.step("profile").report for _ in range(_WARM_CHUNKS + _TIMED_CHUNKS)]
        memory = reports[-1].memory
        if two:
            engine.open(SessionSpec(session_id="second", prompt=PROMPT, seed=2))
            memory = [engine.step("second").report.memory for _ in reports][-1]
    finally:
        engine.unload()
    return tuple(reports[_WARM_CHUNKS:]), memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One setting.

    Args:
        reports: of its timed chunks.
        memory_of_two: with a second session.
        quality: over held-out clips.
        frames_per_chunk: of the engine.
    """

    configuration: Configuration
    reports: tuple[ChunkReport, ...]
    memory_of_two: MemorySplit
    quality: Quality
    frames_per_chunk: int


def profile_document(measured: Measured, reference: Measured, checkpoint: str) -> dict[str, Any]:
    """One profile as the daemon reads it.

    Seconds are those of the least disturbed chunk: what else the machine does is learned while serving, not profiled.

    Motion is in the unit of a chunk report's flicker, so that the guard can compare: the full setting's flicker on the
    timed clip, times how much of its motion this setting keeps on the held-out clips.

    Raises:
        FieldError: too few segments for a standard error.
    """
    reports, quality = measured.reports, measured.quality
    if len(quality.segments) < 2:
        raise FieldError("segments", "one segment has no standard error", hint="at least 2")
    excess, error = (0.0, 0.0) if measured is reference else quality.excess(reference.quality)
    memory = reports[-1].memory
    decoded = [report.vae_s for report in reports if report.vae_s > 0]
    flicker = statistics.fmean(report.flicker for report in reference.reports)
    kept = quality.motion / reference.quality.motion if reference.quality.motion > 0 else 1.0
    return {
        "kind": "video",
        "format": 1,
        "configuration": dict(measured.configuration),
        "source": "measured",
        "workload": WORKLOAD,
        "model_fingerprint": model_fingerprint(checkpoint),
        "hardware": hardware_name(),
        "forward_s": min(report.dit_s / (len(report.denoise_s) + 1) for report in reports),
        "vae_s": min(decoded, default=0.0),
        "frames_per_chunk": measured.frames_per_chunk,
        "loss_mean": excess,
        "loss_se": error,
        "loss_samples": len(quality.segments),
        "memory": {
            "weights_bytes": memory.weights_bytes,
            "kv_bytes": memory.kv_bytes,
            "activation_bytes": memory.activation_bytes,
            "session_bytes": max(_total(measured.memory_of_two) - _total(memory) - memory.kv_bytes, 0),
        },
        "drift": statistics.fmean(report.drift for report in reports),
        "motion": flicker * kept,
        "measured_unix_s": time.time(),
        "provenance": f"grid, {len(quality.segments)} held-out clips, loss beyond the full setting",
    }


def measure_grid(
    configurations: Iterable[Configuration], *, checkpoint: str, segments: int
) -> Iterator[dict[str, Any]]:
    """Profiles one by one. The first configuration is what the others' quality is compared with.

    Raises:
        EngineError: no such checkpoint.
        FieldError: too few segments.
    """
    meter, reference = QualityMeter(checkpoint), None
    for configuration in configurations:
        engine = ReferenceEngine()
        reports, memory_of_two = time_setting(engine, configuration, checkpoint, two=True)
        measured = Measured(
            configuration=configuration,
            reports=reports,
            memory_of_two=memory_of_two,
            quality=meter.measure(configuration, range(segments)),
            frames_per_chunk=engine.capabilities().frames_per_chunk,
        )
        reference = reference or measured
        document = profile_document(measured, reference, checkpoint)
        _log.info(
            "%s loss %+.4f +- %.4f, %.0f ms a pass, %d kB",
            configuration.canonical_json, document["loss_mean"], document["loss_se"], document["forward_s"] * 1e3,
            sum(document["memory"].values()) // 1000,
        )  # fmt: skip
        yield document


def _total(memory: MemorySplit) -> int:
    return memory.weights_bytes + memory.kv_bytes + memory.activation_bytes


def even_out(profiles: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The profiles with equal work at equal times: the least disturbed one's.

    A pass does not depend on the number of steps, and decoding on nothing that the grid turns; what their times differ
    by is the machine's, not theirs.
    """

    def pass_of(profile: Mapping[str, Any]) -> Configuration:
        values = profile["configuration"].items()
        return Configuration({name: value for name, value in values if name != settings.STEPS})

    passes: dict[Configuration, float] = {}
    for profile in profiles:
        kind = pass_of(profile)
        passes[kind] = min(passes.get(kind, math.inf), profile["forward_s"])
    vae_s = min((profile["vae_s"] for profile in profiles if profile["vae_s"] > 0), default=0.0)
    return [{**profile, "forward_s": passes[pass_of(profile)], "vae_s": vae_s} for profile in profiles]


def write_document(path: Path, profiles: Sequence[Mapping[str, Any]]) -> None:
    """The document that an import reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"format": FORMAT, "version": VERSION, "profiles": list(profiles)}
    path.write_text(json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n")


def main() -> None:
    """Measure the grid and write it."""
    parser = argparse.ArgumentParser(description="Measure settings of the CPU reference engine.")
    parser.add_argument("--out", type=Path, default=Path("build/video/profiles.json"))
    parser.add_argument("--segments", type=int, default=12, help="held-out clips for each setting")
    parser.add_argument("--checkpoint", default=TRAINED_NAME)
    parser.add_argument("--grid", type=json.loads, default={}, help='such as {"steps": [2, 4]}, in place of the usual')
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    chosen = grid_settings({**GRID, **arguments.grid})
    profiles = even_out(list(measure_grid(chosen, checkpoint=arguments.checkpoint, segments=arguments.segments)))
    write_document(arguments.out, profiles)
    print(f"{len(profiles)} profiles in {arguments.out}: controld candidates --import {arguments.out}")


if __name__ == "__main__":
    main()
