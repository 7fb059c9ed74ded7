"""KVServe's published cases with the speeds and ratios its authors published; skipped where those are not at hand."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controld.candidates.profile import NO_TIME, Profile, StageTime, fit_stage_time
from controld.contract.decision import RAW
from controld.controller.decide import decide
from controld.controller.explain import find_cell
from controld.controller.goals import ClassGoal
from controld.controller.knobs.kv_transfer import KvTransfer

Build = Callable[..., Any]

DATA = Path(os.environ.get("CONTROLD_KVSERVE_DATA", "data/kvserve"))
MACHINE = "5090_Qwen2.5-7B-Instruct"
KV_BYTES_PER_TOKEN = 57_344
GBIT = 1e9 / 8


def component(name: str, column: str) -> StageTime:
    """Seconds of a component by bf16 KV bytes; entropy coders see one byte for each two of them."""
    with (DATA / "codec_speed_selected.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["machine_model"] == MACHINE and r["type"] == name]
    raw_bytes = [int(row["input_length"]) * KV_BYTES_PER_TOKEN for row in rows]
    share = [0.5 if row["input_bytes_basis"] == "uint8" else 1.0 for row in rows]
    seconds = [v * s / (float(row[column]) * 1e9) for v, s, row in zip(raw_bytes, share, rows, strict=True)]
    return fit_stage_time(raw_bytes, seconds)


def pipeline(names: tuple[str, ...], column: str) -> StageTime:
    parts = [component(name, column) for name in names]
    return StageTime(sum(part.a_s for part in parts), sum(part.b_s_per_byte for part in parts))


@pytest.fixture
def profiles(profile: Build) -> list[Profile]:
    if not (DATA / "codec_speed_selected.csv").exists():
        pytest.skip("KVServe's published figures are not here (CONTROLD_KVSERVE_DATA)")
    pipelines = [
        (("quantizer", "ans"), 8.67),
        (("hadamard", "quantizer", "ans"), 8.83),
        (("cachegen", "bitcomp"), 3.75),
    ]
    return [
        profile(
            index,
            ratio=ratio,
            encode=pipeline(names, "enc_GBps"),
            decode=pipeline(names, "dec_GBps"),
            loss_mean_nats=0.005,
        )
        for index, (names, ratio) in enumerate(pipelines)
    ]


# One 1,024-token prompt, 56 MiB of KV; nothing overlaps in their data path, and raw costs the wire alone.
SERIAL = KvTransfer(chunk_bytes=1e12, rtt_s=0.0, exclusive_connection=False)
PROMPT_BYTES = 1024 * KV_BYTES_PER_TOKEN


def choose(profiles: list[Profile], request_for: Build, gbit: float) -> str:
    goal = ClassGoal(name="default", workload="dialogue", max_quality_loss_nats=0.02, explore_share=0.0)
    table = decide([request_for(*profiles, goals=(goal,), raw_overhead=NO_TIME)], knob=SERIAL).tables[0]
    mixture = table.mixtures[table.cells[find_cell(table, "default", PROMPT_BYTES, gbit * GBIT, 0.0)]]
    return table.arms[mixture.arms[0]].arm_id


@pytest.mark.parametrize("gbit", [5.0, 25.0])
def test_on_at_5_and_25_gbit(profiles: list[Profile], request_for: Build, gbit: float) -> None:
    assert choose(profiles, request_for, gbit) != RAW


def test_off_at_150_gbit(profiles: list[Profile], request_for: Build) -> None:
    assert choose(profiles, request_for, 150.0) == RAW


def test_the_break_even_is_that_of_the_sum_of_both_codec_sides(profiles: list[Profile], request_for: Build) -> None:
    # By hand from the speeds: coding pays below (1 - 1/r) V / (encode + decode); quantiser and ANS, 1,024 tokens.
    p = profiles[0]
    codec_s = p.encode.seconds(PROMPT_BYTES) + p.decode.seconds(PROMPT_BYTES)
    break_even_gbit = (1 - 1 / p.ratio) * PROMPT_BYTES / codec_s / GBIT
    assert 30 < break_even_gbit < 50
    assert choose([p], request_for, break_even_gbit / 2) == p.arm_id
    assert choose([p], request_for, break_even_gbit * 1.5) == RAW
