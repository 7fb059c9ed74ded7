from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controld.candidates.profile import Profile, StageTime
from controld.contract.decision import RAW
from controld.contract.effect import Effect, Half, Path, Verdict
from controld.contract.errors import FieldError
from controld.controller.knobs.base import STAGES, Stage
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.controller.learner import Feedback, Learner

NOW = 10_000.0
Build = Callable[..., Any]


def learner_for(*profiles: Profile, **places: str) -> Learner:
    learner = Learner("pd", "default", KvTransfer())
    learner.set_candidates(profiles, **{"sender_hardware": "p", "receiver_hardware": "d", **places})  # type: ignore[arg-type]
    return learner


def coded(effect: Build, profile: Profile, number: int, slow: float = 1.0, **changes: object) -> Effect:
    """A verified transfer of 14 MB in four chunks at 10 MB/s, with the codec `slow` times slower than profiled."""
    values: dict[str, object] = {
        "transfer_id": f"t{number}",
        "arm_id": profile.arm_id,
        "path": Path.CODED,
        "chunks": 4,
        "wire_bytes": 3_500_000,
        "encode_s": slow * profile.encode.seconds(14e6),
        "wire_s": 0.35,
        "decode_s": slow * profile.decode.seconds(14e6),
    }
    return effect(**{**values, **changes})


def factor(learner: Learner, arm_id: str, stage: Stage) -> float:
    return learner.corrections(NOW)[arm_id][STAGES.index(stage)].factor


def test_exact_predictions_teach_a_factor_of_one(effect: Build, profile: Build) -> None:
    p = profile()
    learner = learner_for(p)
    for number in range(20):
        assert learner.observe(coded(effect, p, number), NOW) is Feedback.LEARNED
    for stage in STAGES:
        assert factor(learner, p.arm_id, stage) == pytest.approx(1.0, abs=0.01)
    assert learner.evidence == 20


def test_raw_learns_its_whole_time_from_the_wire(effect: Build, profile: Build) -> None:
    learner = learner_for(profile())
    for number in range(40):
        sent = effect(transfer_id=f"t{number}", wire_s=2.0, verdict=Verdict.UNVERIFIED)
        assert learner.observe(sent, NOW) is Feedback.LEARNED
    assert factor(learner, RAW, Stage.WIRE) == pytest.approx(2.0 / 1.401, rel=0.06)


def test_a_slow_machine_is_seen_on_arms_not_yet_used_but_not_wholly(effect: Build, profile: Build) -> None:
    used, idle = profile(12), profile(8)
    learner = learner_for(used, idle)
    for number in range(30):
        learner.observe(coded(effect, used, number, slow=2.0), NOW)
    assert factor(learner, used.arm_id, Stage.ENCODE) == pytest.approx(2.0, rel=0.1)
    assert 1.3 < factor(learner, idle.arm_id, Stage.ENCODE) < 1.6, "one arm alone: it may be the arm, or the machine"
    assert factor(learner, RAW, Stage.ENCODE) == factor(learner_for(used, idle), RAW, Stage.ENCODE)


def test_the_more_arms_are_slow_the_more_it_is_the_machine(effect: Build, profile: Build) -> None:
    arms, idle = [profile(levels) for levels in (4, 6, 10, 12)], profile(8)
    learner, factors = learner_for(*arms, idle), []
    for used in arms:
        for number in range(30):
            learner.observe(replace(coded(effect, used, number, slow=2.0), transfer_id=f"{used.arm_id}{number}"), NOW)
        factors.append(factor(learner, idle.arm_id, Stage.ENCODE))
    assert factors == sorted(factors)
    assert 1.6 < factors[-1] < 1.95


def test_how_far_news_moved_the_corrections_counts_from_when_they_were_asked_for(effect: Build, profile: Build) -> None:
    p = profile()
    learner = learner_for(p)
    learner.corrections(NOW)
    learner.observe(coded(effect, p, 0, slow=1.02), NOW)
    assert learner.moved_log < 0.05
    learner.observe(coded(effect, p, 1, slow=4.0), NOW)
    assert learner.moved_log > 0.1
    learner.corrections(NOW)
    assert learner.moved_log == 0.0


def test_a_link_that_is_not_what_the_estimate_says_teaches_nothing_of_the_arm_unless_it_lasts(
    effect: Build, profile: Build
) -> None:
    p = profile()
    learner = learner_for(p)
    for number in range(10):
        learner.observe(coded(effect, p, number), NOW)
    before = factor(learner, p.arm_id, Stage.WIRE)

    def slow_link(number: int) -> Effect:
        usual = coded(effect, p, number)
        return replace(usual, wire_s=5 * usual.wire_s)

    for number in (10, 11):
        learner.observe(slow_link(number), NOW)
    assert factor(learner, p.arm_id, Stage.WIRE) == before
    for number in range(12, 16):
        learner.observe(slow_link(number), NOW)
    assert factor(learner, p.arm_id, Stage.WIRE) > 3


def test_foreign_profiles_are_doubted_more(profile: Build) -> None:
    local = learner_for(profile()).corrections(NOW)
    foreign = learner_for(profile(), sender_hardware="elsewhere").corrections(NOW)
    arm_id = profile().arm_id
    assert foreign[arm_id][0].variance > 5 * local[arm_id][0].variance
    assert foreign[RAW] == local[RAW]


@pytest.mark.parametrize(
    ("changes", "feedback"),
    [
        ({"half": Half.RECEIVER}, Feedback.RECEIVER_HALF),
        ({"arm_id": "0123456789abcdef"}, Feedback.ORPHAN),
        ({"tier": "prefix_store"}, Feedback.ORPHAN),
        ({"link_group": "other"}, Feedback.ORPHAN),
        ({"finished_unix_s": NOW - 3600}, Feedback.LATE),
        ({"finished_unix_s": NOW + 3600}, Feedback.LATE),
        ({"raw_bytes": 0, "wire_bytes": 0}, Feedback.EMPTY),
        ({"verdict": Verdict.UNVERIFIED}, Feedback.NOT_VERIFIED),
        ({"verdict": Verdict.ERROR, "path": Path.FAILED}, Feedback.NOT_VERIFIED),
        ({"encode_s": 1e9}, Feedback.IMPLAUSIBLE),
        ({"service_class": "probe"}, Feedback.UNLEARNED_CLASS),
    ],
)
def test_feedback_that_teaches_nothing(
    effect: Build, profile: Build, changes: dict[str, object], feedback: Feedback
) -> None:
    p = profile()
    learner = learner_for(p)
    learner.set_candidates([p], sender_hardware="p", receiver_hardware="d", unlearned_classes=["probe"])
    learner.observe(coded(effect, p, 0), NOW)
    before = learner.corrections(NOW)
    assert learner.observe(coded(effect, p, 1, **changes), NOW) is feedback
    assert learner.corrections(NOW) == before
    assert learner.counters[feedback] == 1
    assert learner.pins(NOW).pins == ()


@pytest.mark.parametrize(
    "field", ["encode_s", "wire_s", "decode_s", "raw_bytes", "wire_bytes", "bandwidth_bytes_per_s"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_numbers_that_are_none_are_ignored(effect: Build, profile: Build, field: str, value: float) -> None:
    p = profile()
    learner = learner_for(p)
    broken = coded(effect, p, 0)
    object.__setattr__(broken, field, value)  # past the constructor that would refuse it
    before = learner.to_json()
    assert learner.observe(broken, NOW) is Feedback.MALFORMED
    assert learner.to_json() == before


def test_a_transfer_teaches_once(effect: Build, profile: Build) -> None:
    p = profile()
    learner = learner_for(p)
    assert learner.observe(coded(effect, p, 0, slow=2.0), NOW) is Feedback.LEARNED
    before = learner.to_json()
    assert learner.observe(coded(effect, p, 0, slow=2.0), NOW) is Feedback.DUPLICATE
    assert learner.to_json() == before


def test_an_unknown_bandwidth_teaches_the_codec_only(effect: Build, profile: Build) -> None:
    p = profile()
    learner = learner_for(p)
    learner.observe(coded(effect, p, 0, bandwidth_bytes_per_s=0.0), NOW)
    observations = {s: c.observations for s, c in zip(STAGES, learner.corrections(NOW)[p.arm_id], strict=True)}
    assert observations == {Stage.ENCODE: 1.0, Stage.BYTES: 1.0, Stage.WIRE: 0.0, Stage.DECODE: 1.0}


def test_repeated_refusals_pin_an_arm_off_for_good(effect: Build, profile: Build) -> None:
    p = profile()
    learner = learner_for(p)
    refused = {"verdict": Verdict.NACK, "path": Path.RAW_FALLBACK, "reason": "checksum"}
    for number in range(3):
        assert learner.pins(NOW).pins == ()
        assert learner.observe(coded(effect, p, number, **refused), NOW) is Feedback.FAULT
    assert "checksum" in learner.pins(NOW + 1e9).reason(p.arm_id, "chat")
    assert learner.unpin(p.arm_id)
    assert learner.pins(NOW).pins == ()
    assert not learner.unpin(p.arm_id)


def test_success_that_moved_nothing_counts_as_refusal(effect: Build, profile: Build) -> None:
    p = profile()
    learner = learner_for(p)
    for number in range(3):
        assert learner.observe(coded(effect, p, number, wire_bytes=0), NOW) is Feedback.FAULT
    assert learner.pins(NOW).reason(p.arm_id, "default")
    assert learner.counters[Feedback.LEARNED] == 0


def test_frequent_fall_backs_rest_an_arm_longer_each_time(effect: Build, profile: Build) -> None:
    p = profile()
    learner = learner_for(p)
    fell_back = {"path": Path.RAW_FALLBACK, "reason": "no slot"}
    for number in range(5):
        assert learner.observe(coded(effect, p, number, **fell_back), NOW) is Feedback.FELL_BACK
    assert "no slot" in learner.pins(NOW + 59).reason(p.arm_id, "default")
    assert learner.pins(NOW + 61).pins == ()
    for number in range(5, 10):
        learner.observe(coded(effect, p, number, finished_unix_s=NOW + 61, **fell_back), NOW + 61)
    assert learner.pins(NOW + 61 + 119).reason(p.arm_id, "default")
    assert learner.pins(NOW + 61 + 121).pins == ()


def test_a_rare_fall_back_does_no_harm(effect: Build, profile: Build) -> None:
    p = profile()
    learner = learner_for(p)
    for number in range(100):
        changes = {"path": Path.RAW_FALLBACK} if number % 5 == 0 else {}
        learner.observe(coded(effect, p, number, **changes), NOW)
    assert learner.pins(NOW).pins == ()


def test_a_new_profile_of_an_arm_starts_fresh(effect: Build, profile: Build) -> None:
    p, other = profile(12), profile(8)
    learner = learner_for(p, other)
    for number in range(3):
        learner.observe(coded(effect, p, number, slow=3.0), NOW)
    for number in range(3, 6):
        learner.observe(coded(effect, other, number, slow=3.0), NOW)
    again = profile(12, encode=StageTime(2e-3, 1e-9))
    learner.set_candidates([again, other], sender_hardware="p", receiver_hardware="d")
    learned = learner.corrections(NOW)
    assert learned[again.arm_id][0].observations == 0
    assert learned[other.arm_id][0].observations > 0


def test_restart_changes_nothing(effect: Build, profile: Build) -> None:
    p, other = profile(12), profile(8)
    learner = learner_for(p, other)
    for number in range(30):
        slow = 1.0 if number < 15 else 3.0
        learner.observe(coded(effect, p if number % 3 else other, number, slow), NOW + number)
        learner.observe(
            effect(transfer_id=f"r{number}", verdict=Verdict.NACK if number == 7 else Verdict.VERIFIED), NOW
        )
    for number in range(30, 33):
        learner.observe(coded(effect, other, number, verdict=Verdict.NACK), NOW)
    text = learner.to_json()
    restored = Learner("pd", "default", KvTransfer())
    restored.restore(text)
    restored.set_candidates([p, other], sender_hardware="p", receiver_hardware="d")
    assert restored.to_json() == text
    assert restored.corrections(NOW + 60) == learner.corrections(NOW + 60)
    assert restored.pins(NOW) == learner.pins(NOW)
    more = coded(effect, p, 99, 2.0)
    assert restored.observe(more, NOW + 60) is learner.observe(more, NOW + 60)
    assert restored.to_json() == learner.to_json()
    assert restored.observe(coded(effect, p, 1), NOW) is Feedback.DUPLICATE


def test_a_restored_state_of_other_profiles_is_dropped(effect: Build, profile: Build) -> None:
    p = profile()
    learner = learner_for(p)
    learner.observe(coded(effect, p, 0, slow=3.0), NOW)
    restored = learner_for(profile(encode=StageTime(5e-3, 1e-9)))
    restored.restore(learner.to_json())
    assert restored.corrections(NOW)[p.arm_id][0].observations == 0


@pytest.mark.parametrize("change", ["", "{", "[]", "format", "tier", "arms", "stage", "evidence"])
def test_a_broken_state_is_refused_whole(effect: Build, profile: Build, change: str) -> None:
    p = profile()
    learner = learner_for(p)
    learner.observe(coded(effect, p, 0), NOW)
    text = change
    if change.isalpha():
        document = json.loads(learner.to_json())
        if change == "stage":
            document["arms"][p.arm_id]["stages"]["encode"][0] = "x"
        else:
            document[change] = "x"
        text = json.dumps(document)
    fresh = learner_for(p)
    before = fresh.to_json()
    with pytest.raises(FieldError):
        fresh.restore(text)
    assert fresh.to_json() == before


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_comes_the_corrections_stay_sane(effect: Build, profile: Build, data: st.DataObject) -> None:
    p = profile()
    learner = learner_for(p)
    seconds = st.floats(0, 1e6, allow_nan=False)
    for _ in range(data.draw(st.integers(1, 25))):
        learner.observe(
            effect(
                transfer_id=data.draw(st.sampled_from(["a", "b", "c", "d", "e", "f"])),
                half=data.draw(st.sampled_from(Half)),
                arm_id=data.draw(st.sampled_from([RAW, p.arm_id, "f" * 16])),
                raw_bytes=data.draw(st.integers(0, 10**12)),
                wire_bytes=data.draw(st.integers(0, 10**12)),
                chunks=data.draw(st.integers(0, 1000)),
                encode_s=data.draw(seconds),
                wire_s=data.draw(seconds),
                decode_s=data.draw(seconds),
                path=data.draw(st.sampled_from(Path)),
                verdict=data.draw(st.sampled_from(Verdict)),
                bandwidth_bytes_per_s=data.draw(st.floats(0, 1e12)),
                finished_unix_s=data.draw(st.floats(0, 20_000)),
            ),
            NOW,
        )
    for corrections in learner.corrections(NOW).values():
        for correction in corrections:
            assert 1e-3 / 2 < correction.factor < 1e3 * 2
            assert correction.variance > 0
    restored = learner_for(p)
    restored.restore(learner.to_json())
    assert restored.to_json() == learner.to_json()
    assert sum(learner.counters.values()) > 0


def test_what_the_link_took_is_learned_for_every_coded_arm_alike(effect: Build, profile: Build) -> None:
    """An arm much used must not look faster than one that sends fewer bytes: the link is the same for both."""
    used, idle = profile(12), profile(8)
    learner = learner_for(used, idle)
    for number in range(30):
        learner.observe(coded(effect, used, number, wire_s=0.30), NOW)
    assert factor(learner, idle.arm_id, Stage.WIRE) == factor(learner, used.arm_id, Stage.WIRE)
    assert factor(learner, used.arm_id, Stage.WIRE) < 0.9
    assert factor(learner, RAW, Stage.WIRE) == pytest.approx(1.0, abs=0.03)
    again = learner_for(used, idle)
    again.restore(learner.to_json())
    assert again.corrections(NOW) == learner.corrections(NOW)
