"""Several classes on one engine: each one's objective counts by its sessions, whatever their order."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controld.candidates.video_profile import Source, VideoMemory, VideoProfile
from controld.contract.configuration import Configuration
from controld.controller.video import decide_video
from controld.controller.video_plan import Gate
from controld.controller.video_view import EngineView, Steering, VideoGoal, VideoObjective
from controld.controller.video_weighing import Weighing, Worth

QUALITY, LATENCY, BYTES = VideoObjective.QUALITY, VideoObjective.LATENCY, VideoObjective.BYTES


def profile(steps: int, kv: str = "bf16", **changes: object) -> VideoProfile:
    values: dict[str, object] = {
        "configuration": Configuration({"kv": kv, "steps": steps, "vae": "async", "window": 8}),
        "source": Source.MEASURED, "forward_s": 0.05, "vae_s": 0.1, "frames_per_chunk": 8,
        "loss_mean": {4: 0.0, 3: 0.01, 2: 0.03}[steps] + (0.005 if kv == "nvfp4" else 0.0), "loss_se": 0.0005,
        "loss_samples": 30,
        "memory": VideoMemory(weights_bytes=100, kv_bytes=28 if kv == "nvfp4" else 100, activation_bytes=50),
    }  # fmt: skip
    return VideoProfile(**{**values, **changes})  # type: ignore[arg-type]


BEST, MIDDLE, FAST, SMALL = profile(4), profile(3), profile(2), profile(4, "nvfp4")
ALL = [BEST, MIDDLE, FAST, SMALL, profile(3, "nvfp4"), profile(2, "nvfp4")]


def goal(objective: VideoObjective, sessions: int = 1, **changes: object) -> VideoGoal:
    values = {"service_class": objective.value, "max_quality_loss": 0.05, "sessions": sessions, **changes}
    return VideoGoal(objective=objective, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("quality", "latency", "chosen"), [(9, 1, BEST), (1, 9, FAST), (1, 0, BEST), (0, 1, FAST)], ids=str
)
def test_each_objective_counts_by_its_sessions_and_not_by_its_place(
    quality: int, latency: int, chosen: VideoProfile
) -> None:
    goals = [goal(QUALITY, quality), goal(LATENCY, latency)]
    for order in permutations([one for one in goals if one.sessions]):
        assert decide_video(order, ALL, EngineView()).setting == chosen.configuration


def test_between_two_objectives_what_serves_both_may_win() -> None:
    # A little slower than the fastest, and hardly of any loss: neither class alone would take it.
    both = profile(3, forward_s=0.04, loss_mean=0.004)
    goals = [goal(QUALITY), goal(LATENCY)]
    arms = [BEST, both, FAST]
    assert decide_video(goals, arms, EngineView()).setting == both.configuration
    assert [decide_video([one], arms, EngineView()).setting for one in goals] == [
        BEST.configuration,
        FAST.configuration,
    ]


def test_bytes_are_weighed_against_quality_and_an_unknown_size_is_no_small_one() -> None:
    assert decide_video([goal(BYTES, 3), goal(QUALITY)], ALL, EngineView()).setting == SMALL.configuration
    assert decide_video([goal(BYTES), goal(QUALITY, 30)], ALL, EngineView()).setting == BEST.configuration
    unknown = replace(FAST, memory=None)
    for at in (None, SMALL.configuration):
        plan = decide_video([goal(BYTES)], [BEST, SMALL, unknown], EngineView(in_force=at))
        assert plan.setting == SMALL.configuration
    plan = decide_video([goal(BYTES)], [BEST, unknown], EngineView(in_force=BEST.configuration))
    assert plan.setting == BEST.configuration, "nobody knows that it is smaller"


@pytest.mark.parametrize("goals", [[goal(BYTES)], [goal(BYTES, 3), goal(QUALITY)]], ids=["alone", "with quality"])
def test_the_one_setting_whose_size_is_known_is_taken_for_bytes_before_any_that_is_not(goals: list[VideoGoal]) -> None:
    # Faster, of less loss, and the first by name whichever way: only its size speaks against it.
    unknown = replace(BEST, memory=None, forward_s=0.02)
    for arms in ([SMALL, unknown], [unknown, SMALL]):
        assert decide_video(goals, arms, EngineView()).setting == SMALL.configuration
        for at in (SMALL, unknown):
            plan = decide_video(goals, arms, EngineView(in_force=at.configuration))
            assert plan.setting == at.configuration, "nobody knows which is smaller"


@pytest.mark.parametrize("objective", VideoObjective)
def test_where_all_else_is_equal_a_size_that_is_known_is_better_than_one_that_is_not(
    objective: VideoObjective,
) -> None:
    weighing = Weighing([goal(objective)], 0.05, Steering())
    known = Worth(loss=0.01, loss_se=0.001, chunk_s=0.1, memory_bytes=178, name="later by name")
    unknown = replace(known, memory_bytes=None, name="a")
    ranks = weighing.ranks([unknown, known])
    assert ranks[1] < ranks[0]
    assert weighing.ranks([unknown])[0] < weighing.ranks([replace(unknown, name="b")])[0]


def test_the_limits_of_all_hold_whoever_is_in_the_majority() -> None:
    goals = [goal(LATENCY, 99), goal(QUALITY, 1, max_quality_loss=0.02)]
    plan = decide_video(goals, ALL, EngineView())
    fast = plan.arm(FAST.setting_id)
    assert fast is not None and [rejection.gate for rejection in fast.rejections] == [Gate.QUALITY]
    assert plan.setting == MIDDLE.configuration


def test_the_reason_names_what_was_weighed() -> None:
    plan = decide_video([goal(QUALITY, 1), goal(LATENCY, 3)], ALL, EngineView())
    assert "the best by latency (75%) and quality (25%) of the sessions" in plan.reason
    moved = decide_video([goal(QUALITY, 1), goal(LATENCY, 9)], ALL, EngineView(in_force=BEST.configuration))
    assert moved.setting == FAST.configuration
    assert "better by latency (90%) and quality (10%) of the sessions than kv=bf16 4 steps" in moved.reason


def test_a_setting_in_force_is_not_left_for_a_loss_that_is_lower_within_the_errors() -> None:
    goals = [goal(QUALITY, 3), goal(LATENCY, 1)]
    noisy = [replace(BEST, loss_se=0.02, loss_mean=0.0), replace(MIDDLE, loss_se=0.02, loss_mean=0.01)]
    loose = [replace(one, max_quality_loss=0.1) for one in goals]
    assert decide_video(loose, noisy, EngineView()).setting == BEST.configuration
    at = EngineView(in_force=MIDDLE.configuration)
    assert decide_video(loose, noisy, at).setting == MIDDLE.configuration


@settings(deadline=None)
@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=3), objective=st.sampled_from(VideoObjective))
def test_classes_that_want_the_same_are_one(counts: list[int], objective: VideoObjective) -> None:
    apart = decide_video([goal(objective, count, fps=4) for count in counts], ALL, EngineView())
    together = decide_video([goal(objective, sum(counts), fps=4)], ALL, EngineView())
    assert (apart.setting, apart.reason, apart.arms) == (together.setting, together.reason, together.arms)


@settings(deadline=None)
@given(
    sessions=st.tuples(*[st.integers(0, 4)] * 3).filter(any),
    fps=st.none() | st.floats(1, 40), at=st.sampled_from(ALL),
    losses=st.lists(st.floats(0, 0.05), min_size=6, max_size=6),
)  # fmt: skip
def test_what_was_chosen_stays_chosen_while_nothing_changes(
    sessions: tuple[int, int, int], fps: float | None, at: VideoProfile, losses: list[float]
) -> None:
    goals = [goal(each, count, fps=fps) for each, count in zip(VideoObjective, sessions, strict=True) if count]
    arms = [replace(one, loss_mean=loss) for one, loss in zip(ALL, losses, strict=True)]
    plan = decide_video(goals, arms, EngineView(in_force=at.configuration))
    if plan.setting is not None:
        again = decide_video(goals, arms, EngineView(in_force=plan.setting))
        assert again.setting == plan.setting
    assert plan.arms == decide_video(goals[::-1], arms, EngineView(in_force=at.configuration)).arms
