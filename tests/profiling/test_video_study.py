"""Studies of a video engine: the same service, clips in place of prompts, settings in place of coders."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from controld.candidates.video_profile import VideoProfile
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.space import Condition, Forbidden, Parameter, StrategySpace
from controld.contract.trial import (
    ClipLoss,
    EngineMeasurement,
    SegmentLoss,
    TrialOutcome,
    TrialStatus,
    TrialTask,
)
from controld.contract.video import MemorySplit
from controld.profiling.grid import GridSize, curated_grid
from controld.profiling.progress import VIDEO_BOX

SPACE = StrategySpace(
    parameters=(
        Parameter(name="weights", values=("bf16", "nvfp4")),
        Parameter(name="activations", values=("bf16", "nvfp4")),
        Parameter(name="block_rule", values=("plain", "4over6")),
        Parameter(name="kv", values=("bf16", "nvfp4")),
        Parameter(name="kv_smooth", values=("none", "token_mean")),
        Parameter(name="steps", values=(1, 2, 4), ordered=True),
        Parameter(name="window", values=(9, 15), ordered=True),
        Parameter(name="sink", values=(0, 3), ordered=True),
        Parameter(name="multi_shot", values=("yes", "no")),
        Parameter(name="vae", values=("stream", "async"), lossy=False),
    ),
    conditions=(
        Condition(parameter="block_rule", parent="weights", parent_values=("nvfp4",)),
        Condition(parameter="kv_smooth", parent="kv", parent_values=("nvfp4",)),
    ),
    forbidden=(Forbidden(values={"weights": ("bf16",), "activations": ("nvfp4",)}, reason="no back end"),),
)
WORKER = {"kind": "longlive", "tiers": ("video",), "space_json": SPACE.to_json(), "deployment": "video"}
REQUEST: dict[str, Any] = {
    "plane": "longlive",
    "workload": "shapes",
    "grid": "quick",
    "segments": 3,
    "lengths": [3],
}


def outcome_of(task: TrialTask, *, pass_s: float = 0.02, vae_s: float = 0.03, loss: float = 0.1) -> TrialOutcome:
    """What a worker would say: a loss that falls with the steps, the same times whatever the variant."""
    steps = int(task.lossy["steps"])
    segments = range(task.first_segment, task.first_segment + task.segments_per_length)
    kv_bytes = 400 if task.lossy["kv"] == "bf16" else 100
    return TrialOutcome(
        study_id=task.study_id,
        trial_id=task.trial_id,
        status=TrialStatus.MEASURED,
        clips=tuple(
            ClipLoss(chunks=chunks, segment=segment, loss=(loss / steps - 0.02) * chunks + 0.001 * segment)
            for chunks in task.clip_chunks
            for segment in segments
        ),
        engine=tuple(
            EngineMeasurement(
                variant=variant,
                forward_s=pass_s,
                vae_s=vae_s,
                frames_per_chunk=12,
                memory=MemorySplit(weights_bytes=1000, kv_bytes=kv_bytes, activation_bytes=100),
                session_bytes=7,
                reference_bytes=1500,
                drift=0.5,
                motion=0.04,
            )
            for variant in task.coders
        ),
        seconds=2.0,
        corpus="toy world",
    )


@pytest.fixture
def video(bench: Any) -> Any:
    bench.fleet.connected = [bench.session(**WORKER)]
    return bench


async def answer(bench: Any, of: Callable[[TrialTask], TrialOutcome] = outcome_of) -> int:
    answered = 0
    await bench.review()
    while bench.fleet.requests:
        agent_id, task = bench.fleet.requests.pop(0)
        bench.clock.advance(1.0)
        await bench.service.trials.on_trial_result(bench.session(agent_id, **WORKER), of(task))
        answered += 1
        await bench.review()
    return answered


async def profiles(bench: Any) -> list[VideoProfile]:
    return [VideoProfile.from_json(record.document) for record in await bench.store.profiles.list()]


def test_the_grid_begins_with_the_usual_setting_and_every_point_is_of_the_space() -> None:
    quick, full = (curated_grid(SPACE, size) for size in (GridSize.QUICK, GridSize.FULL))
    assert (len(quick), len(full)) == (12, 36)
    assert set(quick) < set(full)
    assert dict(quick[0].lossy) == {
        "weights": "bf16",
        "activations": "bf16",
        "kv": "bf16",
        "steps": 4,
        "window": 15,
        "sink": 3,
        "multi_shot": "yes",
    }
    for point in full:
        assert len(point.coders) == 2
        assert SPACE.coders(point.lossy)


async def test_a_grid_of_clips_becomes_a_profile_for_each_variant(video: Any) -> None:
    study = await video.service.begin(REQUEST)
    assert (study["medium"], study["lengths"], study["trials_total"]) == ("video", [3], 12)
    assert await answer(video) == 12
    study = await video.service.get(study["id"])
    assert study["state"] == "finished"
    assert study["segments_done"] == study["segments_total"] == 36
    found = await profiles(video)
    assert len(found) == 24
    assert {profile.configuration["vae"] for profile in found} == {"stream", "async"}
    for profile in found:
        assert profile.loss_mean == pytest.approx((0.1 / profile.steps - 0.02) * 3 + 0.001)
        assert profile.loss_se == pytest.approx(0.001 / math.sqrt(3))
        assert (profile.loss_samples, profile.workload, profile.frames_per_chunk) == (3, "shapes", 12)
        assert profile.memory is not None
        assert profile.memory.session_bytes == 7
        assert profile.provenance.startswith(f"study {study['id']}, trial ")
    assert video.new_profiles == 12
    best = study["front"][0]
    assert best["loss"] == pytest.approx(0.016)
    assert best["memory_ratio"] == pytest.approx(1200 / 1500)
    assert best["seconds_per_frame"] == pytest.approx(max(5 * 0.02, 0.03) / 12), "decoding runs beside the passes"
    assert "async" in best["label"]
    trial = study["trials"][0]
    assert trial["lengths"] == [{"clip_chunks": 3, "loss": trial["loss"], "loss_se": trial["loss_se"], "segments": 3}]
    assert 0 < study["hypervolume"] < 1


async def test_equal_passes_get_the_time_of_the_least_disturbed(video: Any) -> None:
    await video.service.begin({**REQUEST, "segments": 2})
    disturbed = {4: 0.05, 2: 0.02, 1: 0.03}
    await answer(video, lambda task: outcome_of(task, pass_s=disturbed[int(task.lossy["steps"])]))
    assert {profile.forward_s for profile in await profiles(video)} == {0.02}


async def test_what_was_deleted_does_not_come_back_with_another_number_of_steps(video: Any) -> None:
    await video.service.begin(REQUEST)
    await video.review()
    agent_id, task = video.fleet.requests.pop(0)
    await video.service.trials.on_trial_result(video.session(agent_id, **WORKER), outcome_of(task))
    deleted = {record.key for record in await video.store.profiles.list()}
    assert await video.store.profiles.delete(list(deleted)) == 2
    await answer(video)
    left = await profiles(video)
    assert len(left) == 22
    assert (4, "bf16", 15) not in {(p.steps, p.configuration["kv"], p.configuration["window"]) for p in left}


async def test_a_clip_measured_twice_counts_once_and_the_worst_length_counts(video: Any) -> None:
    for _ in range(2):
        await video.service.begin({**REQUEST, "segments": 2, "lengths": [1, 4]})
        await answer(video)
    for profile in await profiles(video):
        assert profile.loss_samples == 2
        longest_is_worst = 0.1 / profile.steps > 0.02
        assert longest_is_worst
        assert profile.loss_mean == pytest.approx((0.1 / profile.steps - 0.02) * 4 + 0.0005)


async def test_a_search_is_told_losses_memory_and_seconds(video: Any) -> None:
    body = {"plane": "longlive", "workload": "shapes", "method": "search", "budget": 6}
    study = await video.service.begin(body)
    assert (study["segments"], study["max_segments"], study["lengths"]) == (8, 32, [8])
    assert await answer(video) == 6
    request = video.search.requests[-1]
    assert request.loss_floor == VIDEO_BOX.loss_floor
    told = request.observations[0]
    assert told.segments == 8
    assert {cost.variant for cost in told.costs} == {'{"vae":"async"}', '{"vae":"stream"}'}
    assert all(0 < cost.size_ratio <= 1 for cost in told.costs)
    study = await video.service.get(study["id"])
    assert (study["state"], study["stop_reason"]) == ("finished", "budget")


async def test_a_study_of_clips_goes_on_in_another_process(video: Any) -> None:
    study = await video.service.begin({**REQUEST, "lengths": [2]})
    await video.review()
    agent_id, task = video.fleet.requests.pop(0)
    await video.service.trials.on_trial_result(video.session(agent_id, **WORKER), outcome_of(task))
    before = await video.service.get(study["id"])
    video.fleet.requests.clear()
    video.service = video.make_service()
    await video.service.start()
    after = await video.service.get(study["id"])
    assert after["trials"][0] == before["trials"][0]
    assert (after["medium"], after["lengths"]) == ("video", [2])
    assert await answer(video) == 11
    assert (await video.service.get(study["id"]))["state"] == "finished"
    await video.service.stop()


async def test_a_setting_that_the_engine_refuses_is_known_and_gives_no_profile(video: Any) -> None:
    await video.service.begin(REQUEST)
    refused = Configuration({"steps": 1})

    def of(task: TrialTask) -> TrialOutcome:
        whole = outcome_of(task)
        if task.lossy["steps"] != refused["steps"]:
            return whole
        return replace(whole, status=TrialStatus.INFEASIBLE, clips=(), engine=(), detail="engine.refused: steps")

    await answer(video, of)
    assert {profile.steps for profile in await profiles(video)} == {2, 4}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"continuation_tokens": 64}, "continuation_tokens"),
        ({"lengths": [2048]}, "lengths"),
        ({"lengths": [0]}, "lengths"),
        ({"segments": 0}, "segments"),
    ],
)
async def test_what_clips_do_not_have_is_refused_by_field(video: Any, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as refused:
        await video.service.begin({**REQUEST, **changes})
    assert refused.value.field == field


@pytest.mark.parametrize(
    "broken",
    [
        lambda whole: replace(whole, engine=(replace(whole.engine[0], variant="{bad"), whole.engine[1])),
        lambda whole: replace(whole, engine=(replace(whole.engine[0], variant='{"steps":1}'), whole.engine[1])),
        lambda whole: replace(whole, engine=whole.engine[:1]),
        lambda whole: replace(whole, engine=()),
        lambda whole: replace(whole, clips=(replace(whole.clips[0], chunks=99),)),
        lambda whole: replace(whole, clips=(replace(whole.clips[0], segment=99),)),
        lambda whole: replace(
            whole, clips=(), losses=(SegmentLoss(prompt_tokens=3, segment=0, loss_nats=0.1, top1_agreement=1.0),)
        ),
    ],
)
async def test_a_result_that_answers_something_else_ends_its_trial_and_holds_up_nothing(
    video: Any, broken: Callable[[TrialOutcome], TrialOutcome]
) -> None:
    study_id = (await video.service.begin(REQUEST))["id"]

    def of(task: TrialTask) -> TrialOutcome:
        whole = outcome_of(task)
        return broken(whole) if task.trial_id == "003" else whole

    await answer(video, of)
    study = await video.service.get(study_id)
    assert study["state"] == "finished"
    assert study["trials_by_state"] == {"failed": 1, "measured": 11}
    failed = next(trial for trial in study["trials"] if trial["state"] == "failed")
    assert (failed["id"], failed["attempts"]) == ("003", 3)
    assert "refused" in failed["detail"]
    assert len(await profiles(video)) == 22, "nothing was written under another setting"
    assert all(one.loss_mean == pytest.approx(0.241) for one in await profiles(video) if one.steps == 1)
