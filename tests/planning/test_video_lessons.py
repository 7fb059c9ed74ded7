"""What chunks teach of an engine's speed: the machine's part, a setting's own, and what passes without a trace."""

from __future__ import annotations

import pytest

from controld.candidates.video_profile import Source, VideoMemory, VideoProfile
from controld.contract.configuration import Configuration
from controld.contract.video import ChunkReport, MemorySplit
from controld.controller.knobs.video import predict
from controld.planning.video_lessons import EngineLessons

FORWARD_S, VAE_S = 0.2, 0.3


def profile(steps: int) -> VideoProfile:
    return VideoProfile(
        configuration=Configuration({"steps": steps, "vae": "stream", "kv": "bf16"}),
        source=Source.MEASURED,
        forward_s=FORWARD_S,
        vae_s=VAE_S,
        frames_per_chunk=32,
        workload="shapes",
        model_fingerprint="m",
        loss_mean=0.0,
        loss_se=0.0,
        loss_samples=30,
        provenance="test",
        hardware="here",
        memory=VideoMemory(weights_bytes=100, kv_bytes=100, activation_bytes=50),
    )


FOUR, TWO = profile(4), profile(2)


class Engine:
    """Makes chunks, one after the other."""

    def __init__(self) -> None:
        self.lessons = EngineLessons()
        self._now_unix_s = 1e9
        self._chunk = 0

    def run(
        self, setting: VideoProfile, chunks: int, slower: float = 1.0, *, decoding_slower: float | None = None
    ) -> None:
        steps = int(setting.configuration["steps"])
        forward_s = FORWARD_S * slower
        vae_s = VAE_S * (slower if decoding_slower is None else decoding_slower)
        for _ in range(chunks):
            total_s = (steps + 1) * forward_s + vae_s
            self._now_unix_s += total_s
            self._chunk += 1
            report = ChunkReport(
                session_id="s",
                service_class="live",
                setting_id=setting.setting_id,
                chunk=self._chunk,
                session_chunk=self._chunk,
                frames=32,
                denoise_s=(forward_s,) * steps,
                recache_s=forward_s,
                vae_s=vae_s,
                vae_overlap=0.0,
                total_s=total_s,
                first_frame_s=0.0,
                fps_denoise=1.0,
                fps_end_to_end=1.0,
                memory=MemorySplit(weights_bytes=100, kv_bytes=100, activation_bytes=50),
                sessions=1,
            )
            self.lessons.observe(
                report, setting, hardware="here", now_unix_s=self._now_unix_s, drift=None, motion=None
            )  # fmt: skip

    def slower_than_profiled(self, setting: VideoProfile) -> float:
        """As it is predicted now."""
        corrections = self.lessons.corrections([FOUR, TWO], "here", self._now_unix_s)
        predicted = predict(setting, corrections=corrections[setting.setting_id]).fps_end_to_end
        return predict(setting).fps_end_to_end / predicted


@pytest.mark.parametrize("before", [0, 1, 50, 1000])
@pytest.mark.parametrize("slower", [3.0, 10.0, 1000.0, 0.1])
def test_one_odd_chunk_leaves_nothing_behind(before: int, slower: float) -> None:
    engine = Engine()
    engine.run(FOUR, before)
    engine.run(FOUR, 1, slower)
    engine.run(FOUR, 50)
    assert engine.slower_than_profiled(FOUR) == pytest.approx(1, rel=0.05)
    assert engine.slower_than_profiled(TWO) == pytest.approx(1, rel=0.05), "it never ran"


@pytest.mark.parametrize("slower", [1.3, 3.0, 10.0])
def test_a_slow_machine_is_believed_at_its_second_chunk_and_forgotten_when_it_recovers(slower: float) -> None:
    engine = Engine()
    engine.run(FOUR, 50)
    engine.run(FOUR, 1, slower)
    engine.run(FOUR, 2, slower)
    for setting in (FOUR, TWO):
        assert engine.slower_than_profiled(setting) == pytest.approx(slower, rel=0.15)
    engine.run(FOUR, 30, slower)
    engine.run(FOUR, 50)
    for setting in (FOUR, TWO):
        assert engine.slower_than_profiled(setting) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("slower", [1.3, 2.0, 4.0])
def test_a_setting_that_is_slower_than_profiled_becomes_so_and_the_others_do_not(slower: float) -> None:
    engine = Engine()
    engine.run(FOUR, 20)
    for _ in range(3):
        engine.run(TWO, 20, slower, decoding_slower=1.0)
        engine.run(FOUR, 20)
    expected = (3 * FORWARD_S * slower + VAE_S) / (3 * FORWARD_S + VAE_S)
    assert engine.slower_than_profiled(FOUR) == pytest.approx(1, rel=0.05)
    assert engine.slower_than_profiled(TWO) == pytest.approx(expected, rel=0.15)


def test_what_a_change_itself_took_teaches_nothing_of_the_setting() -> None:
    engine = Engine()
    engine.run(FOUR, 50)
    engine.run(TWO, 1, 20.0)
    engine.run(TWO, 20)
    engine.run(FOUR, 1, 20.0)
    engine.run(FOUR, 20)
    for setting in (FOUR, TWO):
        assert engine.slower_than_profiled(setting) == pytest.approx(1, rel=0.05)


def test_a_stall_is_no_lesson_of_another_process_either() -> None:
    engine = Engine()
    engine.run(FOUR, 50)
    engine.run(FOUR, 1, 10.0)
    engine.lessons = EngineLessons.from_document(engine.lessons.to_document())
    engine.run(FOUR, 20)
    assert engine.slower_than_profiled(TWO) == pytest.approx(1, rel=0.05)
