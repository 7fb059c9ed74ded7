"""Studies end, survive restarts and lost workers, and never measure for nothing."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from controld.candidates.profile import Profile
from controld.contract.errors import FieldError
from controld.contract.space import StrategySpace
from controld.contract.trial import TrialStatus
from controld.policy.settings import Name
from controld.profiling.dispatch import ABSENCE_S, MAX_ATTEMPTS
from controld.profiling.errors import StudyNotFoundError, StudyRefusedError
from controld.profiling.request import StudyRequest
from controld.profiling.service import StudyService
from controld.store.errors import StoreError

REQUEST: dict[str, Any] = {
    "plane": "sglang",
    "workload": "general",
    "grid": "quick",
    "segments": 4,
    "lengths": [256, 1024],
}

SEARCH: dict[str, Any] = {"method": "search", "budget": 5}
NO_NAMES = ("\ud800", "a\nb", "a\n", "\x00", "../../etc/passwd", " ", "[/x]", ".hidden", "-a", "a" * 64)
NO_TEXTS = ("\ud800", "a\nb", "\x00", "a" * 257)


async def profiles_of(bench: Any) -> list[Profile]:
    return [Profile.from_json(record.document) for record in await bench.store.profiles.list()]


@contextmanager
def failing_updates(bench: Any, table: str, of: str = "UPDATE") -> Iterator[None]:
    """The store's database refuses to change rows of a table meanwhile, or to add some (`INSERT`)."""
    with closing(sqlite3.connect(bench.directory / "controld.db", isolation_level=None)) as connection:
        connection.execute(f"CREATE TRIGGER refused BEFORE {of} ON {table} BEGIN SELECT RAISE(ABORT, 'no'); END")
        yield
        connection.execute("DROP TRIGGER refused")


async def test_a_study_gives_a_profile_for_every_coder_of_every_part(bench: Any) -> None:
    study = await bench.service.begin(REQUEST)
    answered = await bench.answer_all()
    study = await bench.service.get(study["id"])
    assert study["state"] == "finished"
    assert study["trials_done"] == study["trials_total"] == answered
    profiles = await profiles_of(bench)
    assert len(profiles) == sum(len(trial["coders"]) for trial in study["trials"])
    assert bench.new_profiles == answered
    one = profiles[0]
    assert one.ratio == pytest.approx(4.0)
    assert one.loss_mean_nats == pytest.approx(0.0115)
    assert one.loss_upper_nats > one.loss_mean_nats
    assert one.encode.b_s_per_byte == pytest.approx(1e-5 / 1024)
    assert one.sender_hardware == bench.session().identity.hardware


async def test_one_worker_gets_one_trial_at_a_time_and_two_work_side_by_side(bench: Any) -> None:
    bench.fleet.connected.append(bench.session("w1"))
    await bench.service.begin(REQUEST)
    await bench.service.trials.dispatch()
    await bench.service.trials.dispatch()
    assert sorted(agent for agent, _ in bench.fleet.requests) == ["w0", "w1"]
    assert len({task.trial_id for _, task in bench.fleet.requests}) == 2


async def test_a_study_needs_a_worker_of_its_plane(bench: Any) -> None:
    with pytest.raises(StudyRefusedError) as refused:
        await bench.service.begin({**REQUEST, "plane": "longlive"})
    assert refused.value.code == "study.no_profiler"
    bench.fleet.connected = [bench.session(role="prefill")]
    with pytest.raises(StudyRefusedError):
        await bench.service.begin(REQUEST)
    assert await bench.service.list() == []


async def test_two_models_must_be_told_apart(bench: Any) -> None:
    bench.fleet.connected.append(bench.session("w1", model_fingerprint="e" * 64))
    with pytest.raises(StudyRefusedError) as refused:
        await bench.service.begin(REQUEST)
    assert refused.value.code == "study.ambiguous_model"
    study = await bench.service.begin({**REQUEST, "model": "e" * 64})
    await bench.service.trials.dispatch()
    assert [agent for agent, _ in bench.fleet.requests] == ["w1"]
    assert study["model"] == "e" * 64


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"segmentz": 3}, "segmentz"),
        ({"segments": 0}, "segments"),
        ({"segments": True}, "segments"),
        ({"segments": 2.5}, "segments"),
        ({"lengths": []}, "lengths"),
        ({"lengths": [256, "1k"]}, "lengths"),
        ({"grid": "huge"}, "grid"),
        ({"workload": ""}, "workload"),
        ({"plane": 7}, "plane"),
        ({"deployment": 7}, "deployment"),
        *[({"workload": name}, "workload") for name in NO_NAMES],
        *[({"plane": name}, "plane") for name in NO_NAMES],
        *[({"deployment": text}, "deployment") for text in NO_TEXTS],
        *[({"model": text}, "model") for text in NO_TEXTS],
        ({**SEARCH, "restrict": {"quantise": ["levels"] * 2}}, "restrict.quantise"),
        ({**SEARCH, "restrict": {"quantise": ["levels"] * 100_000}}, "restrict.quantise"),
        ({**SEARCH, "restrict": {"quantise": ["levels", *range(1000)]}}, "restrict.quantise"),
    ],
)
async def test_a_wrong_field_is_named(bench: Any, change: dict[str, Any], field: str) -> None:
    asked = {**REQUEST, **change}
    if "method" in change:
        del asked["grid"]
    with pytest.raises(FieldError) as refused:
        await bench.service.begin(asked)
    assert refused.value.field == field
    assert await bench.service.list() == []


@given(st.one_of(st.text(max_size=70), st.from_regex(r"[A-Za-z0-9_.-]{0,70}", fullmatch=True)))
def test_what_a_study_takes_as_a_workload_is_what_a_policy_can_name(name: str) -> None:
    def taken(read: Callable[[], object], refusal: type[Exception]) -> bool:
        try:
            read()
        except refusal:
            return False
        return True

    assert taken(lambda: StudyRequest.from_json({**REQUEST, "workload": name}), FieldError) == taken(
        lambda: TypeAdapter(Name).validate_python(name), ValidationError
    )


async def test_trials_that_no_message_can_carry_fail_and_others_go_on(bench: Any, space: StrategySpace) -> None:
    *parts, coders = space.parameters
    broken = replace(space, parameters=(*parts, replace(coders, values=("\ud800",))), forbidden=())
    bench.fleet.connected = [bench.session(space_json=broken.to_json())]
    stuck = (await bench.service.begin(REQUEST))["id"]
    bench.fleet.connected = [bench.session()]
    bench.clock.advance(1)
    younger = (await bench.service.begin(REQUEST))["id"]
    trials = (await bench.service.get(stuck))["trials_total"]
    for _ in range(MAX_ATTEMPTS):
        await bench.service.trials.dispatch()

    bench.service = bench.make_service()  # after a restart attempts count anew
    await bench.service.start()
    await bench.service.stop()
    for _ in range(trials * MAX_ATTEMPTS):
        await bench.service.trials.dispatch()
    study = await bench.service.get(stuck)
    assert (study["state"], study["trials_by_state"]) == ("failed", {"failed": trials})
    assert {trial["attempts"] for trial in study["trials"]} <= {0, MAX_ATTEMPTS}
    assert all("surrogates not allowed" in trial["detail"] for trial in study["trials"])
    await bench.answer_all()
    study = await bench.service.get(younger)
    assert (study["state"], study["trials_by_state"]) == ("finished", {"measured": study["trials_total"]})


async def test_a_trial_that_no_message_can_carry_holds_up_none_that_are_given_out_with_it(
    bench: Any, space: StrategySpace
) -> None:
    *parts, coders = space.parameters
    broken = replace(space, parameters=(*parts, replace(coders, values=("\ud800",))), forbidden=())
    bench.fleet.connected = [bench.session(space_json=broken.to_json())]
    await bench.service.begin({**REQUEST, "deployment": "chat"})
    bench.fleet.connected = [bench.session(), bench.session("w1", deployment="batch")]
    bench.clock.advance(1)
    younger = (await bench.service.begin({**REQUEST, "deployment": "batch"}))["id"]
    await bench.service.trials.dispatch()
    assert [(agent, task.study_id) for agent, task in bench.fleet.requests] == [("w1", younger)]


async def test_a_stored_study_of_a_name_that_is_none_is_left_alone(bench: Any) -> None:
    await bench.service.begin(REQUEST)
    (good,) = await bench.store.studies.list()
    spec = json.loads(good.spec)
    spec["request"]["workload"] = "\ud800"
    await bench.store.studies.create(replace(good, study_id="19700101-bad", spec=json.dumps(spec)), [])
    bench.service = bench.make_service()
    await bench.service.start()
    await bench.service.stop()
    assert [study["id"] for study in await bench.service.list()] == [good.study_id]
    await bench.answer_all()
    assert (await bench.service.get(good.study_id))["state"] == "finished"


@pytest.mark.parametrize("spec", ["[]", "3", '"x"', "{", "null"])
async def test_a_stored_study_that_is_no_object_is_left_alone(bench: Any, spec: str) -> None:
    await bench.service.begin(REQUEST)
    (good,) = await bench.store.studies.list()
    await bench.store.studies.create(replace(good, study_id="19700101-bad", spec=spec), [])
    bench.service = bench.make_service()
    await bench.service.start()
    await bench.service.stop()
    assert [study["id"] for study in await bench.service.list()] == [good.study_id]


async def test_a_restarted_daemon_goes_on_where_it_stopped(bench: Any) -> None:
    study_id = (await bench.service.begin(REQUEST))["id"]
    await bench.service.trials.dispatch()
    for _ in range(2):
        agent, task = bench.fleet.requests.pop(0)
        await bench.service.trials.on_trial_result(bench.session(agent), bench.outcome_of(task))
        await bench.service.trials.dispatch()
    interrupted = bench.fleet.requests.pop(0)[1].trial_id

    bench.service = bench.make_service()  # nothing of the old one was closed: kill -9
    await bench.service.start()
    await bench.service.stop()
    study = await bench.service.get(study_id)
    assert study["state"] == "running"
    assert study["trials_by_state"]["measured"] == 2
    answered = await bench.answer_all()
    study = await bench.service.get(study_id)
    assert study["state"] == "finished"
    assert answered == study["trials_total"] - 2
    assert next(t for t in study["trials"] if t["id"] == interrupted)["state"] == "measured"


async def test_progress_is_shown_and_never_ends_a_trial(bench: Any) -> None:
    study_id = (await bench.service.begin(REQUEST))["id"]
    await bench.service.trials.dispatch()
    agent, task = bench.fleet.requests[0]
    await bench.service.trials.on_trial_result(
        bench.session(agent), bench.outcome_of(task, TrialStatus.PROGRESS, segments=2, loss_nats=0.02)
    )
    study = await bench.service.get(study_id)
    trial = study["trials"][0]
    assert (trial["state"], trial["segments_done"], trial["segments_total"]) == ("running", 4, 8)
    assert trial["loss_nats"] == pytest.approx(0.021)
    assert study["eta_s"] > 0
    assert await profiles_of(bench) == []


async def test_a_worker_killed_in_a_trial_has_it_measured_by_the_next(bench: Any) -> None:
    study_id = (await bench.service.begin(REQUEST))["id"]
    await bench.service.trials.dispatch()
    lost = bench.fleet.requests.pop(0)[1]
    bench.fleet.connected = [bench.session(instance_id="i1")]
    await bench.answer_all(bench.session(instance_id="i1"))
    study = await bench.service.get(study_id)
    assert study["trials_by_state"] == {"measured": study["trials_total"]}
    assert [trial["attempts"] for trial in study["trials"] if trial["id"] == lost.trial_id] == [1]
    assert {trial["attempts"] for trial in study["trials"] if trial["id"] != lost.trial_id} == {0}


async def test_a_trial_that_kills_every_worker_is_failed_and_the_study_goes_on(bench: Any) -> None:
    study_id = (await bench.service.begin(REQUEST))["id"]
    lives = 0
    await bench.service.trials.dispatch()
    while bench.fleet.requests:
        _, task = bench.fleet.requests.pop(0)
        if task.trial_id == "000":
            lives += 1
            bench.fleet.connected = [bench.session(instance_id=f"life{lives}")]
        else:
            await bench.service.trials.on_trial_result(bench.fleet.connected[0], bench.outcome_of(task))
        await bench.service.trials.dispatch()
        await bench.service.trials.dispatch()
    assert lives == MAX_ATTEMPTS
    study = await bench.service.get(study_id)
    assert study["trials"][0]["state"] == "failed"
    assert "restarted" in study["trials"][0]["detail"]
    assert study["state"] == "finished"
    assert study["trials_by_state"] == {"failed": 1, "measured": study["trials_total"] - 1}


async def test_a_worker_that_comes_back_as_the_same_process_is_asked_again(bench: Any) -> None:
    await bench.service.begin(REQUEST)
    await bench.service.trials.dispatch()
    _, task = bench.fleet.requests.pop(0)
    worker, bench.fleet.connected = bench.fleet.connected, []
    await bench.service.trials.dispatch()
    bench.clock.advance(ABSENCE_S / 2)
    await bench.service.trials.dispatch()
    assert bench.fleet.requests == []
    bench.fleet.connected = worker
    await bench.service.trials.dispatch()
    assert bench.fleet.requests == [("w0", task)]


async def test_a_worker_that_stays_away_loses_its_trial(bench: Any) -> None:
    await bench.service.begin(REQUEST)
    await bench.service.trials.dispatch()
    _, task = bench.fleet.requests.pop(0)
    bench.fleet.connected = [bench.session("w1")]
    await bench.service.trials.dispatch()
    bench.clock.advance(ABSENCE_S + 1)
    await bench.service.trials.dispatch()  # gives it up; w1 has another trial by now
    await bench.answer_all()
    study = (await bench.service.list())[0]
    assert study["state"] == "finished"
    assert study["trials_by_state"] == {"measured": study["trials_total"]}
    assert task.trial_id == "000"


async def test_a_failed_trial_is_tried_again_and_an_infeasible_one_is_not(bench: Any) -> None:
    study_id = (await bench.service.begin(REQUEST))["id"]
    await bench.service.trials.dispatch()
    for number in range(MAX_ATTEMPTS):
        _, task = bench.fleet.requests.pop(0)
        assert task.trial_id == "000", number
        await bench.service.trials.on_trial_result(
            bench.session(), bench.outcome_of(task, TrialStatus.FAILED, detail="boom")
        )
        await bench.service.trials.dispatch()
    _, task = bench.fleet.requests.pop(0)
    assert task.trial_id == "001"
    await bench.service.trials.on_trial_result(
        bench.session(), bench.outcome_of(task, TrialStatus.INFEASIBLE, detail="no")
    )
    await bench.answer_all()
    study = await bench.service.get(study_id)
    assert [(trial["state"], trial["detail"]) for trial in study["trials"][:2]] == [
        ("failed", "boom"),
        ("infeasible", "no"),
    ]
    assert study["state"] == "finished"


async def test_a_study_without_any_measurement_has_failed(bench: Any) -> None:
    study_id = (await bench.service.begin(REQUEST))["id"]
    await bench.service.trials.dispatch()
    while bench.fleet.requests:
        _, task = bench.fleet.requests.pop(0)
        await bench.service.trials.on_trial_result(bench.session(), bench.outcome_of(task, TrialStatus.INFEASIBLE))
        await bench.service.trials.dispatch()
    assert (await bench.service.get(study_id))["state"] == "failed"


async def test_cancelling_stops_the_worker_and_keeps_what_was_measured(bench: Any) -> None:
    study_id = (await bench.service.begin(REQUEST))["id"]
    await bench.service.trials.dispatch()
    _, first = bench.fleet.requests.pop(0)
    await bench.service.trials.on_trial_result(bench.session(), bench.outcome_of(first))
    await bench.service.trials.dispatch()
    _, running = bench.fleet.requests.pop(0)
    study = await bench.service.cancel(study_id)
    assert study["state"] == "cancelled"
    assert bench.fleet.cancelled == [("w0", study_id, running.trial_id)]
    assert len(await profiles_of(bench)) == len(first.coders)
    await bench.service.trials.on_trial_result(bench.session(), bench.outcome_of(running, TrialStatus.CANCELLED))
    await bench.service.trials.dispatch()
    assert bench.fleet.requests == []
    again = bench.make_service()
    await again.start()
    await again.stop()
    assert (await again.get(study_id))["trials_by_state"]["cancelled"] == study["trials_total"] - 1


async def test_late_repeated_and_unknown_results_change_nothing(bench: Any) -> None:
    study_id = (await bench.service.begin(REQUEST))["id"]
    await bench.service.trials.dispatch()
    _, task = bench.fleet.requests.pop(0)
    await bench.service.trials.on_trial_result(bench.session(), bench.outcome_of(task, loss_nats=0.01))
    before = await profiles_of(bench)
    await bench.service.trials.on_trial_result(bench.session(), bench.outcome_of(task, loss_nats=5.0))
    await bench.service.trials.on_trial_result(bench.session(), bench.outcome_of(task, TrialStatus.FAILED))
    other = await bench.service.begin(REQUEST)
    assert other["id"] != study_id
    assert await profiles_of(bench) == before
    assert (await bench.service.get(study_id))["trials"][0]["state"] == "measured"


async def test_two_studies_on_equal_texts_add_up_and_other_texts_start_afresh(bench: Any) -> None:
    await bench.service.begin({**REQUEST, "segments": 4})
    await bench.answer_all()
    await bench.service.begin({**REQUEST, "segments": 6})
    await bench.answer_all()
    assert {profile.loss_samples for profile in await profiles_of(bench)} == {6}
    await bench.service.begin({**REQUEST, "segments": 2})
    await bench.answer_all()
    assert {profile.loss_samples for profile in await profiles_of(bench)} == {6}
    await bench.service.begin({**REQUEST, "segments": 3})
    await bench.answer_all(corpus="texts#2")
    assert {profile.loss_samples for profile in await profiles_of(bench)} == {3}


async def test_events_begin_with_the_present_and_end_with_the_study(bench: Any) -> None:
    study_id = (await bench.service.begin(REQUEST))["id"]
    seen: list[dict[str, Any]] = []

    async def follow() -> None:
        async for state in bench.service.events(study_id):
            seen.append(state)

    follower = asyncio.create_task(follow())
    await asyncio.sleep(0)
    await bench.answer_all()
    async with asyncio.timeout(30):
        await follower
    assert seen[0]["trials_done"] == 0
    assert seen[-1]["state"] == "finished"
    assert [state["trials_done"] for state in seen] == sorted(state["trials_done"] for state in seen)


async def test_an_unknown_study_is_said_to_be_unknown(bench: Any) -> None:
    with pytest.raises(StudyNotFoundError):
        await bench.service.get("nope")
    with pytest.raises(StudyNotFoundError):
        await bench.service.cancel("nope")
    with pytest.raises(StudyNotFoundError):
        bench.service.events("nope")


async def test_a_store_that_fails_loses_no_trial(bench: Any) -> None:
    study_id = (await bench.service.begin(REQUEST))["id"]
    await bench.service.trials.dispatch()
    _, task = bench.fleet.requests.pop(0)
    with failing_updates(bench, "profiles", "INSERT"):
        await bench.service.trials.on_trial_result(bench.session(), bench.outcome_of(task))
        assert (await bench.service.get(study_id))["trials"][0]["state"] == "pending"
    await bench.answer_all()
    assert (await bench.service.get(study_id))["state"] == "finished"


async def test_a_result_stays_kept_where_only_the_end_of_the_study_is_not(bench: Any) -> None:
    study_id = (await bench.service.begin(REQUEST))["id"]
    with failing_updates(bench, "studies"):
        with pytest.raises(StoreError):
            await bench.answer_all()
        study = await bench.service.get(study_id)
        assert (study["state"], study["trials_by_state"]) == ("running", {"measured": study["trials_total"]})
    await bench.service.trials.dispatch()
    assert (await bench.service.get(study_id))["state"] == "finished"
    assert bench.fleet.requests == []


async def test_a_study_whose_trials_are_not_kept_is_not_there_after_a_restart(bench: Any) -> None:
    with failing_updates(bench, "trials", of="INSERT"), pytest.raises(StoreError):
        await bench.service.begin(REQUEST)
    assert await bench.service.list() == []
    bench.service = bench.make_service()
    await bench.service.start()
    await bench.service.stop()
    assert await bench.service.list() == []


async def test_a_lost_trial_whose_failure_is_not_kept_is_given_up_by_the_next_review(bench: Any) -> None:
    study_id = (await bench.service.begin(REQUEST))["id"]
    lives = 0
    while lives < MAX_ATTEMPTS:
        await bench.service.trials.dispatch()
        await bench.service.trials.dispatch()
        _, task = bench.fleet.requests.pop(0)
        if task.trial_id == "000":
            lives += 1
            bench.fleet.connected = [bench.session(instance_id=f"life{lives}")]
        else:
            await bench.service.trials.on_trial_result(bench.fleet.connected[0], bench.outcome_of(task))
    with failing_updates(bench, "trials"), pytest.raises(StoreError):
        await bench.service.trials.dispatch()
    await bench.service.trials.dispatch()
    assert (await bench.service.get(study_id))["trials"][0]["state"] == "failed"


async def test_a_study_is_cancelled_with_all_its_trials_or_goes_on(bench: Any) -> None:
    study_id = (await bench.service.begin(REQUEST))["id"]
    await bench.service.trials.dispatch()
    with failing_updates(bench, "trials"), pytest.raises(StoreError):
        await bench.service.cancel(study_id)
    assert (await bench.service.get(study_id))["state"] == "running"
    assert bench.fleet.cancelled == []
    bench.service = bench.make_service()  # kill -9
    await bench.service.start()
    await bench.service.stop()
    study = await bench.service.get(study_id)
    assert (study["state"], study["trials_by_state"]) == ("running", {"pending": study["trials_total"]})
    await bench.service.trials.dispatch()
    study = await bench.service.cancel(study_id)
    assert (study["state"], study["trials_by_state"]) == ("cancelled", {"cancelled": study["trials_total"]})
    assert bench.fleet.cancelled == [("w0", study_id, "000")]
    bench.fleet.requests.clear()
    await bench.service.trials.dispatch()
    assert bench.fleet.requests == []


async def test_the_service_gives_out_work_by_itself(bench: Any) -> None:
    await bench.service.start()
    await bench.service.begin(REQUEST)
    async with asyncio.timeout(30):
        while not bench.fleet.requests:
            await asyncio.sleep(0.01)
    await bench.service.stop()
    assert isinstance(bench.service, StudyService)
