from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controld.candidates.profile import Profile, StageTime
from controld.contract.decision import RAW
from controld.contract.errors import FieldError
from controld.controller.decide import decide
from controld.controller.explain import find_cell
from controld.controller.goals import ClassGoal, ClassInput, Objective, TableRequest
from controld.controller.grid import Grid
from controld.controller.guard import Pin, PinBoard
from controld.controller.knobs.base import Context
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.controller.plan import Plan, TablePlan, plan_equal
from controld.controller.posterior import StageCorrection

Build = Callable[..., Any]
SLOW, FAST = 10e6, 20e9  # bytes per second


def goal(**changes: object) -> ClassGoal:
    values: dict[str, object] = {"name": "default", "workload": "dialogue", "max_quality_loss_nats": 0.02}
    return ClassGoal(**{**values, **changes})  # type: ignore[arg-type]


def arms_drawn(
    table: TablePlan, bandwidth: float, *, size: float = 14e6, load: float = 0.05, name: str = "default"
) -> dict[str, float]:
    mixture = table.mixtures[table.cells[find_cell(table, name, size, bandwidth, load)]]
    if mixture.is_raw(size, bandwidth):
        return {RAW: 1.0}
    return {table.arms[arm].arm_id: weight for arm, weight in zip(mixture.arms, mixture.weights, strict=True)}


def choice(table: TablePlan, bandwidth: float, **where: Any) -> str:
    return next(iter(arms_drawn(table, bandwidth, **where)))


def learned(mean_log: float, variance: float = 1e-4) -> tuple[StageCorrection, ...]:
    return (
        StageCorrection(mean_log, variance, 0.01, 30.0),
        StageCorrection(0.0, 1e-6, 1e-4, 30.0),
        StageCorrection(0.0, 1e-4, 0.01, 30.0),
        StageCorrection(mean_log, variance, 0.01, 30.0),
    )


def test_codes_on_a_slow_link_and_not_on_a_fast_one(profile: Build, request_for: Build) -> None:
    table = decide([request_for(profile())]).tables[0]
    assert choice(table, SLOW) == profile().arm_id
    assert choice(table, FAST) == RAW
    assert choice(table, SLOW, size=2e3) == RAW, "a few kilobytes are not worth a frame"


def test_without_profiles_everything_is_raw(request_for: Build) -> None:
    table = decide([request_for()]).tables[0]
    assert {arm.arm_id for arm in table.arms} == {RAW}
    assert table.mixtures == (table.mixtures[0],)
    assert table.decision_table(1).draw("t", "default", 14e6, SLOW, 0.1).arm.arm_id == RAW


def test_a_loss_whose_upper_bound_is_above_the_limit_is_out(profile: Build, request_for: Build) -> None:
    uncertain = profile(12, loss_mean_nats=0.019, loss_se_nats=0.002)
    certain = profile(8, loss_mean_nats=0.019, loss_se_nats=0.0001, ratio=3.0)
    table = decide([request_for(uncertain, certain)]).tables[0]
    assert set(arms_drawn(table, SLOW)) <= {RAW, certain.arm_id}
    assert choice(table, SLOW) == certain.arm_id


def test_a_limit_of_zero_leaves_lossless_arms_only(profile: Build, request_for: Build) -> None:
    lossy = profile(12, loss_mean_nats=1e-9, loss_se_nats=0.0)
    lossless = profile(16, loss_mean_nats=0.0, loss_se_nats=0.0, ratio=1.5)
    request = request_for(lossy, lossless, goals=(goal(max_quality_loss_nats=0.0),))
    drawn = {arm for mixture in decide([request]).tables[0].mixtures for arm in mixture.arms}
    assert {decide([request]).tables[0].arms[arm].arm_id for arm in drawn} == {RAW, lossless.arm_id}


def test_one_segment_proves_nothing(profile: Build, request_for: Build) -> None:
    unproven = profile(loss_mean_nats=0.0, loss_se_nats=0.0, loss_samples=1)
    assert choice(decide([request_for(unproven)]).tables[0], SLOW) == RAW


def test_quality_of_another_workload_does_not_count(profile: Build, request_for: Build) -> None:
    assert choice(decide([request_for(profile(workload="code"))]).tables[0], SLOW) == RAW


def test_pins_hold_everywhere_or_for_one_class(profile: Build, request_for: Build) -> None:
    p = profile()
    goals = (goal(name="chat"), goal())
    for pinned_class, chat, default in (("*", RAW, RAW), ("chat", RAW, p.arm_id)):
        pins = PinBoard((Pin(arm_id=p.arm_id, reason="corrupt", since_unix_s=0.0, service_class=pinned_class),))
        table = decide([request_for(p, goals=goals, pins=pins)]).tables[0]
        assert choice(table, SLOW, name="chat") == chat
        assert choice(table, SLOW, name="default") == default
        assert set(arms_drawn(table, SLOW, name="chat")) == {RAW}


def test_within_three_percent_the_better_quality_wins(profile: Build, request_for: Build) -> None:
    good = profile(16, loss_mean_nats=0.002, ratio=4.0)
    for ratio, expected in ((4.04, good), (4.6, None)):
        rival = profile(12, loss_mean_nats=0.015, ratio=ratio)
        assert choice(decide([request_for(good, rival)]).tables[0], SLOW) == (expected or rival).arm_id


def test_the_arm_in_use_stays_while_it_is_as_good(profile: Build, request_for: Build) -> None:
    first, second = profile(12, ratio=4.0), profile(8, ratio=4.0)
    corrections = {p.arm_id: learned(0.0) for p in (first, second)}
    faster_second = request_for(first, replace(second, ratio=4.04), corrections=corrections)
    faster_first = request_for(replace(first, ratio=4.04), second, corrections=corrections)
    plan = decide([faster_second])
    assert choice(plan.tables[0], SLOW) == second.arm_id
    kept = decide([faster_first], previous=plan)
    assert choice(kept.tables[0], SLOW) == second.arm_id
    assert choice(decide([faster_first]).tables[0], SLOW) == first.arm_id
    clearly = request_for(replace(first, ratio=4.4), second, corrections=corrections)
    assert choice(decide([clearly], previous=kept).tables[0], SLOW) == first.arm_id


def test_no_flapping_at_the_rim_of_as_good(profile: Build, request_for: Build) -> None:
    better = profile(16, loss_mean_nats=0.001, ratio=4.0)
    plan: Plan | None = None
    chosen = []
    for step in range(20):
        rival = profile(12, loss_mean_nats=0.015, ratio=4.0 * (1.031 if step % 2 else 1.029))
        corrections = {p.arm_id: learned(0.0) for p in (better, rival)}
        plan = decide([request_for(better, rival, corrections=corrections)], previous=plan)
        chosen.append(choice(plan.tables[0], 1e5))
    assert sum(a != b for a, b in itertools.pairwise(chosen)) <= 1


def test_an_slo_filters_before_the_objective(profile: Build, request_for: Build) -> None:
    small = profile(4, ratio=8.0, encode=StageTime(0.9, 0.0))
    quick = profile(12, ratio=4.0)
    where: dict[str, Any] = {"objective": Objective.BYTES, "explore_share": 0.0}
    free = decide([request_for(small, quick, goals=(goal(**where),))]).tables[0]
    assert choice(free, SLOW) == small.arm_id
    bound = decide([request_for(small, quick, goals=(goal(**where, slo_s=0.6),))]).tables[0]
    assert choice(bound, SLOW) == quick.arm_id
    hopeless = decide([request_for(small, quick, goals=(goal(**where, slo_s=0.01),))]).tables[0]
    assert choice(hopeless, SLOW) == quick.arm_id, "nobody meets it: the least violation"
    outside = decide([request_for(small, quick, goals=(goal(**where, slo_s=100.0, outside=StageTime(99.6, 0.0)),))])
    assert choice(outside.tables[0], SLOW) == quick.arm_id


def test_a_percentile_needs_room_for_noise(profile: Build, request_for: Build) -> None:
    p = profile()
    noisy = {p.arm_id: tuple(StageCorrection(0.0, 0.01, 0.5, 5.0) for _ in range(4))}
    steady = {RAW: tuple(StageCorrection(0.0, 0.0, 0.0, 5.0) for _ in range(4))}
    where = {"objective": Objective.BYTES, "slo_s": 0.5}
    by_percentile = [
        choice(
            decide([request_for(p, goals=(goal(**where, slo_percentile=q),), corrections={**noisy, **steady})]).tables[
                0
            ],
            30e6,
        )
        for q in (50.0, 99.0)
    ]
    assert by_percentile == [p.arm_id, RAW]


def test_objectives(profile: Build, request_for: Build) -> None:
    lossless = profile(16, loss_mean_nats=0.0, loss_se_nats=0.0, ratio=1.5)
    fast, small = profile(12, ratio=4.0), profile(4, ratio=5.0, encode=StageTime(4.0, 0.0))
    frugal = profile(14, ratio=2.0, encode=StageTime(0.0, 1e-11), decode=StageTime(0.0, 1e-11))
    expected = {
        Objective.LATENCY: fast,
        Objective.QUALITY: lossless,
        Objective.BYTES: small,
        Objective.ENERGY: frugal,
    }
    for objective, arm in expected.items():
        table = decide([request_for(lossless, fast, small, frugal, goals=(goal(objective=objective),))]).tables[0]
        assert choice(table, 1e6) == arm.arm_id, objective


def test_near_saturation_the_better_ratio_wins(profile: Build, request_for: Build) -> None:
    # At rest the quick codec wins; when the link is nearly full, the one that leaves room on it does.
    shared = KvTransfer(exclusive_connection=False)
    quick = profile(12, ratio=2.0, encode=StageTime(0.0, 1e-10), decode=StageTime(0.0, 1e-10))
    small = profile(8, ratio=4.0, encode=StageTime(0.19, 1e-9), decode=StageTime(0.19, 1e-9))
    table = decide([request_for(quick, small)], knob=shared).tables[0]
    bandwidth = 30e6
    assert choice(table, bandwidth, load=0.05) == quick.arm_id
    assert choice(table, bandwidth, load=2.0) == small.arm_id


def test_unstable_arms_rank_below_stable_ones_and_by_work_among_themselves(profile: Build, request_for: Build) -> None:
    small, smaller = profile(12, ratio=4.0), profile(8, ratio=6.0)
    table = decide([request_for(small, smaller)]).tables[0]
    assert choice(table, 1e6, load=1.2) == smaller.arm_id
    assert choice(table, 1e6, load=100.0) == smaller.arm_id


def test_other_classes_work_is_counted_where_shares_are_known(profile: Build, request_for: Build) -> None:
    # Most bytes belong to a class that may only send raw; had this one the link alone, the quick arm would have room.
    shared = KvTransfer(exclusive_connection=False)
    quick = profile(12, ratio=1.6, loss_mean_nats=0.001, encode=StageTime(0.0, 1e-10), decode=StageTime(0.0, 1e-10))
    small = profile(8, ratio=4.0, encode=StageTime(0.27, 1e-9), decode=StageTime(0.27, 1e-9))
    other = goal(name="other", max_quality_loss_nats=0.0, offered_share=0.8)
    alone = decide([request_for(quick, small, goals=(goal(),))], knob=shared).tables[0]
    together = decide([request_for(quick, small, goals=(goal(offered_share=0.2), other))], knob=shared).tables[0]
    assert choice(alone, 30e6, load=0.9) == quick.arm_id
    assert choice(together, 30e6, load=0.9) == small.arm_id
    assert choice(together, 30e6, load=0.9, name="other") == RAW


def test_exploration_stays_within_its_share_and_skips_the_hopeless(profile: Build, request_for: Build) -> None:
    best, close, hopeless = profile(12), profile(10, ratio=3.9), profile(8, encode=StageTime(20.0, 0.0))
    table = decide([request_for(best, close, hopeless, goals=(goal(explore_share=0.05),))]).tables[0]
    drawn = arms_drawn(table, SLOW)
    assert drawn[best.arm_id] >= 0.95
    assert drawn[close.arm_id] > 0
    assert hopeless.arm_id not in drawn
    assert RAW not in drawn, "raw has no chance here, and is measured as such"
    still = decide([request_for(best, close, hopeless, goals=(goal(explore_share=0.0),))]).tables[0]
    assert all(len(mixture.arms) == 1 for mixture in still.mixtures)


def test_an_arm_learned_slow_loses_and_is_not_explored(profile: Build, request_for: Build) -> None:
    slow, other = profile(12, ratio=4.0), profile(8, ratio=3.5)
    request = request_for(slow, other, corrections={slow.arm_id: learned(math.log(20.0)), other.arm_id: learned(0.0)})
    drawn = arms_drawn(decide([request]).tables[0], 30e6)
    assert list(drawn) == [other.arm_id]


def test_one_arm_only_for_comparisons(profile: Build, request_for: Build) -> None:
    p, best = profile(12), profile(8, ratio=5.0)
    table = decide([request_for(p, best, goals=(goal(only_arm=p.arm_id),))]).tables[0]
    assert {tuple(table.arms[a].arm_id for a in mixture.arms) for mixture in table.mixtures} == {(p.arm_id,)}
    raw = decide([request_for(p, best, goals=(goal(only_arm=RAW),))]).tables[0]
    assert choice(raw, SLOW) == RAW
    lossy = decide([request_for(p, best, goals=(goal(only_arm=p.arm_id, max_quality_loss_nats=0.0),))]).tables[0]
    assert choice(lossy, SLOW) == RAW


def test_contradictions_are_refused(profile: Build, request_for: Build) -> None:
    with pytest.raises(FieldError):
        decide([request_for(), request_for()])
    with pytest.raises(FieldError):
        decide([request_for(profile(), profile())])
    with pytest.raises(FieldError):
        decide([replace(request_for(), goals=())])
    for broken in (
        {"max_quality_loss_nats": math.nan},
        {"explore_share": 0.6},
        {"slo_s": 0.0},
        {"slo_percentile": 100.0},
        {"offered_share": 1.5},
    ):
        with pytest.raises(FieldError):
            goal(**broken)


@st.composite
def requests(draw: st.DrawFn) -> Callable[[Build, Build], TableRequest]:
    """Requests of all sorts, as a function of the builders."""
    numbers = [
        {
            "loss_mean_nats": draw(st.sampled_from([0.0, 0.005, 0.0199, 0.05])),
            "loss_se_nats": draw(st.sampled_from([0.0, 1e-4, 0.01])),
            "ratio": draw(st.floats(0.5, 12.0)),
            "encode": StageTime(draw(st.floats(0, 0.1)), draw(st.floats(0, 1e-7))),
            "decode": StageTime(draw(st.floats(0, 0.1)), draw(st.floats(0, 1e-7))),
        }
        for _ in range(draw(st.integers(0, 4)))
    ]
    logs = [draw(st.floats(-2, 2)) for _ in numbers]
    variances = [draw(st.sampled_from([1e-6, 0.02, 1.0])) for _ in numbers]
    limit = draw(st.sampled_from([0.0, 0.02, 1.0]))
    share = draw(st.sampled_from([0.0, 0.02, 0.5]))
    slo_s = draw(st.sampled_from([None, 0.05, 1.0]))
    objective = draw(st.sampled_from(Objective))

    def build(profile: Build, request_for: Build) -> TableRequest:
        profiles = [profile(4 + index, **values) for index, values in enumerate(numbers)]
        goals = (
            goal(
                max_quality_loss_nats=limit, explore_share=share, slo_s=slo_s, objective=objective, slo_percentile=90.0
            ),
            goal(name="plain", max_quality_loss_nats=limit, explore_share=share),
        )
        corrections = {
            p.arm_id: learned(log, variance) for p, log, variance in zip(profiles, logs, variances, strict=True)
        }
        return request_for(*profiles, goals=goals, corrections=corrections)  # type: ignore[no-any-return]

    return build


COARSE = Grid(
    size_edges_bytes=(1e6, 1e7),
    bandwidth_edges_bytes_per_s=tuple(1e6 * 8.0**i for i in range(5)),
    load_edges=(0.3, 0.9, 2.0),
)


def raw_and_arm_seconds(table: TablePlan, item: ClassInput, row: int, context: Context) -> tuple[float, float, bool]:
    prediction = table.knob.predict(item.models, item.corrections.factors(), context)
    total = prediction.total_s
    return float(total[0, 0, 0, 0]), float(total[row, 0, 0, 0]), bool(prediction.rho[0, 0, 0, 0] < 1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(build=requests())
def test_invariants_hold_in_every_cell(profile: Build, request_for: Build, build: Callable[..., TableRequest]) -> None:
    plan = decide([build(profile, request_for)], grid=COARSE)
    table = plan.tables[0]
    assert plan_equal(plan, decide([build(profile, request_for)], grid=COARSE)), "equal inputs, equal plan"
    for cell, mixture_index in enumerate(table.cells):
        mixture = table.mixtures[mixture_index]
        index, size, bandwidth, load = np.unravel_index(cell, (len(table.classes), *COARSE.shape))
        item = table.classes[index]
        rows = {c.arm_id: row for row, c in enumerate(item.candidates)}
        assert sum(mixture.weights) == pytest.approx(1.0)
        assert mixture.weights[0] >= 1 - item.goal.explore_share - 1e-9
        for arm in mixture.arms:
            candidate = item.candidates[rows[table.arms[arm].arm_id]]
            assert candidate.loss_upper_nats <= item.goal.max_quality_loss_nats or candidate.arm_id == RAW
        if item.goal.objective is Objective.LATENCY:
            row = rows[table.arms[mixture.arms[0]].arm_id]
            points = COARSE.points.at(int(size), int(bandwidth), int(load))
            for context in (points.middle, *points.corners):
                if mixture.is_raw(float(context.sizes_bytes[0]), float(context.bandwidths_bytes_per_s[0])):
                    continue
                raw_s, arm_s, raw_stable = raw_and_arm_seconds(table, item, row, context)
                assert not raw_stable or arm_s <= raw_s * (1 + 1e-9)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(build=requests())
def test_deciding_again_changes_nothing(profile: Build, request_for: Build, build: Callable[..., TableRequest]) -> None:
    request = build(profile, request_for)
    plan = decide([request], grid=COARSE)
    assert plan_equal(plan, decide([request], grid=COARSE, previous=plan))
    # Another prior rate is another question, so this one is really decided anew.
    anew = decide([replace(request, prior_bandwidth_bytes_per_s=1e6)], grid=COARSE, previous=plan).tables[0]
    assert anew.mixtures == plan.tables[0].mixtures
    assert np.array_equal(anew.cells, plan.tables[0].cells)


def test_news_below_a_percent_make_no_new_table_and_never_add_up(profile: Build, request_for: Build) -> None:
    first, second = profile(12, ratio=4.0), profile(8, ratio=3.9)
    plan = decide([request_for(first, second, corrections={first.arm_id: learned(0.0)})])
    for step in range(1, 30):
        news = request_for(first, second, corrections={first.arm_id: learned(0.003 * step)})
        again = decide([news], previous=plan)
        used = again.tables[0].classes[0].corrections.mean_log[1, 0]
        assert abs(used - 0.003 * step) <= 0.01
        if step <= 3:
            assert plan_equal(plan, again)
        plan = again


def test_a_full_plan_is_fast_enough_to_make_every_second(profile: Build, request_for: Build) -> None:
    profiles: list[Profile] = [
        profile(4 + index, ratio=6 - 0.3 * index, workload=w) for index in range(11) for w in ("dialogue", "code")
    ]
    request = request_for(*profiles, goals=(goal(), goal(name="code", workload="code")))
    seconds = []
    for _ in range(3):
        start = time.process_time()
        decide([request])
        seconds.append(time.process_time() - start)
    # About 0.035 s of a core; the limit leaves room for a slower one.
    assert min(seconds) < 0.1
