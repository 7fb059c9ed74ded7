"""The setting of a video engine: gates, changes that are worth it, and what the machine teaches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controld.candidates.video_profile import Source, VideoMemory, VideoProfile, is_video_document
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.video import ChunkReport, EngineFacts, MemorySplit, Transition
from controld.controller.guard import Pin, PinBoard
from controld.controller.knobs.video import VideoStage, log_ratios, predict
from controld.controller.posterior import StageCorrection
from controld.controller.video import decide_video
from controld.controller.video_plan import Gate, plans_to_json, settings_of_json
from controld.controller.video_text import plan_text
from controld.controller.video_view import EngineView, VideoGoal, VideoObjective

FACTS = EngineFacts(
    engine="reference",
    transitions={"kv": Transition.KV_REBUILD, "steps": Transition.CHUNK, "vae": Transition.CHUNK},
    chunk_latents=2,
    frames_per_chunk=8,
    sessions=4,
    left_out={"kv=fp8": "the device has no fp8"},
)


def setting(kv: str, steps: int, vae: str = "async") -> Configuration:
    return Configuration({"kv": kv, "steps": steps, "vae": vae, "window": 8})


def profile(kv: str, steps: int, vae: str = "async", **changes: object) -> VideoProfile:
    loss = {4: 0.0, 3: 0.01, 2: 0.03}[steps] + (0.005 if kv == "nvfp4" else 0.0)
    values: dict[str, object] = {
        "configuration": setting(kv, steps, vae), "source": Source.MEASURED, "forward_s": 0.05, "vae_s": 0.1,
        "frames_per_chunk": 8, "loss_mean": loss, "loss_se": 0.0005, "loss_samples": 30,
        "memory": VideoMemory(weights_bytes=100, kv_bytes=28 if kv == "nvfp4" else 100, activation_bytes=50),
    }  # fmt: skip
    return VideoProfile(**{**values, **changes})  # type: ignore[arg-type]


ALL = [profile(kv, steps) for kv in ("bf16", "nvfp4") for steps in (4, 3, 2)]


def goal(**changes: object) -> VideoGoal:
    return VideoGoal(**{"service_class": "live", "max_quality_loss": 0.05, **changes})  # type: ignore[arg-type]


def view(**changes: object) -> EngineView:
    return EngineView(facts=FACTS, **changes)  # type: ignore[arg-type]


def test_a_chunk_takes_the_longer_of_its_halves_only_where_they_overlap() -> None:
    four, sync = predict(profile("bf16", 4)), predict(profile("bf16", 4, "stream"))
    assert four.dit_s == four.chunk_s == pytest.approx(0.25)
    assert sync.chunk_s == pytest.approx(0.35)
    assert four.fps_denoise == sync.fps_denoise == pytest.approx(32)
    slow_decoder = predict(profile("bf16", 4, vae_s=0.4))
    assert slow_decoder.chunk_s == pytest.approx(0.4)
    assert four.first_frame_s == pytest.approx(0.35), "nothing overlaps the first chunk"


def test_sessions_take_turns_and_each_brings_its_own_window() -> None:
    one, three = predict(profile("bf16", 4)), predict(profile("bf16", 4), sessions=3)
    assert three.fps_end_to_end == pytest.approx(one.fps_end_to_end / 3)
    assert three.fps_denoise == one.fps_denoise
    assert (one.memory_bytes, three.memory_bytes) == (250, 450)
    assert three.first_frame_s == pytest.approx(one.first_frame_s + one.chunk_s), "a newcomer waits for a chunk"


def test_without_pressure_the_best_quality_wins_and_under_it_what_still_fits() -> None:
    assert decide_video([goal()], ALL, view()).setting == setting("bf16", 4)
    assert decide_video([goal(fps=36)], ALL, view()).setting == setting("bf16", 3)
    assert decide_video([goal(fps=21, sessions=2)], ALL, view()).setting == setting("bf16", 2)
    assert decide_video([goal(memory_bytes=200)], ALL, view()).setting == setting("nvfp4", 4)
    assert decide_video([goal()], ALL, view(memory_limit_bytes=200)).setting == setting("nvfp4", 4)


def test_the_strictest_of_all_classes_holds() -> None:
    plan = decide_video(
        [goal(fps=10), goal(service_class="fast", fps=19, max_quality_loss=0.02)],
        ALL,
        view(),
    )
    assert plan.sessions == 2
    arm = plan.arm(setting("bf16", 2).config_id)
    assert arm is not None
    assert [r.gate for r in arm.rejections] == [Gate.QUALITY]
    assert plan.setting == setting("bf16", 3)


def test_where_nothing_passes_the_least_violation_wins_and_quality_still_holds() -> None:
    plan = decide_video([goal(fps=1000, max_quality_loss=0.02)], ALL, view())
    assert plan.setting == setting("bf16", 3), "two steps would be faster, but lose too much"
    assert not plan.meets_targets
    assert "misses least: 40 of 1e+03 FPS end to end" in plan.reason
    over = decide_video([goal(memory_bytes=100)], ALL, view())
    assert over.setting is not None
    assert over.setting["kv"] == "nvfp4"


def test_where_nothing_is_within_the_quality_limit_nothing_is_pushed() -> None:
    unmeasured = [replace(each, loss_mean=None) for each in ALL]
    plan = decide_video([goal()], unmeasured, view())
    assert plan.setting is None
    assert "keeps what it has" in plan.reason
    assert decide_video([goal(max_quality_loss=0.0)], ALL, view()).setting is None, "an upper bound is above zero"
    exact = [profile("bf16", 4, loss_se=0.0)]
    assert decide_video([goal(max_quality_loss=0.0)], exact, view()).setting == setting("bf16", 4)


def test_a_setting_that_fails_is_left_at_once_and_one_that_passes_only_for_a_gain() -> None:
    in_force = view(in_force=setting("bf16", 3), in_force_s=1.0)
    fails = decide_video([goal(fps=45)], ALL, in_force)
    assert fails.setting == setting("bf16", 2)
    assert "in place of kv=bf16 3 steps" in fails.reason
    young = decide_video([goal()], ALL, in_force)
    assert young.setting == setting("bf16", 3)
    assert "for 1.0 s only" in young.reason
    old = decide_video([goal()], ALL, view(in_force=setting("bf16", 3), in_force_s=11.0))
    assert old.setting == setting("bf16", 4)
    assert "20.0% over 60 s against 0 s" in old.reason


def test_a_gain_that_is_smaller_than_the_standstill_is_not_taken() -> None:
    # nvfp4 to bf16 KV gains a tenth of the limit: 6 s over the horizon, and loses history.
    at = view(in_force=setting("nvfp4", 4))
    assert decide_video([goal()], ALL, at).setting == setting("bf16", 4)
    slow = view(in_force=setting("nvfp4", 4), switch_seconds={Transition.KV_REBUILD: 7.0})
    plan = decide_video([goal()], ALL, slow)
    assert plan.setting == setting("nvfp4", 4)
    assert "against 8 s of standstill and lost history" in plan.reason
    kept = view(
        in_force=setting("nvfp4", 4),
        switch_seconds={Transition.KV_REBUILD: 5.5},
        keeps_kv={Transition.KV_REBUILD: True},
    )
    assert decide_video([goal()], ALL, kept).setting == setting("bf16", 4)


def test_a_setting_that_hardly_reaches_the_target_is_not_gone_back_to() -> None:
    # Four steps make 32 a second: enough for 31.5, but not by the margin.
    fresh = decide_video([goal(fps=31.5)], ALL, view())
    assert fresh.setting == setting("bf16", 4)
    there = decide_video([goal(fps=31.5)], ALL, view(in_force=setting("bf16", 4)))
    assert there.setting == setting("bf16", 4)
    back = decide_video([goal(fps=31.5)], ALL, view(in_force=setting("bf16", 3)))
    assert back.setting == setting("bf16", 3)
    assert "margin" in back.reason


def test_what_is_only_a_little_better_or_faster_is_not_worth_a_change() -> None:
    noisy = [replace(each, loss_se=0.01, loss_mean=0.001 * each.steps) for each in ALL]
    at = view(in_force=setting("bf16", 4))
    fast = decide_video([goal()], noisy[:3], at)
    assert fast.setting == setting("bf16", 2), "alike in quality, and much faster"
    at = view(in_force=setting("nvfp4", 2))
    alike = decide_video([goal()], [*noisy[:3], replace(noisy[5], forward_s=0.055)], at)
    assert alike.setting == setting("nvfp4", 2)
    assert "as good as" in alike.reason


def test_objectives_other_than_quality() -> None:
    fast = decide_video([goal(objective=VideoObjective.LATENCY)], ALL, view())
    assert fast.setting == setting("bf16", 2)
    small = decide_video([goal(objective=VideoObjective.BYTES)], ALL, view())
    assert small.setting == setting("nvfp4", 4)


def test_decoding_at_the_end_has_no_first_frame() -> None:
    arms = [profile("bf16", 4, "batch"), profile("bf16", 3)]
    plan = decide_video([goal(first_frame_s=2.0)], arms, view())
    assert plan.setting == setting("bf16", 3)
    arm = plan.arm(setting("bf16", 4, "batch").config_id)
    assert arm is not None
    assert arm.rejections[0].text == "the first frame comes with the last, not 2 s"


def test_what_the_engine_does_not_offer_or_the_guard_took_out_is_out_with_its_reason() -> None:
    fp8 = profile("nvfp4", 4, configuration=setting("fp8", 4))
    offered = frozenset(each.setting_id for each in ALL)
    pins = PinBoard().with_pin(Pin(arm_id=setting("bf16", 4).config_id, reason="drift 0.9", since_unix_s=1.0))
    plan = decide_video([goal()], [*ALL, fp8], view(offered=offered, pins=pins))
    assert plan.setting == setting("nvfp4", 4)
    texts = {arm.setting_id: [r.text for r in arm.rejections] for arm in plan.arms}
    assert "not offered by this engine: kv=fp8: the device has no fp8" in texts[fp8.setting_id]
    assert texts[setting("bf16", 4).config_id] == ["out of use: drift 0.9"]


def test_a_slower_machine_is_believed_and_its_scatter_counts_at_the_percentile() -> None:
    slow = {VideoStage.FORWARD: StageCorrection(math.log(2), 0.0, 0.0, 30.0)}
    corrections = {each.setting_id: slow for each in ALL}
    assert decide_video([goal(fps=25)], ALL, view(corrections=corrections)).setting == setting("bf16", 2)
    scatter = {VideoStage.CHUNK: StageCorrection(0.0, 0.0, 0.2**2, 30.0)}
    mean, p90 = (predict(ALL[0], percentile=p, corrections=scatter) for p in (50.0, 90.0))
    assert p90.fps_end_to_end == pytest.approx(mean.fps_end_to_end * math.exp(-1.2816 * 0.2), rel=1e-3)
    assert p90.fps_denoise == mean.fps_denoise, "the scatter was seen in the whole chunk, not in denoising"


def report(**changes: object) -> ChunkReport:
    values: dict[str, object] = {
        "session_id": "s", "service_class": "live", "setting_id": ALL[0].setting_id, "chunk": 0, "session_chunk": 0,
        "frames": 8, "denoise_s": (0.1,) * 4, "recache_s": 0.1, "vae_s": 0.1, "vae_overlap": 1.0, "total_s": 0.6,
        "first_frame_s": 0.0, "fps_denoise": 16.0, "fps_end_to_end": 13.0, "memory": MemorySplit(),
    }  # fmt: skip
    return ChunkReport(**{**values, **changes})  # type: ignore[arg-type]


def test_a_chunk_teaches_its_stages_and_the_rest_of_its_time() -> None:
    ratios = log_ratios(ALL[0], report(), {})
    assert ratios[VideoStage.FORWARD] == pytest.approx(math.log(2))
    assert ratios[VideoStage.VAE] == pytest.approx(0.0)
    assert ratios[VideoStage.CHUNK] == pytest.approx(math.log(0.6 / 0.5)), "beside what the forward passes explain"
    decoding = report(vae_s=0.0, total_s=1.0)
    slow_decoder = {VideoStage.VAE: StageCorrection(math.log(8), 0.0, 0.0, 9.0)}
    ratios = log_ratios(ALL[0], decoding, slow_decoder)
    assert VideoStage.VAE not in ratios
    assert ratios[VideoStage.CHUNK] == pytest.approx(math.log(1.0 / 0.8)), "what is known of the decoder stands in"


def test_where_nothing_passes_another_setting_must_miss_by_much_less() -> None:
    # Nothing reaches 60: two steps make 53, three 40.
    close = [*ALL[:2], replace(ALL[2], forward_s=0.064)]
    assert decide_video([goal(fps=60)], close, view()).setting == setting("bf16", 2)
    old = decide_video([goal(fps=60)], close, view(in_force=setting("bf16", 3)))
    assert old.setting == setting("bf16", 3), "41.7 is not much more than 40"
    assert decide_video([goal(fps=60)], ALL, view(in_force=setting("bf16", 3))).setting == setting("bf16", 2)
    young = decide_video([goal(fps=60)], ALL, view(in_force=setting("bf16", 3), in_force_s=3.0))
    assert young.setting == setting("bf16", 3)


@settings(deadline=None)
@given(
    fps=st.none() | st.floats(1, 100), memory=st.none() | st.floats(50, 1000), limit=st.floats(0, 0.1),
    sessions=st.integers(1, 8), at=st.none() | st.sampled_from(ALL), since=st.floats(0, 100),
)  # fmt: skip
def test_a_chosen_setting_meets_all_targets_whenever_any_does(
    fps: float | None, memory: float | None, limit: float, sessions: int, at: VideoProfile | None, since: float
) -> None:
    wanted = goal(fps=fps, memory_bytes=memory, max_quality_loss=limit, sessions=sessions)
    engine = view(in_force=at.configuration if at else None, in_force_s=since)
    plan = decide_video([wanted], ALL, engine)
    passing = [arm for arm in plan.arms if not arm.rejections]
    assert plan.meets_targets == bool(passing)
    if plan.chosen is not None:
        assert plan.chosen.loss_upper is not None
        assert plan.chosen.loss_upper <= limit
        again = decide_video([wanted], ALL, view(in_force=plan.setting, in_force_s=since))
        assert again.setting == plan.setting, "a decision stands while nothing changes"
    assert plan_text("e0", plan, "")


def test_plans_and_profiles_survive_being_kept() -> None:
    plan = decide_video([goal(fps=20)], ALL, view())
    assert settings_of_json(plans_to_json({"e0": plan})) == {"e0": plan.setting}
    kept = VideoProfile.from_json(ALL[0].to_json())
    assert kept == ALL[0]
    assert is_video_document(ALL[0].to_json())
    for damaged in ("{}", "[]", "x", ALL[0].to_json().replace('"steps":4', '"steps":0')):
        with pytest.raises(FieldError):
            VideoProfile.from_json(damaged)
    for wrong in ({"forward_s": math.nan}, {"vae_s": -1.0}, {"loss_mean": math.inf}, {"frames_per_chunk": 0}):
        with pytest.raises(FieldError, match=next(iter(wrong))):
            profile("bf16", 4, **wrong)
