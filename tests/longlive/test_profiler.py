"""Settings of the real reference engine measured (untrained), and read by the daemon's import."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controld.admin.backend import CandidateImport
from controld.admin.candidate_exchange import CandidateExchange
from controld.candidates.stored import ProfileFilter
from controld.candidates.video_exchange import read_video_profiles
from controld.candidates.video_profile import Source
from controld.contract.clock import SystemClock
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.video import MemorySplit
from controld.store.sqlite import SqliteStore
from dataplanes.longlive import profiler
from dataplanes.longlive.reference.quality import Quality, SegmentLoss
from dataplanes.longlive.reference.setting import FULL, SPACE


def test_the_grid_is_part_of_the_engines_space_and_begins_with_the_full_setting() -> None:
    chosen = list(profiler.grid_settings(profiler.GRID))
    assert chosen[0] == FULL
    assert len(set(chosen)) == len(chosen) == 36
    for configuration in chosen:
        SPACE.validate(configuration)
    with pytest.raises(FieldError, match="steps"):
        list(profiler.grid_settings({**profiler.GRID, "steps": (3,)}))


ONE = MemorySplit(weights_bytes=100, kv_bytes=40, activation_bytes=50)


def quality(*losses: float, flicker: float = 1.0) -> Quality:
    # Motion, which is squared and in another unit, is not what a chunk reports.
    motion = 0.3 * flicker**2
    segments = tuple(SegmentLoss(segment=n, loss=loss, motion=motion, flicker=flicker) for n, loss in enumerate(losses))
    return Quality(setting_id="x", segments=segments)


def measured(found: Quality, report: Callable[..., Any], configuration: Configuration = FULL) -> profiler.Measured:
    reports = tuple(report(denoise_s=(0.1,) * 4, recache_s=0.1, vae_s=0.2, flicker=0.04, memory=ONE) for _ in range(3))
    two = MemorySplit(weights_bytes=100, kv_bytes=80, activation_bytes=57)
    return profiler.Measured(
        configuration=configuration, reports=reports, memory_of_two=two, quality=found, frames_per_chunk=12
    )


def document(*profiles: dict[str, Any]) -> str:
    return json.dumps({"format": profiler.FORMAT, "version": profiler.VERSION, "profiles": profiles})


def test_a_profile_is_the_paired_excess_and_the_daemon_reads_it(report: Callable[..., Any]) -> None:
    full = measured(quality(0.1, 0.5, 0.3), report)
    other = measured(quality(0.2, 0.7, 0.3, flicker=0.8), report, Configuration({**FULL, "steps": 2}))
    one, two = (profiler.profile_document(each, full, "untrained") for each in (full, other))
    found = read_video_profiles(document(one, two))
    assert (found[0].loss_mean, found[0].loss_upper) == (0.0, 0.0)
    assert found[0].motion == pytest.approx(0.04)
    assert found[1].loss_mean == pytest.approx(0.1)
    assert found[1].loss_se == pytest.approx(0.0577, rel=0.01), "of the differences, not of the losses"
    assert found[1].motion == pytest.approx(0.032)
    assert found[0].forward_s == pytest.approx(0.1)
    assert found[0].vae_s == pytest.approx(0.2)
    assert found[0].source is Source.MEASURED
    assert found[0].memory is not None
    assert (found[0].memory.total(1), found[0].memory.total(2)) == (190, 237), "as one and two sessions held"
    with pytest.raises(FieldError, match="at least 2"):
        profiler.profile_document(measured(quality(0.1), report), full, "untrained")


def test_reports_that_brought_no_frames_say_nothing_of_a_profiles_motion(report: Callable[..., Any]) -> None:
    full = measured(quality(0.1, 0.5), report)
    late = replace(full.reports[0], frames=0, flicker=0.0)
    some = replace(full, reports=(*full.reports, late, late))
    (found,) = read_video_profiles(document(profiler.profile_document(some, some, "untrained")))
    assert found.motion == pytest.approx(0.04)
    none = replace(full, reports=(late, late))
    (found,) = read_video_profiles(document(profiler.profile_document(none, none, "untrained")))
    assert found.motion is None, "not measured, which is not the same as none"


def test_equal_work_is_given_equal_time_that_of_the_least_disturbed() -> None:
    def timed(kv: str, steps: int, forward_s: float, vae_s: float) -> dict[str, Any]:
        return {"configuration": {"kv": kv, "steps": steps}, "forward_s": forward_s, "vae_s": vae_s}

    found = profiler.even_out([timed("bf16", 4, 0.03, 0.2), timed("bf16", 2, 0.02, 0.1), timed("nvfp4", 4, 0.05, 0.0)])
    assert [each["forward_s"] for each in found] == [0.02, 0.02, 0.05]
    assert {each["vae_s"] for each in found} == {0.1}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: d.update(version=2), "version"),
        (lambda d: d.update(more=1), "more"),
        (lambda d: d["profiles"].append(d["profiles"][0]), "profiles[1]"),
        (lambda d: d["profiles"][0].update(forward_s=-1), "profiles[0].forward_s"),
        (lambda d: d["profiles"][0].update(measured_unix_s=1e11), "profiles[0].measured_unix_s"),
        (lambda d: d["profiles"].append(3), "profiles[1]"),
        (lambda d: d["profiles"][0].update(forward_s=0), "profiles[0].forward_s"),
        (lambda d: d["profiles"][0].update(forward_s=None), "profiles[0].forward_s"),
        (lambda d: d["profiles"][0].update(vae_s=True), "profiles[0].vae_s"),
        (lambda d: d["profiles"][0].update(loss_samples=8.5), "profiles[0].loss_samples"),
        (lambda d: d["profiles"][0].update(frames_per_chunk=2.5), "profiles[0].frames_per_chunk"),
        (lambda d: d["profiles"][0].update(loss_se=None), "profiles[0].loss_se"),
        (lambda d: d["profiles"][0].update(measured_unix_s=None), "profiles[0].measured_unix_s"),
        (lambda d: d["profiles"][0].update(hardware="\udc00"), "profiles[0].hardware"),
        (lambda d: d["profiles"][0].update(hardware="\x1b[2J"), "profiles[0].hardware"),
        (lambda d: d["profiles"][0].update(hardware="x" * 2000), "profiles[0].hardware"),
        (lambda d: d["profiles"][0].update(workload=""), "profiles[0].workload"),
        (lambda d: d["profiles"][0].update(source="published"), "profiles[0].source"),
        (
            lambda d: d["profiles"][0]["configuration"].update(steps=10**400),
            "profiles[0].configuration.steps",
        ),
        (
            lambda d: d["profiles"][0]["configuration"].update(kv="\x1b[2J"),
            "profiles[0].configuration.kv",
        ),
        (lambda d: d["profiles"][0]["configuration"].update(kv="x" * 5000), "profiles[0].configuration"),
    ],
)
def test_a_broken_document_is_refused_by_field(
    change: Callable[[dict[str, Any]], Any], field: str, report: Callable[..., Any]
) -> None:
    full = measured(quality(0.1, 0.2), report)
    broken = json.loads(document(profiler.profile_document(full, full, "untrained")))
    change(broken)
    with pytest.raises(FieldError) as caught:
        read_video_profiles(json.dumps(broken), latest_unix_s=1e10)
    assert caught.value.field == field


async def test_an_import_takes_video_profiles_and_keeps_the_newer_ones(
    tmp_path: Path, report: Callable[..., Any]
) -> None:
    store = await SqliteStore.open(tmp_path / "state")
    told: list[None] = []
    exchange = CandidateExchange(store, list, lambda: told.append(None), SystemClock())
    full = measured(quality(0.1, 0.2), report)
    text = document(profiler.profile_document(full, full, "untrained"))
    first = await exchange.take(text, CandidateImport())
    again = await exchange.take(text, CandidateImport())
    assert (first["stored"], again["stored"], again["kept"]) == (1, 0, 1)
    assert len(told) == 1
    stored = await exchange.stored(ProfileFilter())
    assert (stored.kv, stored.unreadable) == ((), ()), "they are no KV profiles"
    assert stored.video == tuple(read_video_profiles(text))
    await store.close()


@pytest.mark.slow
def test_the_real_engine_is_measured() -> None:
    chosen = [FULL, Configuration({**FULL, "steps": 2})]
    full, fast = profiler.measure_grid(chosen, checkpoint="untrained", segments=2)
    found = read_video_profiles(document(full, fast))
    assert [one.steps for one in found] == [4, 2]
    for one in found:
        assert one.forward_s > 0
        assert one.memory is not None
        assert min(one.memory.weights_bytes, one.memory.kv_bytes, one.memory.activation_bytes) > 0
