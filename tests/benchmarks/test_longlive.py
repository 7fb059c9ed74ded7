"""The video engine's benchmark: what its figures are of, and that its quick form runs."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplanes.longlive.reference.quality import Quality, SegmentLoss
from dataplanes.longlive.reference.setting import FULL, SPACE

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import longlive  # noqa: E402 - benchmarks are scripts, not a package
import longlive_decoding  # noqa: E402
import longlive_front  # noqa: E402
import longlive_published  # noqa: E402
import longlive_quality  # noqa: E402
import longlive_windows  # noqa: E402
from longlive_decoding import Film  # noqa: E402
from longlive_front import Point, front  # noqa: E402
from longlive_quality import Difference  # noqa: E402

torch.set_num_threads(1)


def film(
    total_s: float, dit_s: float, vae_s: float | None, *, closing_s: float = 0.0, core_wait_s: float = 0.0
) -> Film:
    return Film(
        total_s=total_s, dit_s=dit_s, vae_s=vae_s, closing_s=closing_s, ahead=(1, 2), held_back_s=0.0,
        core_wait_s=core_wait_s,
    )  # fmt: skip


QUIET = {"batch": film(10, 6, None, closing_s=4), "stream": film(11, 7, 4), "async": film(8, 7.5, 4.5)}
BUSY = {**QUIET, "async": film(20, 19, 18, core_wait_s=5)}


def test_a_clip_is_held_against_the_longer_part_of_its_own_run_and_of_the_parts_alone() -> None:
    ratios = longlive_decoding.turn_ratios(QUIET)
    assert ratios["async_over_limit"] == pytest.approx(8 / 7.5)
    assert ratios["async_over_alone"] == pytest.approx(8 / 6)
    assert ratios["async_over_stream"] == pytest.approx(8 / 11)
    assert ratios["best_over_stream"] == pytest.approx(7 / 11)
    slow = {**QUIET, "batch": film(10, 3, None, closing_s=7), "async": film(8, 3, 7.6)}
    assert longlive_decoding.turn_ratios(slow)["async_over_alone"] == pytest.approx(8 / 7)
    assert longlive_decoding.turn_ratios(slow)["async_over_limit"] == pytest.approx(8 / 7.6)


def test_turns_on_a_busy_machine_do_not_count_where_there_are_quiet_ones() -> None:
    mixed = longlive_decoding.summarise([BUSY, QUIET, BUSY], 2)
    assert (mixed["turns"], mixed["quiet_turns"]) == (3, 1)
    assert mixed["async_over_limit_by_turn"] == [pytest.approx(8 / 7.5)]
    assert mixed["modes"]["batch"]["vae_s"] == 4
    busy = longlive_decoding.summarise([BUSY, BUSY], 2)
    assert (busy["quiet_turns"], busy["async_over_limit"]) == (0, pytest.approx(20 / 19))
    assert busy["core_wait_share"] == pytest.approx(0.25)


@pytest.mark.parametrize("quick", [True, False])
def test_settings_are_of_the_space_and_comparisons_differ_in_one_thing(quick: bool) -> None:
    asked = longlive_quality.settings(quick=quick)
    by_name = {one.name: one.configuration for one in asked}
    assert len(by_name) == len({one.config_id for one in by_name.values()}) == len(asked)
    for configuration in by_name.values():
        SPACE.validate(configuration)
    pairs = longlive_quality.comparisons(by_name)
    assert set(longlive.CLAIMS[:2] if quick else longlive.CLAIMS) <= set(pairs)
    things = ({"steps"}, {"weights", "activations", "block_rule"}, {"kv", "kv_smooth"})
    for name, against in pairs:
        one, other = by_name[name], by_name[against]
        changed = {key for key in {*one, *other} if one.get(key) != other.get(key)}
        assert sum(bool(changed & thing) for thing in things) == 1, (name, against)
    emulated = {one.name for one in asked if one.is_emulated}
    assert "bf16, 2 steps" not in emulated
    assert {"W4A4, 4 steps", "KV nvfp4"} <= emulated


def quality(losses: dict[int, float], motion: float = 1.0) -> Quality:
    return Quality(
        setting_id="x",
        segments=tuple(SegmentLoss(segment=n, loss=loss, motion=motion * n, flicker=0.0) for n, loss in losses.items()),
    )


def test_differences_are_taken_session_by_session() -> None:
    one, other = quality({1: 0.3, 2: 0.9}), quality({1: 0.2, 2: 0.7}, motion=0.5)
    loss = longlive_quality.loss_difference(one, other)
    assert (loss.mean, loss.error) == (pytest.approx(0.15), pytest.approx(0.05))
    assert loss.sigmas == pytest.approx(3)
    motion = longlive_quality.motion_difference(one, other)
    assert (motion.mean, motion.error) == (pytest.approx(0.75), pytest.approx(0.25))
    with pytest.raises(ValueError, match="other segments"):
        longlive_quality.motion_difference(one, quality({1: 0.2, 3: 0.7}))


def test_only_what_is_beyond_three_standard_errors_is_a_difference() -> None:
    assert Difference(mean=-0.31, error=0.1).is_significant
    assert not Difference(mean=0.29, error=0.1).is_significant
    assert not Difference(mean=0.0, error=0.0).is_significant
    assert not Difference(mean=0.5, error=math.inf).is_significant


def point(name: str, loss: float, chunk_s: float, held_bytes: int) -> Point:
    return Point(name=name, loss=loss, chunk_s=chunk_s, held_bytes=held_bytes, is_emulated=False)


def test_the_front_has_what_nothing_else_beats_in_everything() -> None:
    best = point("best", 0.1, 1.0, 100)
    worse, small = point("worse", 0.2, 1.2, 100), point("small", 0.3, 5.0, 50)
    assert front([worse, best, small]) == [best, small]
    assert best.dominates(replace(best, name="later", loss=0.2, chunk_s=0.97)), "three per cent is scatter"
    assert not best.dominates(replace(best, name="faster", loss=0.2, chunk_s=0.9))
    assert front([best, replace(best, name="twin", chunk_s=1.04)]) == [best, replace(best, name="twin", chunk_s=1.04)]


def test_the_time_of_an_emulation_helps_it_in_nothing() -> None:
    nvfp4 = replace(point("KV nvfp4", 0.1282, 0.037, 110_720), is_emulated=True)
    smooth = replace(point("KV nvfp4 smooth", 0.1305, 0.034, 114_816), is_emulated=True)
    assert front([nvfp4, smooth]) == [nvfp4]
    computed = point("bf16", 0.12, 0.05, 100_000)
    assert front([computed, nvfp4]) == [computed], "quicker than what is better"
    larger = replace(computed, loss=0.2, held_bytes=200_000)
    assert front([larger, nvfp4]) == [larger, nvfp4], "nobody knows which is quicker"
    assert front([computed, replace(nvfp4, held_bytes=90_000)]) == [computed, replace(nvfp4, held_bytes=90_000)]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.1, 0.2, 0.3]), st.floats(0.01, 0.012), st.sampled_from([1, 2, 3]), st.booleans()),
        min_size=1,
    )
)
def test_there_always_is_a_front(values: list[tuple[float, float, int, bool]]) -> None:
    points = [
        replace(point(str(number), *value), is_emulated=is_emulated)
        for number, (*value, is_emulated) in enumerate(values)
    ]
    assert front(points)


def test_settings_join_their_costs_and_the_vae_alone_is_none() -> None:
    rows = [{"name": longlive_quality.VAE_ALONE, "loss": 0.1}, {"name": "a", "loss": 0.2, "is_emulated": True}]
    costs = {"a": {"chunk_s": 0.5, "weights_bytes": 1, "kv_bytes": 2, "activation_bytes": 4}}
    assert longlive_front.points_of(rows, costs) == [replace(point("a", 0.2, 0.5, 7), is_emulated=True)]


@pytest.mark.parametrize("case", longlive_published.CASES, ids=lambda case: f"{case.device} {case.name}")
def test_the_controller_chooses_the_published_best(case: longlive_published.Case) -> None:
    found = longlive_published.decide(case)
    assert found["is_expected"], found
    if case.device == "H100":
        assert any("15.5 against 18.6 FPS" in reason for reason in found["verdicts"][case.must_reject])


def test_what_is_not_chosen_as_published_is_said() -> None:
    case = replace(longlive_published.CASES[0], expected="BF16 4-step")
    assert not longlive_published.decide(case)["is_expected"]


def test_the_last_line_has_what_was_measured() -> None:
    report = {"decoding": {"async_over_limit": 1.0449}, "history": {"ratio": {"KV nvfp4": 3.5514}}}
    assert longlive.last_line(report) == "async_over_limit=1.04 kv_bytes_ratio=3.55"
    assert longlive.last_line({}) == "async_over_limit=- kv_bytes_ratio=-"


@pytest.mark.slow
def test_a_slow_decoder_holds_denoising_back() -> None:
    # More than once, for a busy machine may hold up the denoising instead.
    found = [longlive_decoding.film("async", 12, "untrained", slow_decoder=True) for _ in range(3)]
    assert max(max(one.ahead) for one in found) == 2, "one that is decoded and one that waits"
    batch = [longlive_decoding.film("batch", 12, "untrained", slow_decoder=True) for _ in range(3)]
    assert {one.ahead for one in batch} == {tuple(range(1, 13))}
    assert {one.vae_s for one in batch} == {None}
    assert min(one.closing_s for one in batch) > min(one.dit_s for one in batch)


@pytest.mark.slow
def test_history_in_nvfp4_takes_what_its_format_says() -> None:
    ratio = longlive_quality.measure_history_bytes("untrained")["ratio"]
    values = 48 * 128
    assert ratio["KV nvfp4"] == pytest.approx(2 * values / (0.5625 * values + 4))
    assert ratio["KV fp8"] == pytest.approx(2 * values / (values + 4))
    assert ratio["KV nvfp4 smooth"] < ratio["KV nvfp4"]


def test_windows_differ_in_the_window_and_the_history_alone() -> None:
    found = longlive_windows.windows()
    assert len(found) == 6
    for (name, window), configuration in found.items():
        SPACE.validate(configuration)
        assert configuration["window"] == window
        assert configuration["kv"] == name.removeprefix("KV ")
    assert len({tuple(one[key] for key in FULL if key not in ("window", "kv")) for one in found.values()}) == 1


@pytest.mark.slow
def test_a_window_of_15_holds_and_reads_twice_that_of_9() -> None:
    rows = {(row["name"], row["window"]): row for row in longlive_windows.measure_windows(3, "untrained")}
    assert set(rows) == set(longlive_windows.windows())
    for name in longlive_windows.FORMATS:
        assert rows[name, 15]["kv_bytes"] == 2 * rows[name, 9]["kv_bytes"] > 0
    assert all(0 < row["reading_s"] < row["chunk_s"] for row in rows.values())
    # Four earlier chunks against two, and the one that is made.
    assert rows["KV nvfp4", 15]["reading_s"] > 1.2 * rows["KV nvfp4", 9]["reading_s"]


@pytest.mark.slow
def test_the_quick_benchmark_runs_and_its_last_line_parses(tmp_path: Path) -> None:
    out = tmp_path / "longlive.json"
    command = [sys.executable, str(ROOT / "benchmarks/longlive.py"), "--quick", "--sessions", "2", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT, check=True)
    last = re.fullmatch(r"async_over_limit=(\d+\.\d\d) kv_bytes_ratio=(\d+\.\d\d)", done.stdout.splitlines()[-1])
    assert last is not None
    assert float(last[1]) >= 1
    assert float(last[2]) == 3.55
    report = json.loads(out.read_text())
    assert [row["float64_bits_equal"] for row in report["ranks"]] == [True, True]
    assert report["ranks"][1]["sent_bytes_per_chunk"] > 0
    assert {row["window"] for row in report["history"]["windows"]} == {9, 15}
    assert any(row["on_front"] for row in report["front"])
    assert out.with_suffix(".svg").stat().st_size > 0
    measured, published = done.stdout.split("PUBLISHED FIGURES")
    assert "GB200" not in measured
    assert "W4A4" not in published
