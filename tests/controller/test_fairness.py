"""Fairness between tenants: who gives way to whom, and that nothing changes where nobody has to."""

from __future__ import annotations

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
from controld.contract.fair_queue import FairQueue
from controld.controller.decide import decide
from controld.controller.explain import ArmVerdict, explain_cell, find_cell
from controld.controller.fairness import jain_index, relative_weights
from controld.controller.goals import ClassGoal, Objective
from controld.controller.grid import Grid
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.controller.plan import Plan, TablePlan
from controld.controller.sweeps import evaluate_classes

Build = Callable[..., Any]
SHARED_LINK = KvTransfer(exclusive_connection=False)
BUSY = {"size_bytes": 0.7e6, "bandwidth_bytes_per_s": 9e6, "load": 0.9}


def goals(*, tenants: tuple[str, str] = ("greedy", "modest"), **bulk: Any) -> tuple[ClassGoal, ClassGoal]:
    """Most of the load is of a lossless class, the rest of one that may lose a little."""
    common: dict[str, Any] = {"workload": "dialogue", "explore_share": 0.0}
    return (
        ClassGoal(
            **{"name": "bulk", "tenant": tenants[0], "offered_share": 0.8, "max_quality_loss_nats": 0.0} | common | bulk
        ),
        ClassGoal(name="default", tenant=tenants[1], offered_share=0.2, max_quality_loss_nats=0.02, **common),
    )


@pytest.fixture
def arms(profile: Build) -> dict[str, Profile]:
    lossless = {"loss_mean_nats": 0.0, "loss_se_nats": 0.0, "decode": StageTime(1e-3, 1e-9)}
    return {
        "quick": profile(12, ratio=1.3, encode=StageTime(1e-3, 1e-9), **lossless),
        "heavy": profile(10, ratio=2.0, encode=StageTime(1e-3, 7e-8), **lossless),
        "small": profile(8, ratio=8.0),
    }


def chosen(table: TablePlan, name: str, where: dict[str, float] = BUSY) -> str:
    cell = find_cell(table, name, where["size_bytes"], where["bandwidth_bytes_per_s"], where["load"])
    return table.arms[table.winners[cell]].arm_id


def test_a_greedy_class_takes_the_arm_that_leaves_others_room(arms: dict[str, Profile], request_for: Build) -> None:
    # Alone the quick arm is the faster one for it, though it leaves the link to itself; the heavy one costs it a little
    # and spares the other tenant most of its wait.
    fair = decide([request_for(*arms.values(), goals=goals())], knob=SHARED_LINK).tables[0]
    selfish = decide([request_for(*arms.values(), goals=goals(tenants=("t", "t")))], knob=SHARED_LINK).tables[0]
    assert chosen(selfish, "bulk") == arms["quick"].arm_id
    assert chosen(fair, "bulk") == arms["heavy"].arm_id
    assert chosen(fair, "default") == chosen(selfish, "default") == arms["small"].arm_id

    explained = explain_cell(fair, find_cell(fair, "bulk", *BUSY.values()))
    quick = explained.arm(arms["quick"].arm_id)
    assert quick is not None and quick.verdict is ArmVerdict.UNFAIR
    assert "largest weighted slowdown 3.64, not 2.59" in quick.text
    winner = explained.arm(explained.winner)
    assert winner is not None and "fair: keeps the largest weighted slowdown at 2.59" in winner.text


def test_an_objective_other_than_speed_gives_way_only_where_it_hurts(
    arms: dict[str, Profile], request_for: Build
) -> None:
    wants_bytes = decide([request_for(*arms.values(), goals=goals(objective=Objective.BYTES))]).tables[0]
    loaded = {"size_bytes": 6e6, "bandwidth_bytes_per_s": 6e8, "load": 0.6}
    assert chosen(wants_bytes, "bulk", loaded) == RAW
    assert chosen(wants_bytes, "bulk", loaded | {"load": 0.05}) == arms["quick"].arm_id


def test_without_known_loads_or_with_one_tenant_decisions_are_as_before(
    arms: dict[str, Profile], request_for: Build
) -> None:
    def winners(**changes: Any) -> TablePlan:
        changed = tuple(replace(goal, **changes) for goal in goals())
        return decide([request_for(*arms.values(), goals=changed)], knob=SHARED_LINK).tables[0]

    unknown = winners(offered_share=None)
    for other in (winners(offered_share=None, tenant="t"), winners(offered_share=None, tenant_weight=7.0)):
        assert other.mixtures == unknown.mixtures
        assert np.array_equal(other.cells, unknown.cells)
    one_tenant = winners(tenant="t")
    assert np.array_equal(winners(tenant="t", tenant_weight=7.0).cells, one_tenant.cells)
    assert not np.array_equal(winners().cells, one_tenant.cells)


def test_a_heavier_tenant_is_given_way_to_more(arms: dict[str, Profile], request_for: Build) -> None:
    def gives_way(weight: float) -> int:
        bulk, default = goals()
        weighted = (bulk, replace(default, tenant_weight=weight))
        table = decide([request_for(*arms.values(), goals=weighted)], knob=SHARED_LINK).tables[0]
        heavy = [arm.arm_id for arm in table.arms].index(arms["heavy"].arm_id)
        return int((table.winners[: len(table.cells) // 2] == heavy).sum())

    assert gives_way(0.02) < gives_way(1.0) <= gives_way(50.0)


def test_a_pinned_class_is_not_moved(arms: dict[str, Profile], request_for: Build) -> None:
    table = decide([request_for(*arms.values(), goals=goals(only_arm=arms["quick"].arm_id))], knob=SHARED_LINK)
    assert chosen(table.tables[0], "bulk") == arms["quick"].arm_id


def test_a_plan_with_shares_survives_its_json(arms: dict[str, Profile], request_for: Build) -> None:
    request = request_for(*arms.values(), goals=(replace(goals()[0], tenant_weight=3.0), goals()[1]))
    plan = decide([request], knob=SHARED_LINK)
    kept = Plan.from_json(plan.to_json())
    assert kept.tables[0].classes == plan.tables[0].classes
    assert decide([request], knob=SHARED_LINK, previous=kept).tables[0].publishes_same_as(plan.tables[0])


@pytest.mark.parametrize("weight", [0.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(FieldError, match="tenant_weight"):
        ClassGoal(name="chat", workload="dialogue", tenant_weight=weight)


profiles = st.lists(
    st.fixed_dictionaries(
        {
            "ratio": st.floats(0.8, 10.0),
            "loss_mean_nats": st.sampled_from([0.0, 0.01, 0.04]),
            "encode": st.builds(StageTime, st.floats(0, 0.05), st.floats(0, 1e-7)),
            "decode": st.builds(StageTime, st.floats(0, 0.05), st.floats(0, 1e-7)),
        }
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(profiles, st.lists(st.tuples(st.floats(0.05, 1), st.floats(0.1, 10)), min_size=2, max_size=4), st.booleans())
def test_no_gate_is_relaxed_for_anybody(
    profile: Build, request_for: Build, kinds: list[dict[str, Any]], tenants: list[tuple[float, float]], exclusive: bool
) -> None:
    grid = Grid((1e6, 8e6), (1e6, 1e7, 1e8), (0.3, 0.6, 0.9))
    found = tuple(
        ClassGoal(
            name=f"c{number}",
            workload="dialogue",
            tenant=f"t{number}",
            tenant_weight=weight,
            offered_share=share / len(tenants),
            max_quality_loss_nats=(0.0, 0.02, 1.0)[number % 3],
        )
        for number, (share, weight) in enumerate(tenants)
    )
    request = request_for(*(profile(4 + number, **kind) for number, kind in enumerate(kinds)), goals=found)
    inputs = request.class_inputs()
    nothing = [np.full(grid.shape, -1, dtype=np.intp)] * len(inputs)
    knob = KvTransfer(exclusive_connection=exclusive)
    for item, evaluation in zip(inputs, evaluate_classes(inputs, knob, grid.points, nothing), strict=True):
        winner = evaluation.winner[None]
        for row in np.unique(winner):
            upper = item.candidates[row].loss_upper_nats
            assert row == 0 or upper <= item.goal.max_quality_loss_nats
        assert np.take_along_axis(evaluation.never_worse, winner, axis=0).all()
        assert np.take_along_axis(evaluation.fair, winner, axis=0).all()


def slowdowns(*, fair: bool, part_bytes: float) -> list[float]:
    """Mean slowdowns on a link at 70 % load of a tenant with large transfers and one with small ones, Poisson both."""
    rng, rate = np.random.default_rng(1), 10e6
    arrivals: list[tuple[float, int, float]] = []
    for tenant, (size_bytes, per_s) in enumerate(((100e6, 0.05), (5e6, 0.4))):
        times_s = np.cumsum(rng.exponential(1 / per_s, size=int(2000 * per_s)))
        arrivals += [(float(at_s), tenant, size_bytes) for at_s in times_s]
    arrivals.sort()
    queue: FairQueue[int] = FairQueue({"0": 1.0, "1": 1.0})
    parts_left: dict[int, int] = {}
    seen: list[list[float]] = [[], []]
    now_s, number = 0.0, 0
    while number < len(arrivals) or len(queue):
        if not len(queue):
            now_s = max(now_s, arrivals[number][0])
        while number < len(arrivals) and arrivals[number][0] <= now_s:
            _, tenant, size_bytes = arrivals[number]
            parts_left[number] = max(1, round(size_bytes / part_bytes))
            for _ in range(parts_left[number]):
                cost_bytes = size_bytes / parts_left[number]
                queue.push(number, tenant=str(tenant) if fair else "", transfer=number, cost_bytes=cost_bytes)
            number += 1
        transfer = queue.pop()
        at_s, tenant, size_bytes = arrivals[transfer]
        now_s += size_bytes / max(1, round(size_bytes / part_bytes)) / rate
        parts_left[transfer] -= 1
        if not parts_left[transfer]:
            seen[tenant].append((now_s - at_s) / (size_bytes / rate))
    return [float(np.mean(values)) for values in seen]


def test_a_fair_queue_slows_large_and_small_tenants_down_alike() -> None:
    in_order_of_arrival = slowdowns(fair=False, part_bytes=12e6)
    assert jain_index(in_order_of_arrival) < 0.75
    assert jain_index(slowdowns(fair=True, part_bytes=12e6)) > 0.95
    # Whole transfers cannot be interrupted, so the small ones wait for the rest of a large one.
    whole = slowdowns(fair=True, part_bytes=1e12)
    assert whole[1] < in_order_of_arrival[1]
    assert jain_index(whole) < 0.9


def test_shares_are_relative_to_the_mean_and_jain_knows_its_ends() -> None:
    assert relative_weights({"acme": 3.0, "bell": 1.0}) == {"acme": 1.5, "bell": 0.5}
    assert jain_index([]) == jain_index([0.0, 0.0]) == 1.0
    assert jain_index([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([1.0, 3.0]) == pytest.approx(0.8)
    assert jain_index([1e300, 1e300]) == pytest.approx(1.0)


@pytest.mark.slow
def test_eight_classes_of_four_tenants_are_decided_in_seconds(profile: Build, request_for: Build) -> None:
    arms = [profile(4 + number, ratio=1.0 + number / 3) for number in range(16)]
    eight = tuple(
        ClassGoal(
            name=f"c{number}",
            workload="dialogue",
            tenant=f"t{number % 4}",
            offered_share=1 / 8,
            max_quality_loss_nats=0.02,
        )
        for number in range(8)
    )
    began_s = time.process_time()
    decide([request_for(*arms, goals=eight)], knob=SHARED_LINK)
    assert time.process_time() - began_s < 20.0
