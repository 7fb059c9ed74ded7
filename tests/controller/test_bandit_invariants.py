"""What the bandit promises whatever comes: no hostile feedback moves it, and what it explores has a chance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controld.candidates.profile import Profile, StageTime
from controld.contract.decision import RAW
from controld.contract.effect import Effect, Half, Path, Verdict
from controld.controller.decide import decide
from controld.controller.evaluate import Evaluation
from controld.controller.explain import find_cell
from controld.controller.exploration import HOPELESS
from controld.controller.goals import ClassGoal, ClassInput, Objective
from controld.controller.grid import Grid
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.controller.learner import Feedback, Learner
from controld.controller.plan import TablePlan, plan_equal
from controld.controller.posterior import HALF_LIFE_S, StageCorrection
from controld.controller.sweeps import evaluate_classes

Build = Callable[..., Any]
NOW = 10_000.0
NOT_LEARNED = frozenset(Feedback) - {Feedback.LEARNED, Feedback.FAULT, Feedback.FELL_BACK}
COARSE = Grid(
    size_edges_bytes=(1e6, 1e7),
    bandwidth_edges_bytes_per_s=tuple(1e6 * 8.0**i for i in range(5)),
    load_edges=(0.3, 0.9, 2.0),
)
FEW = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10, deadline=None)


def coded(effect: Build, profile: Profile, number: int, slow: float = 1.0) -> Effect:
    return effect(  # type: ignore[no-any-return]
        transfer_id=f"t{number}", arm_id=profile.arm_id, path=Path.CODED, chunks=4, wire_bytes=3_500_000,
        encode_s=slow * profile.encode.seconds(14e6), wire_s=0.35, decode_s=slow * profile.decode.seconds(14e6),
    )  # fmt: skip


def learner_for(*profiles: Profile) -> Learner:
    learner = Learner("pd", "default", KvTransfer())
    learner.set_candidates(profiles, sender_hardware="p", receiver_hardware="d")
    return learner


NUMBERS = ("raw_bytes", "wire_bytes", "encode_s", "wire_s", "decode_s", "bandwidth_bytes_per_s", "finished_unix_s")

hostile = st.one_of(
    st.tuples(st.sampled_from(NUMBERS), st.sampled_from([math.nan, math.inf, -math.inf, -1.0, -1e-300])),
    st.tuples(st.just("transfer_id"), st.sampled_from(["t0", "t1", "t2"])),
    st.tuples(st.just("finished_unix_s"), st.sampled_from([0.0, NOW - 601.0, NOW + 61.0, 1e300])),
    st.tuples(st.just("arm_id"), st.sampled_from(["f" * 16, "recompute", "x"])),
    st.tuples(st.just("tier"), st.sampled_from(["video", "prefix_store", "x"])),
    st.tuples(st.just("link_group"), st.just("other")),
    st.tuples(st.just("half"), st.just(Half.RECEIVER)),
    st.tuples(st.just("verdict"), st.sampled_from([Verdict.UNVERIFIED, Verdict.ERROR])),
    st.tuples(st.just("encode_s"), st.sampled_from([1e9, 1e-12])),
)


@FEW
@given(stream=st.lists(hostile, min_size=1, max_size=30))
def test_hostile_feedback_changes_nothing_and_is_counted(
    profile: Build, request_for: Build, effect: Build, stream: list[tuple[str, Any]]
) -> None:
    p = profile()
    learner = learner_for(p)
    for number in range(5):
        learner.observe(coded(effect, p, number, slow=1.5), NOW)
    before = (learner.corrections(NOW), learner.pins(NOW), learner.evidence, sum(learner.counters.values()))
    plan = decide([request_for(p, corrections=before[0])], grid=COARSE)
    for index, (field, value) in enumerate(stream):
        lie = coded(effect, p, 100 + index)
        object.__setattr__(lie, field, value)  # past the constructor, which refuses some of these
        assert learner.observe(lie, NOW) in NOT_LEARNED
    after = (learner.corrections(NOW), learner.pins(NOW), learner.evidence, sum(learner.counters.values()))
    assert after[:3] == before[:3]
    assert after[3] == before[3] + len(stream)
    assert plan_equal(plan, decide([request_for(p, corrections=after[0])], grid=COARSE))
    # And what is true is still learned.
    assert learner.observe(coded(effect, p, 999, slow=1.5), NOW) is Feedback.LEARNED


stage_times = st.builds(StageTime, st.floats(0, 0.1), st.floats(0, 1e-7))


@st.composite
def inputs(draw: st.DrawFn) -> Callable[[Build, Build], tuple[ClassInput, ...]]:
    arms = draw(
        st.lists(
            st.tuples(st.floats(0.5, 12), stage_times, stage_times, st.sampled_from([0.0, 0.005, 0.05]),
                      st.floats(-2, 2), st.sampled_from([1e-6, 0.02, 1.0])),
            max_size=4,
        )
    )  # fmt: skip
    classes = draw(
        st.lists(
            st.tuples(st.sampled_from(Objective), st.sampled_from([0.0, 0.02, 1.0]), st.sampled_from([0.0, 0.02, 0.5])),
            min_size=1, max_size=3,
        )
    )  # fmt: skip
    shared = draw(st.booleans())

    def build(profile: Build, request_for: Build) -> tuple[ClassInput, ...]:
        profiles = [
            profile(4 + i, ratio=ratio, encode=encode, decode=decode, loss_mean_nats=loss, loss_se_nats=0.0)
            for i, (ratio, encode, decode, loss, _, _) in enumerate(arms)
        ]
        corrections = {
            p.arm_id: tuple(StageCorrection(log, variance, 0.01, 9.0) for _ in range(4))
            for p, (*_, log, variance) in zip(profiles, arms, strict=True)
        }
        goals = tuple(
            ClassGoal(
                name=f"c{i}", workload="dialogue", objective=objective, max_quality_loss_nats=limit,
                explore_share=share, offered_share=1 / len(classes) if shared else None,
            )
            for i, (objective, limit, share) in enumerate(classes)
        )  # fmt: skip
        return request_for(*profiles, goals=goals, corrections=corrections).class_inputs()  # type: ignore[no-any-return]

    return build


def evaluated(items: tuple[ClassInput, ...], knob: KvTransfer | None = None) -> list[Evaluation]:
    nothing = [np.full(COARSE.shape, -1, dtype=np.intp)] * len(items)
    return evaluate_classes(items, knob or KvTransfer(), COARSE.points, nothing)


@FEW
@given(build=inputs())
def test_never_slower_than_raw_never_above_the_limit_and_nothing_hopeless_is_explored(
    profile: Build, request_for: Build, build: Callable[[Build, Build], tuple[ClassInput, ...]]
) -> None:
    items = build(profile, request_for)
    for item, evaluation, again in zip(items, evaluated(items), evaluated(items), strict=True):
        assert np.array_equal(evaluation.winner, again.winner), "equal inputs, equal decision"
        assert np.array_equal(evaluation.explore_units, again.explore_units)
        uppers = np.array([0.0, *(c.loss_upper_nats for c in item.candidates[1:])])
        chosen_s = np.take_along_axis(evaluation.rank_s, evaluation.winner[None], axis=0)[0]
        assert (uppers[evaluation.winner] <= item.goal.max_quality_loss_nats).all()
        explored = evaluation.explore_units > 0
        assert not explored[uppers > item.goal.max_quality_loss_nats].any()
        if item.goal.objective is Objective.LATENCY:
            whole = (evaluation.raw_below_s == 0) & (evaluation.raw_below_s_per_byte == 0)
            assert (chosen_s <= evaluation.rank_s[0] * (1 + 1e-12))[whole].all()
        hopeless = evaluation.lower_s > HOPELESS * evaluation.rank_s[0]
        assert not (explored & hopeless).any()


def drawn(table: TablePlan, bandwidth: float = 30e6) -> dict[str, float]:
    mixture = table.mixtures[table.cells[find_cell(table, "default", 14e6, bandwidth, 0.05)]]
    return {table.arms[arm].arm_id: weight for arm, weight in zip(mixture.arms, mixture.weights, strict=True)}


def test_an_arm_long_unseen_is_tried_again_and_one_seen_slow_just_now_is_not(
    profile: Build, request_for: Build, effect: Build
) -> None:
    first, second = profile(12, ratio=4.0), profile(8, ratio=3.8)
    learner = learner_for(first, second)
    for number in range(40):
        learner.observe(coded(effect, first, number, slow=12.0), NOW)
        learner.observe(replace(coded(effect, second, number), transfer_id=f"s{number}"), NOW)
    at = {
        hours: drawn(
            decide([request_for(first, second, corrections=learner.corrections(NOW + 3600 * hours))]).tables[0]
        )
        for hours in (0, 12)
    }
    assert HALF_LIFE_S == 3600.0
    assert first.arm_id not in at[0]
    assert at[12][first.arm_id] > 0


@pytest.mark.parametrize(("ratio", "cost_s", "stays"), [(4.4, 0.0, False), (4.4, 0.1, True), (5.5, 0.1, False)])
def test_a_change_of_arm_must_earn_what_it_costs(
    profile: Build, request_for: Build, ratio: float, cost_s: float, stays: bool
) -> None:
    # At 10 MB/s 14 MB take 0.35 s at ratio 4.0: 0.03 s less at 4.4, and 0.1 s less at 5.5.
    used, rival = profile(12, ratio=4.0), profile(8, ratio=3.0)
    knob = KvTransfer(switch_cost_s=cost_s)
    before = decide([request_for(used, rival)], knob=knob)
    assert next(iter(drawn(before.tables[0], 6e6))) == used.arm_id
    after = decide([request_for(used, replace(rival, ratio=ratio))], knob=knob, previous=before)
    winner = next(iter(drawn(after.tables[0], 6e6)))
    assert winner == (used if stays else rival).arm_id
    fresh = decide([request_for(used, replace(rival, ratio=ratio))], knob=knob)
    assert next(iter(drawn(fresh.tables[0], 6e6))) == rival.arm_id, "where nothing is in use, nothing is switched"


def test_a_switch_cost_never_keeps_an_arm_that_became_slower_than_raw(profile: Build, request_for: Build) -> None:
    p = profile()
    knob = KvTransfer(switch_cost_s=10.0)
    before = decide([request_for(p)], knob=knob)
    slow = replace(p, encode=StageTime(3.0, 0.0))
    after = decide([request_for(slow)], knob=knob, previous=before)
    assert next(iter(drawn(before.tables[0]))) == p.arm_id
    assert next(iter(drawn(after.tables[0]))) == RAW
