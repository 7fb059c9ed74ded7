"""Measured profiles that `benchmarks/controller.py` simulates with: ours of a CPU, KVServe's of a GPU."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from controld.candidates.distill import select_profiles
from controld.candidates.exchange import read_document
from controld.candidates.profile import Profile, StageTime, fit_stage_time
from controld.contract.configuration import Configuration

_GBIT = 1e9 / 8
_MACHINE = "5090_Qwen2.5-7B-Instruct"
_KV_BYTES_PER_TOKEN = 57_344
_PIPELINES = {
    "hadamard+quantiser+ans": (("hadamard", "quantizer", "ans"), 8.83),
    "quantiser+ans": (("quantizer", "ans"), 8.67),
    "quantiser+bitcomp": (("quantizer", "bitcomp"), 6.4),
    "cachegen+bitcomp": (("cachegen", "bitcomp"), 3.75),
}
"""Components, and compression ratios from their tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSet:
    """Profiles, and the traffic and links that suit them.

    Args:
        rates_bytes_per_s: rising; raw is best at the last one, or nearly.
        pause_s: between transfers that come one after another.
    """

    name: str
    workload: str
    profiles: tuple[Profile, ...]
    median_bytes: float
    rates_bytes_per_s: tuple[float, ...]
    chunk_bytes: float
    rtt_s: float
    raw_overhead_s: float
    pause_s: float


def smollm2_profiles() -> ProfileSet:
    """SmolLM2-135M on a CPU, as they come with the project."""
    text = resources.files("controld.sim").joinpath("data", "smollm2_cpu.json").read_text("utf-8")
    measured = read_document(text)
    first = measured[0]
    chosen = select_profiles(
        measured,
        model_fingerprint=first.model_fingerprint,
        workload=first.workload,
        sender_hardware=first.sender_hardware,
        receiver_hardware=first.receiver_hardware,
    )
    return ProfileSet(
        name="SmolLM2, CPU",
        workload=first.workload,
        profiles=tuple(chosen),
        median_bytes=512 * 23_040,
        rates_bytes_per_s=tuple(mbit * 1e6 / 8 for mbit in (13, 50, 200, 800, 4000)),
        chunk_bytes=1.5e6,
        rtt_s=5e-4,
        raw_overhead_s=1e-3,
        pause_s=0.5,
    )


def kvserve_profiles(folder: Path) -> ProfileSet | None:
    """Their speeds on an RTX 5090, Qwen2.5-7B; None where the tables are not there."""
    table = folder / "codec_speed_selected.csv"
    if not table.is_file():
        return None
    rows = [row for row in csv.DictReader(table.read_text().splitlines()) if row["machine_model"] == _MACHINE]

    def side(components: tuple[str, ...], column: str) -> StageTime:
        fits = [_component([row for row in rows if row["type"] == name], column) for name in components]
        return StageTime(sum(fit.a_s for fit in fits), sum(fit.b_s_per_byte for fit in fits))

    profiles = tuple(
        Profile(
            configuration=Configuration({"code": name}),
            workload="general",
            model_fingerprint=_MACHINE,
            # Their quality is accuracy, not nats: all of these pass their own limit, and here quality decides nothing.
            loss_mean_nats=0.005,
            loss_se_nats=0.0001,
            loss_samples=50,
            worst_prompt_tokens=4096,
            ratio=ratio,
            encode=side(components, "enc_GBps"),
            decode=side(components, "dec_GBps"),
            median_transfer_bytes=4096 * _KV_BYTES_PER_TOKEN,
            sender_hardware=_MACHINE,
            receiver_hardware=_MACHINE,
        )
        for name, (components, ratio) in _PIPELINES.items()
    )
    return ProfileSet(
        name="KVServe, GPU",
        workload="general",
        profiles=tuple(replace(profile) for profile in profiles),
        median_bytes=4096 * _KV_BYTES_PER_TOKEN,
        rates_bytes_per_s=tuple(gbit * _GBIT for gbit in (5, 10, 25, 50, 150)),
        # Their data path encodes, sends and decodes a whole request one after the other.
        chunk_bytes=1e12,
        rtt_s=5e-5,
        raw_overhead_s=1e-4,
        pause_s=0.05,
    )


def _component(rows: list[dict[str, str]], column: str) -> StageTime:
    """Seconds of a component by bf16 bytes; entropy coders see one byte for each two of them."""
    raw_bytes = [int(row["input_length"]) * _KV_BYTES_PER_TOKEN for row in rows]
    share = [0.5 if row["input_bytes_basis"] == "uint8" else 1.0 for row in rows]
    seconds = [v * s / (float(row[column]) * 1e9) for v, s, row in zip(raw_bytes, share, rows, strict=True)]
    return fit_stage_time(raw_bytes, seconds)
