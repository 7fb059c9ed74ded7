"""Searches: trials chosen one after another, within a budget, with and without the search process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controld.contract.errors import FieldError
from controld.contract.trial import TrialStatus
from controld.profiling.dispatch import ABSENCE_S
from controld.profiling.errors import StudyRefusedError
from controld.profiling.progress import FAILED_IN_A_ROW, LEVEL_TRIALS
from controld.profiling.search.observation import Proposal
from controld.profiling.search_process import SearchProcessError

REQUEST: dict[str, Any] = {
    "plane": "sglang",
    "workload": "general",
    "method": "search",
    "budget": 6,
    "segments": 2,
    "lengths": [256, 1024],
}
GONE = SearchProcessError("the search process ended", code="search.ended")


async def begun(bench: Any, **changes: Any) -> str:
    study = await bench.service.begin({**REQUEST, **changes})
    return str(study["id"])


async def test_a_search_spends_its_budget_of_trials_and_no_more(bench: Any) -> None:
    study_id = await begun(bench)
    assert await bench.answer_all() == 6
    study = await bench.service.get(study_id)
    assert (study["state"], study["stop_reason"], study["trials_done"]) == ("finished", "budget", 6)
    assert len({trial["lossy_id"] for trial in study["trials"]}) == 6
    assert len(study["hypervolume_by_trial"]) == 6
    assert study["hypervolume_by_trial"] == sorted(study["hypervolume_by_trial"])
    assert study["hypervolume"] == study["hypervolume_by_trial"][-1] > 0
    assert study["front_size"] == len(study["front"]) > 0
    assert study["seconds"]["measuring"] == pytest.approx(12.0)
    assert study["seconds"]["search"] == pytest.approx(0.5 * len(bench.search.requests))
    assert bench.search.requests[-1].observations, "the search is told what was measured"


async def test_a_budget_of_seconds_is_of_measuring(bench: Any) -> None:
    study_id = await begun(bench, budget="7s")
    # A trial takes two seconds; the one that waits when seven are spent is measured still.
    assert await bench.answer_all() == 5
    study = await bench.service.get(study_id)
    assert (study["state"], study["stop_reason"]) == ("finished", "budget")


async def test_attempts_that_fail_spend_a_budget_of_seconds(bench: Any) -> None:
    study_id = await begun(bench, budget="7s")
    await bench.answer_all(status=TrialStatus.FAILED, detail="boom", seconds=2.0)
    study = await bench.service.get(study_id)
    assert (study["state"], study["stop_reason"]) == ("failed", "budget")
    # The trial that had begun and the one that waited are tried to their end.
    assert study["trials_by_state"] == {"failed": 3}
    assert study["seconds"]["measuring"] == pytest.approx(18.0)
    bench.service = bench.make_service()
    await bench.service.start()
    await bench.service.stop()
    study = await bench.service.get(study_id)
    assert study["seconds"]["measuring"] == pytest.approx(18.0)
    assert [trial["lost_seconds"] for trial in study["trials"]] == [pytest.approx(6.0)] * 3


async def test_workers_that_die_spend_a_budget_of_seconds(bench: Any) -> None:
    study_id = await begun(bench, budget="25s")
    for life in range(3):
        await bench.review()
        bench.clock.advance(9.0)
        bench.fleet.connected = [bench.session(instance_id=f"life{life}")]
        await bench.review()
    study = await bench.service.get(study_id)
    assert study["seconds"]["measuring"] == pytest.approx(27.0)
    assert study["trials_total"] == 2
    del bench.fleet.requests[:-1]
    assert await bench.answer_all() == 2, "no third trial is begun"
    assert (await bench.service.get(study_id))["stop_reason"] == "budget"


async def test_a_worker_that_is_gone_spends_nothing_from_then_on(bench: Any) -> None:
    study_id = await begun(bench, budget="1min")
    await bench.review()
    bench.clock.advance(5.0)
    bench.fleet.connected = []
    await bench.review()
    bench.clock.advance(ABSENCE_S + 1)
    await bench.review()
    study = await bench.service.get(study_id)
    assert study["trials"][0]["attempts"] == 1
    assert study["seconds"]["measuring"] == pytest.approx(5.0)
    assert study["seconds"]["waiting"] == pytest.approx(ABSENCE_S + 1)


async def test_each_worker_has_a_trial_and_one_ahead(bench: Any) -> None:
    bench.fleet.connected.append(bench.session("w1"))
    study_id = await begun(bench, budget=100)
    await bench.review()
    study = await bench.service.get(study_id)
    assert study["trials_by_state"] == {"pending": 2, "running": 2}
    agent, task = bench.fleet.requests.pop(0)
    await bench.service.trials.on_trial_result(bench.session(agent), bench.outcome_of(task))
    await bench.review()
    request = bench.search.requests[-1]
    assert request.count == 1
    assert len(request.pending) == 3
    assert [one.lossy for one in request.observations] == [task.lossy]


async def test_without_a_worker_nothing_is_chosen(bench: Any) -> None:
    study_id = await begun(bench)
    bench.fleet.connected = []
    await bench.review()
    assert bench.search.requests == []
    assert (await bench.service.get(study_id))["state"] == "running"


async def test_workers_on_other_hardware_are_left_out(bench: Any) -> None:
    await begun(bench)
    bench.fleet.connected = [bench.session(threads=7)]
    await bench.review()
    assert bench.search.requests == [] and bench.fleet.requests == []


async def test_a_search_stops_when_the_hypervolume_levels_off(bench: Any) -> None:
    study_id = await begun(bench, budget=300)
    # Every part is as good as every other: nothing is gained after the first.
    answered = await bench.answer_all()
    study = await bench.service.get(study_id)
    assert (study["state"], study["stop_reason"]) == ("finished", "levelled_off")
    assert LEVEL_TRIALS < answered <= LEVEL_TRIALS + 3


async def test_a_search_stops_when_every_trial_fails(bench: Any) -> None:
    study_id = await begun(bench, budget=300)
    await bench.answer_all(status=TrialStatus.FAILED, detail="boom")
    study = await bench.service.get(study_id)
    assert (study["state"], study["stop_reason"]) == ("failed", "failing")
    assert FAILED_IN_A_ROW <= study["trials_total"] <= FAILED_IN_A_ROW + 3


async def test_a_search_stops_when_nothing_is_left(bench: Any) -> None:
    study_id = await begun(bench, budget=300)
    bench.search.parts_left = 5
    assert await bench.answer_all() == 5
    study = await bench.service.get(study_id)
    assert (study["state"], study["stop_reason"]) == ("finished", "exhausted")


async def test_a_part_that_is_proposed_again_goes_on_with_the_next_segments(bench: Any, space: Any) -> None:
    study_id = await begun(bench, budget=2)
    part = next(space.enumerate(lossy_only=True))
    for segments in (2, 5):
        bench.search.next = [Proposal(lossy=part, segments=segments, source="refine")]
        bench.search.parts_left = 0
        await bench.review()
        _, task = bench.fleet.requests.pop(0)
        await bench.service.trials.on_trial_result(bench.session(), bench.outcome_of(task))
    assert (task.first_segment, task.segments_per_length) == (2, 3)
    study = await bench.service.get(study_id)
    assert study["state"] == "finished"
    assert study["front"][0]["segments"] == 5
    assert {trial["source"] for trial in study["trials"]} == {"refine"}


async def test_an_infeasible_part_is_told_as_such(bench: Any) -> None:
    await begun(bench)
    await bench.review()
    _, task = bench.fleet.requests.pop(0)
    await bench.service.trials.on_trial_result(bench.session(), bench.outcome_of(task, TrialStatus.INFEASIBLE))
    await bench.review()
    (observation,) = bench.search.requests[-1].observations
    assert observation.lossy == task.lossy
    assert observation.loss != observation.loss and observation.costs == ()
    assert '"loss": null' in bench.search.requests[-1].to_json(1)


async def test_without_the_search_process_parts_are_drawn_at_random_and_it_is_said(bench: Any) -> None:
    bench.search.error = GONE
    study_id = await begun(bench)
    assert await bench.answer_all() == 6
    study = await bench.service.get(study_id)
    assert study["state"] == "finished"
    assert {trial["source"] for trial in study["trials"]} == {"random"}
    assert len({trial["lossy_id"] for trial in study["trials"]}) == 6
    assert "6 of 6 trials were drawn at random" in study["detail"]
    assert "ended" in study["detail"]


async def test_a_proposal_from_outside_the_space_is_left_out(bench: Any, space: Any) -> None:
    await begun(bench)
    outside = next(space.enumerate(lossy_only=True))
    foreign = type(outside)({**outside, "sink_tokens": 4})
    bench.search.next = [Proposal(lossy=foreign, segments=2, source="model"),
                         Proposal(lossy=outside, segments=2, source="model")]  # fmt: skip
    await bench.review()
    assert [task.lossy for _, task in bench.fleet.requests] == [outside]


async def test_a_search_that_proposes_only_nonsense_is_replaced_by_chance(bench: Any, space: Any) -> None:
    study_id = await begun(bench, budget=2)
    part = next(space.enumerate(lossy_only=True))
    foreign = type(part)({**part, "sink_tokens": 4})
    bench.search.next = [Proposal(lossy=foreign, segments=2, source="model")] * 2
    assert await bench.answer_all() == 2
    study = await bench.service.get(study_id)
    assert {trial["source"] for trial in study["trials"]} == {"random"}
    assert "does not have" in study["detail"]


async def test_a_paused_study_begins_nothing_and_takes_what_runs(bench: Any) -> None:
    study_id = await begun(bench)
    await bench.review()
    _, task = bench.fleet.requests.pop(0)
    assert (await bench.service.pause(study_id))["state"] == "paused"
    await bench.service.trials.on_trial_result(bench.session(), bench.outcome_of(task))
    await bench.review()
    assert bench.fleet.requests == []
    bench.service = bench.make_service()  # kill -9
    await bench.service.start()
    await asyncio.sleep(0.05)
    await bench.service.stop()
    study = await bench.service.get(study_id)
    assert (study["state"], study["trials_done"]) == ("paused", 1)
    assert bench.fleet.requests == []
    assert (await bench.service.resume(study_id))["state"] == "running"
    assert await bench.answer_all() == 5
    assert (await bench.service.get(study_id))["stop_reason"] == "budget"
    with pytest.raises(StudyRefusedError) as refused:
        await bench.service.pause(study_id)
    assert refused.value.code == "study.ended"


async def test_cancelling_a_search_keeps_what_it_measured(bench: Any) -> None:
    study_id = await begun(bench)
    await bench.review()
    _, task = bench.fleet.requests.pop(0)
    await bench.service.trials.on_trial_result(bench.session(), bench.outcome_of(task))
    await bench.service.pause(study_id)
    study = await bench.service.cancel(study_id)
    assert (study["state"], study["stop_reason"]) == ("cancelled", "")
    assert study["hypervolume"] > 0
    await bench.review()
    assert bench.fleet.requests == []


async def test_a_restarted_daemon_goes_on_with_the_stored_trials(bench: Any) -> None:
    study_id = await begun(bench)
    await bench.review()
    _, first = bench.fleet.requests.pop(0)
    await bench.service.trials.on_trial_result(bench.session(), bench.outcome_of(first))
    await bench.review()
    bench.fleet.requests.clear()
    before = await bench.service.get(study_id)

    bench.service = bench.make_service()  # nothing of the old one was closed: kill -9
    await bench.service.start()
    await bench.service.stop()
    after = await bench.service.get(study_id)
    assert [trial["lossy_id"] for trial in after["trials"]] == [trial["lossy_id"] for trial in before["trials"]]
    assert after["hypervolume_by_trial"] == before["hypervolume_by_trial"]
    assert [trial["source"] for trial in after["trials"]] == ["model"] * 3
    bench.fleet.requests.clear()
    bench.service = bench.make_service()
    await bench.service.start()
    async with asyncio.timeout(30):
        while (await bench.service.get(study_id))["state"] != "finished":
            if bench.fleet.requests:
                agent, task = bench.fleet.requests.pop(0)
                await bench.service.trials.on_trial_result(bench.session(agent), bench.outcome_of(task))
            await asyncio.sleep(0.001)
    await bench.service.stop()
    study = await bench.service.get(study_id)
    assert study["trials_by_state"] == {"measured": 6}
    assert len({trial["lossy_id"] for trial in study["trials"]}) == 6
    assert bench.search.stopped


async def test_a_slow_answer_for_one_study_holds_up_no_other(bench: Any) -> None:
    bench.fleet.connected.append(bench.session("w1"))
    slow, other = await begun(bench), await begun(bench)
    bench.search.held[slow] = asyncio.Event()
    bench.service = bench.make_service()
    await bench.service.start()

    async def finished(study_id: str) -> None:
        async with asyncio.timeout(30):
            while (await bench.service.get(study_id))["state"] != "finished":
                while bench.fleet.requests:
                    agent, task = bench.fleet.requests.pop(0)
                    await bench.service.trials.on_trial_result(bench.session(agent), bench.outcome_of(task))
                await asyncio.sleep(0.001)

    await finished(other)
    assert (await bench.service.get(slow))["trials_total"] == 0
    third = await begun(bench)
    await finished(third)
    bench.search.held[slow].set()
    await finished(slow)
    await bench.service.stop()


async def test_a_restriction_narrows_what_is_searched(bench: Any) -> None:
    study_id = await begun(bench, budget=50, restrict={"quantise": ["nvfp4", "fp8_e4m3"]})
    assert await bench.answer_all() == 4
    study = await bench.service.get(study_id)
    assert study["stop_reason"] == "exhausted"
    assert {trial["lossy"]["quantise"] for trial in study["trials"]} == {"nvfp4", "fp8_e4m3"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": "30"}, "budget"),
        ({"budget": "0s"}, "budget"),
        ({"budget": True}, "budget"),
        ({"budget": 2.5}, "budget"),
        ({"grid": "quick"}, "grid"),
        ({"method": "guess"}, "method"),
        ({"method": "grid"}, "budget"),
        ({"restrict": ["quantise"]}, "restrict"),
        ({"restrict": {"quantise": "levels"}}, "restrict.quantise"),
        ({"restrict": {"quantize": ["levels"]}}, "restrict.quantize"),
        ({"restrict": {"quantise": ["level"]}}, "restrict.quantise"),
        ({"segments": 4, "max_segments": 3}, "max_segments"),
        ({"seed": -1}, "seed"),
    ],
)
async def test_a_wrong_field_is_named(bench: Any, change: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as refused:
        await bench.service.begin({**REQUEST, **change})
    assert refused.value.field == field
    assert await bench.service.list() == []


async def test_a_search_without_a_budget_is_refused(bench: Any) -> None:
    with pytest.raises(FieldError) as refused:
        await bench.service.begin({name: value for name, value in REQUEST.items() if name != "budget"})
    assert refused.value.field == "budget"


async def test_events_of_a_long_search_stay_small_and_end_with_it(bench: Any) -> None:
    study_id = await begun(bench, budget=40)
    seen: list[dict[str, Any]] = []

    async def follow() -> None:
        async for state in bench.service.events(study_id):
            seen.append(state)

    follower = asyncio.create_task(follow())
    count = 0
    await bench.review()
    while bench.fleet.requests:
        agent, task = bench.fleet.requests.pop(0)
        count += 1
        await bench.service.trials.on_trial_result(bench.session(agent), bench.outcome_of(task, loss_nats=1 / 2**count))
        await bench.review()
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await follower
    assert seen[-1]["state"] == "finished"
    assert seen[-1]["trials_done"] == 40
    assert max(len(state["trials"]) for state in seen) <= 32
    assert len(seen[-1]["hypervolume_by_trial"]) == 40


async def test_watchers_are_told_of_a_change_of_the_detail_alone(bench: Any) -> None:
    bench.fleet.connected.append(bench.session("w1"))
    bench.search.parts_left = 2
    study_id = await begun(bench, budget=40)
    await bench.review()
    agent, task = bench.fleet.requests[0]
    await bench.service.trials.on_trial_result(bench.session(agent), bench.outcome_of(task))
    states = bench.service.events(study_id)
    before = await anext(states)
    assert (before["detail"], before["trials_by_state"]) == ("", {"measured": 1, "running": 1})
    waiting = asyncio.ensure_future(anext(states))
    await asyncio.sleep(0.01)
    bench.search.detail = "no model: boom"
    await bench.service.search()
    async with asyncio.timeout(30):
        after = await waiting
    assert (after["detail"], after["trials_by_state"]) == ("no model: boom", before["trials_by_state"])


async def test_studies_are_compared_by_their_curves(bench: Any) -> None:
    first = await begun(bench, budget=3)
    await bench.answer_all(loss_nats=0.1)
    second = await begun(bench, budget=4)
    await bench.answer_all(loss_nats=0.001)
    one, other = await bench.service.compare([first, second])
    assert (one["id"], other["id"]) == (first, second)
    assert [len(study["hypervolume_by_trial"]) for study in (one, other)] == [3, 4]
    assert other["hypervolume"] > one["hypervolume"]
