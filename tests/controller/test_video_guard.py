"""The guard of video quality: drift, motion that was lost, and times that a machine teaches."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from controld.candidates.video_profile import Source, VideoProfile
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.video import Applied, ChunkReport, MemorySplit, Transition
from controld.controller.knobs.video import VideoStage
from controld.controller.video_guard import LEAST_CHUNKS, SettingEvidence, breach
from controld.planning.video_lessons import EngineLessons

PROFILE = VideoProfile(
    configuration=Configuration({"kv": "nvfp4", "steps": 4, "vae": "async"}), source=Source.MEASURED, forward_s=0.1,
    vae_s=0.1, frames_per_chunk=8, hardware="here", motion=0.04,
)  # fmt: skip


def report(number: int = 1, **changes: object) -> ChunkReport:
    values: dict[str, object] = {
        "session_id": "s", "service_class": "live", "setting_id": PROFILE.setting_id, "chunk": number,
        "session_chunk": number, "frames": 8, "denoise_s": (0.1,) * 4, "recache_s": 0.1, "vae_s": 0.1,
        "vae_overlap": 1.0, "total_s": 0.5, "first_frame_s": 0.0, "fps_denoise": 16.0, "fps_end_to_end": 16.0,
        "memory": MemorySplit(), "drift": 0.1, "flicker": 0.04,
    }  # fmt: skip
    return ChunkReport(**{**values, **changes})  # type: ignore[arg-type]


def watched(*, drift: float = 0.1, flicker: float = 0.04, chunks: int = 40, seed: int = 7) -> SettingEvidence:
    rng, evidence = random.Random(seed), SettingEvidence()
    for _ in range(chunks):
        seen = report(drift=drift * rng.uniform(0.8, 1.2), flicker=flicker * rng.uniform(0.7, 1.3))
        evidence = evidence.observe(seen)
    return evidence


def test_drift_beyond_the_limit_is_a_breach_once_it_is_sure() -> None:
    assert breach(watched(), PROFILE, drift=0.5, motion=0.7) == ""
    assert breach(watched(drift=0.9), PROFILE, drift=0.5, motion=0.7).startswith("latents drift by 0.")
    assert breach(watched(drift=0.9, chunks=LEAST_CHUNKS - 1), PROFILE, drift=0.5, motion=0.7) == "", "too few"
    assert breach(watched(drift=0.9), PROFILE, drift=None, motion=0.7) == ""


def test_motion_is_compared_with_what_the_setting_showed_when_it_was_measured() -> None:
    assert breach(watched(flicker=0.035), PROFILE, drift=0.5, motion=0.7) == ""
    assert "frames move" in breach(watched(flicker=0.02), PROFILE, drift=0.5, motion=0.7)
    assert breach(watched(flicker=0.02), PROFILE, drift=0.5, motion=None) == ""
    unmeasured = replace(PROFILE, motion=None)
    assert breach(watched(flicker=0.02), unmeasured, drift=0.5, motion=0.7) == "", "nothing to compare with"


@pytest.mark.parametrize("seed", range(5))
def test_a_setting_at_its_profile_is_hardly_ever_taken_out(seed: int) -> None:
    rng, evidence = random.Random(seed), SettingEvidence()
    for _ in range(400):
        evidence = evidence.observe(
            report(drift=rng.lognormvariate(-1.2, 0.5), flicker=0.04 * rng.lognormvariate(0, 1))
        )
        assert breach(evidence, PROFILE, drift=0.5, motion=0.5) == ""


def taught(lessons: EngineLessons, *reports: ChunkReport, drift: float | None = 0.5) -> list[str]:
    pins = [
        lessons.observe(each, PROFILE, hardware="here", now_unix_s=1000.0 + each.chunk, drift=drift, motion=0.5)
        for each in reports
    ]
    return [pin.reason for pin in pins if pin is not None]


def test_a_breach_pins_the_setting_once_and_it_comes_back_after_a_while() -> None:
    lessons = EngineLessons()
    reasons = taught(lessons, *(report(number, drift=2.0) for number in range(60)))
    assert len(reasons) == 1
    assert lessons.pins.at(1100.0).reason(PROFILE.setting_id, "")
    assert not lessons.pins.at(1700.0).reason(PROFILE.setting_id, "")


def test_a_chunk_that_is_not_finite_pins_at_once_and_teaches_no_times() -> None:
    lessons = EngineLessons()
    assert taught(lessons, report(has_nan=True, total_s=9.0)) == ["a chunk was not finite"]
    assert lessons.corrections([PROFILE], "here", 1000.0)[PROFILE.setting_id][VideoStage.CHUNK].observations == 0


def test_a_setting_that_ran_when_the_machine_was_fast_is_not_expected_to_be_fast_now() -> None:
    lessons = EngineLessons()
    other = replace(PROFILE, configuration=Configuration({**PROFILE.configuration, "steps": 2}))
    taught(lessons, *(report(number) for number in range(40)))
    slow = report(50, setting_id=other.setting_id, denoise_s=(0.3,) * 2, recache_s=0.3, vae_s=0.3, total_s=0.9)
    for number in range(20):
        lessons.observe(slow, other, hardware="here", now_unix_s=1100.0 + number, drift=None, motion=None)
    learned = lessons.corrections([PROFILE], "here", 1120.0)[PROFILE.setting_id]
    assert learned[VideoStage.FORWARD].factor > 1.8, "of the three times, most is the machine's"


def test_times_are_learned_by_setting_and_survive_being_kept() -> None:
    lessons = EngineLessons()
    taught(lessons, *(report(number, denoise_s=(0.2,) * 4, recache_s=0.2, total_s=1.2) for number in range(40)))
    lessons.applied(
        Applied(version=1, setting_id="x", chunk=3, transition=Transition.RELOAD, seconds=4.0, keeps_kv=False)
    )
    refused = {"version": 2, "setting_id": "x", "chunk": 3, "transition": Transition.RELOAD, "refused": {"kv": "no"}}
    lessons.applied(Applied(seconds=99.0, keeps_kv=True, **refused))  # type: ignore[arg-type]
    learned = lessons.corrections([PROFILE], "here", 1040.0)[PROFILE.setting_id]
    assert learned[VideoStage.FORWARD].factor == pytest.approx(2.0, rel=0.05)
    assert learned[VideoStage.VAE].factor == pytest.approx(1.0, rel=0.05)
    assert learned[VideoStage.CHUNK].factor == pytest.approx(1.2, rel=0.05)
    assert lessons.switch_seconds == {Transition.RELOAD: 4.0}
    assert lessons.keeps_kv == {Transition.RELOAD: False}
    kept = EngineLessons.from_document(lessons.to_document())
    assert kept.to_document() == lessons.to_document()
    assert kept.corrections([PROFILE], "here", 1040.0) == lessons.corrections([PROFILE], "here", 1040.0)
    unknown = replace(PROFILE, configuration=Configuration({**PROFILE.configuration, "steps": 2}))
    elsewhere = lessons.corrections([unknown], "here", 1040.0)[unknown.setting_id]
    assert elsewhere[VideoStage.FORWARD].factor == pytest.approx(2.0, rel=0.05), "the machine is slow for all"
    for damaged in ({}, {**kept.to_document(), "stages": {"a": {"x": []}}}, {**kept.to_document(), "pins": "{"}):
        with pytest.raises(FieldError):
            EngineLessons.from_document(damaged)
