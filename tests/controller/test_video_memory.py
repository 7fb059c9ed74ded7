"""Memory that chunks show above a setting's profile: believed at once, never without bounds, and not for ever."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.candidates.video_profile import Source, VideoMemory, VideoProfile
from controld.contract.clock import ManualClock
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.video import ChunkReport, MemorySplit
from controld.controller.video_memory import HALF_LIFE_S, MAX_FACTOR, MemoryExcess
from controld.planning.video_lessons import EngineLessons


def profile(steps: int, memory: VideoMemory | None, kv: str = "bf16") -> VideoProfile:
    return VideoProfile(
        configuration=Configuration({"kv": kv, "steps": steps, "vae": "async"}), source=Source.MEASURED,
        forward_s=0.1, vae_s=0.1, frames_per_chunk=8, hardware="here", memory=memory,
    )  # fmt: skip


FOUR = profile(4, VideoMemory(weights_bytes=100, kv_bytes=60, activation_bytes=40, session_bytes=10))
TWO = profile(2, VideoMemory(weights_bytes=100, kv_bytes=60, activation_bytes=40, session_bytes=10))


class Engine:
    """Lessons on a clock that moves a second a chunk."""

    def __init__(self) -> None:
        self.lessons = EngineLessons()
        self.clock = ManualClock()

    def chunk(self, held: int, *, of: VideoProfile = FOUR, sessions: int = 1, has_nan: bool = False) -> None:
        memory = MemorySplit(weights_bytes=100, kv_bytes=held - 100, peak_bytes=10 * held, reserved_bytes=10 * held)
        report = ChunkReport(
            session_id="s", service_class="live", setting_id=of.setting_id, chunk=1, session_chunk=1, frames=8,
            denoise_s=(0.1,) * 4, recache_s=0.1, vae_s=0.1, vae_overlap=1.0, total_s=0.5, first_frame_s=0.0,
            fps_denoise=16.0, fps_end_to_end=16.0, memory=memory if held else MemorySplit(), sessions=sessions,
            has_nan=has_nan,
        )  # fmt: skip
        self.clock.advance(1.0)
        self.lessons.observe(report, of, hardware="here", now_unix_s=self.clock.unix_s(), drift=None, motion=None)

    def factor(self, of: VideoProfile = FOUR, *, among: tuple[VideoProfile, ...] = (FOUR, TWO)) -> float:
        return self.lessons.memory_factors(among, self.clock.unix_s())[of.setting_id]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_what_is_above_the_profile_counts_at_once_and_with_all_sessions(engine: Engine) -> None:
    assert engine.factor() == 1.0
    engine.chunk(240)
    assert engine.factor() == pytest.approx(1.2)
    engine.chunk(351, sessions=3)
    assert engine.factor() == pytest.approx(1.2, rel=5e-3), (
        "two further sessions hold 70 each: 340, and 351 is less above"
    )
    engine.chunk(442, sessions=3)
    assert engine.factor() == pytest.approx(1.3)


def test_windows_that_are_not_full_hardly_pull_it_down_and_a_thousand_chunks_do(engine: Engine) -> None:
    engine.chunk(240)
    for _ in range(5):
        engine.chunk(150)
    assert engine.factor() > 1.17
    for _ in range(500):
        engine.chunk(200)
    assert engine.factor() == pytest.approx(1.0, abs=1e-3)
    engine.chunk(100)
    assert engine.factor() >= 1.0, "below the profile nothing is believed"


def test_a_setting_that_never_ran_is_taken_to_need_what_all_others_need_too_much(engine: Engine) -> None:
    engine.chunk(240)
    assert engine.factor(TWO) == pytest.approx(1.2)
    engine.chunk(210, of=TWO)
    third = profile(3, FOUR.memory)
    among = (FOUR, TWO, third)
    assert engine.factor(FOUR, among=among) == pytest.approx(1.2, rel=1e-3)
    assert engine.factor(TWO, among=among) == pytest.approx(1.05)
    assert engine.factor(third, among=among) == pytest.approx(1.05, rel=1e-3)


def test_what_nothing_refreshes_fades_so_that_a_setting_is_tried_again(engine: Engine) -> None:
    engine.chunk(240)
    engine.clock.advance(HALF_LIFE_S)
    assert engine.factor() == pytest.approx(math.sqrt(1.2), rel=1e-4)
    engine.clock.advance(9 * HALF_LIFE_S)
    assert engine.factor() < 1.001
    engine.chunk(240)
    assert engine.factor() == pytest.approx(1.2)


def test_reports_that_say_nothing_teach_nothing(engine: Engine) -> None:
    engine.chunk(0)
    engine.chunk(400, sessions=0)
    engine.chunk(400, has_nan=True)
    unknown = profile(5, None)
    engine.chunk(400, of=unknown)
    assert engine.factor() == 1.0
    assert engine.factor(unknown, among=(FOUR, unknown)) == 1.0


def test_a_new_profile_of_the_setting_begins_anew(engine: Engine) -> None:
    engine.chunk(240)
    measured_again = profile(4, VideoMemory(weights_bytes=100, kv_bytes=100, activation_bytes=40))
    assert engine.factor(measured_again, among=(measured_again,)) == 1.0
    engine.chunk(252, of=measured_again)
    assert engine.factor(measured_again, among=(measured_again,)) == pytest.approx(1.05)


@given(st.lists(st.tuples(st.integers(101, 2**50), st.integers(0, 2**31)), max_size=20))
def test_whatever_is_reported_it_stays_in_bounds_and_is_kept(reports: list[tuple[int, int]]) -> None:
    engine = Engine()
    for held, sessions in reports:
        engine.chunk(held, sessions=sessions)
        assert 1.0 <= engine.factor() <= MAX_FACTOR * 1.000001
    kept = EngineLessons.from_document(json.loads(json.dumps(engine.lessons.to_document())))
    now_unix_s = engine.clock.unix_s()
    assert kept.memory_factors([FOUR, TWO], now_unix_s) == engine.lessons.memory_factors([FOUR, TWO], now_unix_s)


def test_records_without_it_and_damaged_ones() -> None:
    document = EngineLessons().to_document()
    del document["memory"]
    EngineLessons.from_document(document)
    for damaged in ([9.0, 1, 1.0], [-0.1, 1, 1.0], [0.1, 1, math.nan], ["x", 1, 1.0], [0.1], 3):
        with pytest.raises(FieldError):
            EngineLessons.from_document({**document, "memory": {"a": damaged}})
    assert MemoryExcess(log_factor=0.1, profile_bytes=1, at_unix_s=5.0).log_factor_at(1.0) == 0.1
