"""KVServe's published cases with the speeds and ratios its authors published; skipped where those are not at hand."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controld.candidates.profile import NO_TIME, Profile, StageTime, fit_stage_time
from controld.contract.decision import RAW
from controld.controller.decide import decide
from controld.controller.envelope import Lines, lower_envelope
from controld.controller.explain import find_cell
from controld.controller.goals import ClassGoal
from controld.controller.knobs.base import Corrections
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
    return str(table.arms[mixture.arms[0]].arm_id)


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


def test_the_envelope_is_off_at_150_and_on_at_25_and_5_gbit(profiles: list[Profile], request_for: Build) -> None:
    [item] = request_for(*profiles, raw_overhead=NO_TIME).class_inputs()
    factors = Corrections.none(len(item.models)).factors()
    [intervals] = lower_envelope(SERIAL.lines(item.models, factors, np.array([float(PROMPT_BYTES)])))
    named = {
        gbit: next(i.arm for i in intervals if i.low_bytes_per_s <= gbit * GBIT < i.high_bytes_per_s)
        for gbit in (5.0, 25.0, 150.0)
    }
    assert named[150.0] == 0
    assert 0 not in (named[5.0], named[25.0])
    # The best ratio wins at the lowest rates: cut at break-evens, their table names a worse one there.
    assert item.candidates[intervals[-1].arm].wire_share == min(c.wire_share for c in item.candidates)
    assert [item.candidates[i.arm].arm_id for i in intervals] != [RAW]


PUBLISHED_RATES_GBIT = (5.0, 10.0, 25.0, 40.0, 50.0, 100.0)


def published_order(gbit: float) -> list[str]:
    """Methods by job completion time at a rate, fastest first."""
    with (DATA / "jct_bandwidth.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if float(row["Bandwidth"]) == gbit]
    return [row["Method"].split("(")[0] for row in sorted(rows, key=lambda row: float(row["JCT"]))]


def method_lines(profiles: list[Profile]) -> tuple[tuple[str, ...], Lines]:
    """Each method's codec seconds and wire bytes for 1.25 GB of KV, as published beside the completion times.

    KVServe is two: the profile they timed there, and the one of the best ratio in their libraries, by their speeds.
    """
    with (DATA / "motivation2_codec_time.csv").open() as file:
        rows = {row["Method"]: row for row in csv.DictReader(file)}
    raw_bytes = 1.25e9
    named: list[tuple[str, float, float]] = [("Default", 0.0, raw_bytes)]
    for method, published in (("CacheGen", "Cachegen"), ("KIVI", "KIVI"), ("KVServe", "KVServe")):
        row = rows[published]
        codec_s = float(row["compress_s"]) + float(row["decompress_s"])
        named.append((method, codec_s, float(row["compressed_GB"]) / float(row["original_GB"]) * raw_bytes))
    smallest = max(profiles, key=lambda p: p.ratio)
    codec_s = smallest.encode.seconds(raw_bytes) + smallest.decode.seconds(raw_bytes)
    named.append(("KVServe", codec_s, raw_bytes / smallest.ratio))
    columns = np.array([line[1:] for line in named])
    return tuple(line[0] for line in named), Lines(intercept_s=columns[:, :1, None], slope_bytes=columns[:, 1:, None])


def test_the_order_of_methods_by_bandwidth_is_the_published_one(profiles: list[Profile]) -> None:
    # Their codec seconds and ratios come from one experiment, the completion times from another one. At rest raw would
    # beat CacheGen at 100 Gbit/s (0.10 s against 0.12 s); in their run, which has waiting, it does not, so that one
    # pair is left out.
    methods, lines = method_lines(profiles)
    for gbit in PUBLISHED_RATES_GBIT:
        seconds = lines.seconds(np.array([[1 / (gbit * GBIT)]]))[:, 0, 0]
        ours = list(dict.fromkeys(methods[i] for i in np.argsort(seconds)))
        theirs = published_order(gbit)
        if gbit == 100.0:
            ours, theirs = ([m for m in order if m != "Default"] for order in (ours, theirs))
        assert ours == theirs, gbit


def test_kivi_passes_cachegen_between_the_published_rates_at_which_it_does(profiles: list[Profile]) -> None:
    methods, lines = method_lines(profiles)
    rows = [methods.index("CacheGen"), methods.index("KIVI")]
    pair = Lines(intercept_s=lines.intercept_s[rows], slope_bytes=lines.slope_bytes[rows])
    [(faster_link, slower_link)] = lower_envelope(pair)
    assert (faster_link.arm, slower_link.arm) == (1, 0)
    passes = [published_order(gbit).index("KIVI") < published_order(gbit).index("CacheGen") for gbit in (10.0, 25.0)]
    assert passes == [False, True]
    assert 10 * GBIT < slower_link.high_bytes_per_s < 25 * GBIT
