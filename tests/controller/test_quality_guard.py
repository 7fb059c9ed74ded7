"""The quality guard inside a learner: what breaks an arm, for whom, and what alone brings it back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controld.candidates.profile import Profile
from controld.contract.decision import RAW
from controld.contract.effect import Effect, Half, Path, Verdict
from controld.controller.decide import decide
from controld.controller.goals import ClassGoal
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.controller.learner import Feedback, Learner
from controld.controller.quality_guard import Look

NOW = 10_000.0
Build = Callable[..., Any]
NORMAL = {"error_mean": 0.03, "error_log_sd": 0.1, "error_samples": 12, "measured_unix_s": 100.0}
WORKLOADS = {"chat": "dialogue", "batch": "dialogue", "code": "manuals"}


def learner_for(*profiles: Profile) -> Learner:
    learner = Learner("pd", "default", KvTransfer())
    learner.set_candidates(profiles, sender_hardware="p", receiver_hardware="d", workloads=WORKLOADS)
    return learner


def checked(effect: Build, profile: Profile, number: int, error: float | None, **changes: object) -> Effect:
    values: dict[str, object] = {
        "transfer_id": f"t{number}", "arm_id": profile.arm_id, "service_class": "chat", "path": Path.CODED,
        "wire_bytes": 3_500_000, "encode_s": 0.02, "wire_s": 0.35, "decode_s": 0.02, "reconstruction_error": error,
    }  # fmt: skip
    return effect(**{**values, **changes})  # type: ignore[no-any-return]


def break_it(learner: Learner, effect: Build, profile: Profile, first: int = 0, error: float = 0.2) -> int:
    """Feed errors until the arm is out; how many that took."""
    number = 0
    while not learner.pins(NOW).pins:
        learner.observe(checked(effect, profile, first + number, error), NOW)
        number += 1
        assert number < 50
    return number


def test_a_breach_takes_the_arm_from_that_class_only(effect: Build, profile: Build, request_for: Build) -> None:
    p = profile(**NORMAL)
    learner = learner_for(p)
    for number in range(50):
        learner.observe(checked(effect, p, number, 0.03, service_class="batch"), NOW)
    assert break_it(learner, effect, p, first=100) == 3
    (pin,) = learner.pins(NOW).pins
    assert (pin.arm_id, pin.service_class, pin.since_unix_s) == (p.arm_id, "chat", NOW)
    assert math.isinf(pin.until_unix_s)
    assert "6.7 times the profiled 0.03" in pin.reason
    goals = tuple(ClassGoal(name=name, workload="dialogue", max_quality_loss_nats=0.02) for name in ("chat", "default"))
    plan = decide([request_for(p, goals=goals, pins=learner.pins(NOW))])
    table = plan.tables[0].decision_table(version=1)
    slow = [{table.draw(f"x{n}", name, 14e6, 2e6, 0.0).arm.arm_id for n in range(200)} for name in ("chat", "default")]
    assert slow[0] == {RAW}, "not even to explore"
    assert p.arm_id in slow[1]


def test_only_a_person_or_a_later_profile_brings_an_arm_back(effect: Build, profile: Build) -> None:
    p = profile(**NORMAL)
    learner = learner_for(p)
    break_it(learner, effect, p)
    for number in range(100, 400):
        learner.observe(checked(effect, p, number, 0.03), NOW)
    assert learner.pins(NOW + 1e9).pins, "good frames do not undo it"
    learner.set_candidates([], workloads=WORKLOADS)
    learner.set_candidates([profile(**{**NORMAL, "measured_unix_s": NOW - 1, "error_mean": 1.0})], workloads=WORKLOADS)
    assert learner.pins(NOW).pins, "nor does an older measurement"
    learner.set_candidates([profile(**{**NORMAL, "measured_unix_s": NOW + 1})], workloads=WORKLOADS)
    assert not learner.pins(NOW).pins
    break_it(learner, effect, p, first=500)
    assert learner.unpin(p.arm_id)
    assert not learner.pins(NOW).pins
    assert break_it(learner, effect, p, first=600) == 3, "still broken: out again"


def test_a_release_after_the_profile_changed_survives_a_restart(effect: Build, profile: Build) -> None:
    p = profile(**NORMAL)
    older = profile(**{**NORMAL, "measured_unix_s": NOW - 1, "error_mean": 0.04})
    learner = learner_for(p)
    break_it(learner, effect, p)
    learner.set_candidates([older], sender_hardware="p", receiver_hardware="d", workloads=WORKLOADS)
    assert learner.unpin(p.arm_id)
    learner.observe(checked(effect, p, 900, 0.04), NOW)
    restored = learner_for(older)
    restored.restore(learner.to_json())
    assert restored.to_json() == learner.to_json()
    assert restored.quality.rows()[0]["samples"] == 1


def test_another_model_is_judged_by_itself(effect: Build, profile: Build) -> None:
    p, other = profile(**NORMAL), profile(**NORMAL, model_fingerprint="g")
    learner = learner_for(p)
    break_it(learner, effect, p)
    learner.set_candidates([other], workloads=WORKLOADS)
    assert not learner.pins(NOW).pins
    learner.set_candidates([p], workloads=WORKLOADS)
    assert learner.pins(NOW).pins, "the first model's breach was not forgotten"


def test_without_a_figure_in_the_profile_the_first_transfers_say_what_is_normal(effect: Build, profile: Build) -> None:
    p = profile()
    learner = learner_for(p)
    for number in range(20):
        assert not learner.quality.rows() or learner.quality.rows()[0]["state"] == "learning"
        learner.observe(checked(effect, p, number, 0.05), NOW)
    (row,) = learner.quality.rows()
    assert (row["state"], row["samples"], row["normal_from"]) == ("watched", 20, "first samples")
    assert row["normal_error"] == pytest.approx(0.05)
    break_it(learner, effect, p, first=100)
    assert "times the learned 0.05" in learner.pins(NOW).pins[0].reason


def test_classes_that_teach_no_times_are_guarded_all_the_same(effect: Build, profile: Build) -> None:
    p = profile(**NORMAL)
    learner = learner_for(p)
    learner.set_candidates([p], workloads=WORKLOADS, unlearned_classes=["chat"])
    assert break_it(learner, effect, p) == 3


def test_a_frame_that_its_sender_cannot_decode_counts_as_a_refusal(effect: Build, profile: Build) -> None:
    p = profile(**NORMAL)
    learner = learner_for(p)
    fault = {"path": Path.RAW_FALLBACK, "verdict": Verdict.UNVERIFIED, "reason": "self_check:checksum"}
    for number in range(3):
        assert not learner.pins(NOW).pins
        assert learner.observe(checked(effect, p, number, None, **fault), NOW) is Feedback.FAULT
    assert "self_check:checksum" in learner.pins(NOW + 1e9).reason(p.arm_id, "batch")


@pytest.mark.parametrize(
    ("changes", "feedback", "look"),
    [
        ({"reconstruction_error": math.nan}, Feedback.MALFORMED, None),
        ({"reconstruction_error": math.inf}, Feedback.MALFORMED, None),
        ({"reconstruction_error": -0.1}, Feedback.MALFORMED, None),
        ({"reconstruction_error": 1e9}, Feedback.MALFORMED, None),
        ({"half": Half.RECEIVER}, Feedback.RECEIVER_HALF, None),
        ({"arm_id": "f" * 16}, Feedback.ORPHAN, None),
        ({"tier": "prefix_store"}, Feedback.ORPHAN, None),
        ({"finished_unix_s": NOW - 3600}, Feedback.LATE, None),
        ({"transfer_id": "t0"}, Feedback.DUPLICATE, None),
        ({"arm_id": RAW, "path": Path.RAW}, Feedback.LEARNED, Look.UNCODED),
        ({"path": Path.RAW_FALLBACK, "verdict": Verdict.UNVERIFIED}, Feedback.FELL_BACK, None),
        ({"verdict": Verdict.UNVERIFIED}, Feedback.NOT_VERIFIED, None),
        ({"encode_s": 1e9}, Feedback.IMPLAUSIBLE, None),
        ({"service_class": "invented"}, Feedback.LEARNED, Look.UNKNOWN),
        ({"service_class": "code"}, Feedback.LEARNED, Look.UNKNOWN),
    ],
)
def test_hostile_errors_change_nothing_and_are_counted(
    effect: Build, profile: Build, changes: dict[str, object], feedback: Feedback, look: Look | None
) -> None:
    p = profile(**NORMAL)
    learner = learner_for(p)
    learner.observe(checked(effect, p, 0, 0.06), NOW)
    before, looks = learner.quality.to_document(), dict(learner.quality.looks)
    hostile = checked(effect, p, 1, 0.9)
    for name, value in changes.items():
        object.__setattr__(hostile, name, value)  # past the constructor that would refuse it
    for _ in range(10):
        if feedback is not Feedback.DUPLICATE:
            learner._seen.clear()
        assert learner.observe(hostile, NOW) is feedback
        if feedback is Feedback.FELL_BACK:
            break
    assert learner.quality.to_document() == before
    assert {k: n for k, n in learner.quality.looks.items() if n != looks[k]}.keys() == ({look} if look else set())
    assert learner.counters[feedback] >= 1


@pytest.mark.parametrize("changes", [{"encode_s": 1e9}, {"verdict": Verdict.UNVERIFIED}])
def test_what_is_not_believed_leaves_room_for_the_true_effect(
    effect: Build, profile: Build, changes: dict[str, object]
) -> None:
    p = profile(**NORMAL)
    learner = learner_for(p)
    true = checked(effect, p, 0, 0.05)
    assert learner.observe(replace(true, **changes), NOW) in (Feedback.IMPLAUSIBLE, Feedback.NOT_VERIFIED)
    assert learner.observe(true, NOW) is Feedback.LEARNED
    assert learner.observe(true, NOW) is Feedback.DUPLICATE


def test_kill_and_restore_change_nothing(effect: Build, profile: Build) -> None:
    p, plain = profile(**NORMAL), profile(8)
    whole, killed = learner_for(p, plain), learner_for(p, plain)
    for number in range(60):
        arm, error = (plain, 0.05) if number % 3 else (p, 0.03 if number < 40 else 0.3)
        item = checked(effect, arm, number, error, service_class="chat" if number % 2 else "batch")
        whole.observe(item, NOW + number)
        killed.observe(item, NOW + number)
        text = killed.to_json()
        killed = learner_for(p, plain) if number % 2 else Learner("pd", "default", KvTransfer())
        killed.restore(text)
        killed.set_candidates([p, plain], sender_hardware="p", receiver_hardware="d", workloads=WORKLOADS)
        assert killed.to_json() == text
    assert killed.to_json() == whole.to_json()
    assert killed.pins(NOW) == whole.pins(NOW)
    assert len(whole.pins(NOW).pins) == 2


def test_a_state_of_before_the_guard_is_taken(effect: Build, profile: Build) -> None:
    p = profile(**NORMAL)
    learner = learner_for(p)
    learner.observe(checked(effect, p, 0, 0.03), NOW)
    document = json.loads(learner.to_json())
    del document["quality"]
    document["format"] = 1
    restored = learner_for(p)
    restored.restore(json.dumps(document))
    assert restored.corrections(NOW) == learner.corrections(NOW)
    assert restored.quality.to_document() == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(data=st.data())
def test_equal_effects_give_equal_states_and_only_true_breaches_pin(
    effect: Build, profile: Build, data: st.DataObject
) -> None:
    p = profile(**NORMAL)
    first, second = learner_for(p), learner_for(p)
    for number in range(data.draw(st.integers(1, 25))):
        item = effect(
            transfer_id=f"t{number}",
            half=data.draw(st.sampled_from(Half)),
            arm_id=data.draw(st.sampled_from([RAW, p.arm_id, "f" * 16])),
            service_class=data.draw(st.sampled_from(["chat", "batch", "code", "?"])),
            path=data.draw(st.sampled_from([Path.CODED, Path.RAW, Path.FAILED])),
            verdict=data.draw(st.sampled_from([Verdict.VERIFIED, Verdict.UNVERIFIED, Verdict.ERROR])),
            reconstruction_error=data.draw(st.one_of(st.none(), st.floats(0, 0.033))),
        )
        first.observe(item, NOW)
        second.observe(item, NOW)
    assert first.to_json() == second.to_json()
    assert first.quality.pins() == (), "errors a tenth above normal never condemn"
