"""What is made of the chunks of one setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from controld.contract.video import MemorySplit
from dataplanes.longlive.profiler.timing import SettingTimes

ONE = MemorySplit(weights_bytes=100, kv_bytes=40, activation_bytes=50)
TWO = MemorySplit(weights_bytes=100, kv_bytes=80, activation_bytes=57)


@pytest.fixture
def times(report: Callable[..., Any]) -> SettingTimes:
    chunk = report(denoise_s=(0.1,) * 4, recache_s=0.1, vae_s=0.2, flicker=0.04, memory=ONE)
    disturbed = replace(chunk, denoise_s=(0.3,) * 4, vae_s=0.5)
    return SettingTimes(
        reports=(disturbed, chunk, disturbed), close_s=1.6, memory=ONE, memory_of_two=TWO, frames_per_chunk=12
    )


def test_times_are_those_of_the_least_disturbed_chunk_and_memory_that_of_one_and_two_sessions(
    times: SettingTimes,
) -> None:
    found = times.measurement("v", reference_bytes=200, motion=0.5)
    assert found.forward_s == pytest.approx(0.1)
    assert found.vae_s == pytest.approx(0.2)
    assert (found.memory, found.session_bytes, found.reference_bytes) == (ONE, 7, 200)
    assert found.motion == 0.5
    assert times.flicker == pytest.approx(0.04)


def test_what_is_decoded_at_the_end_is_a_chunks_share_of_that(times: SettingTimes) -> None:
    late = replace(times, reports=tuple(replace(report, vae_s=0.0) for report in times.reports))
    assert late.vae_s == pytest.approx(0.2), "eight chunks in 1.6 s"


def test_reports_that_brought_no_frames_say_nothing_of_motion(times: SettingTimes) -> None:
    late = replace(times.reports[0], frames=0, flicker=0.0)
    assert replace(times, reports=(*times.reports, late)).flicker == pytest.approx(0.04)
    assert replace(times, reports=(late,)).flicker is None, "not measured, which is not the same as none"
