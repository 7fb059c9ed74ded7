from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from controld.contract.errors import FieldError
from controld.controller.decide import decide
from controld.controller.explain import explain_cell
from controld.controller.goals import ClassGoal
from controld.controller.grid import Grid
from controld.controller.plan import Plan, plan_equal

Build = Callable[..., Any]

GOALS = (
    ClassGoal(
        name="chat", workload="dialogue", tenant="acme", max_quality_loss_nats=0.02, slo_s=0.3, slo_percentile=90.0
    ),
    ClassGoal(name="default", workload="dialogue", max_quality_loss_nats=0.0),
)


@pytest.fixture
def plan(profile: Build, request_for: Build, small_grid: Grid) -> Plan:
    unproven = profile(8, loss_samples=1)
    first = decide([request_for(profile(), unproven, goals=GOALS)], grid=small_grid)
    request = request_for(profile(ratio=4.5), unproven, goals=GOALS, prior_bandwidth_bytes_per_s=1e7)
    return decide([request], grid=small_grid, previous=first, policy_generation=3, now_unix_s=5.0)


def test_json_keeps_everything(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again.to_json() == plan.to_json()
    assert plan_equal(plan, again)
    assert (again.policy_generation, again.decided_unix_s) == (3, 5.0)
    table, other = plan.tables[0], again.tables[0]
    assert table.decision_table(7) == other.decision_table(7)
    assert np.array_equal(table.in_use, other.in_use)
    for cell in range(0, len(table.cells), 37):
        assert explain_cell(table, cell) == explain_cell(other, cell)


def test_the_table_draws_what_the_plan_chose(plan: Plan) -> None:
    table = plan.tables[0]
    published = table.decision_table(7)
    assert published.version == 7
    assert published.prior_bandwidth_bytes_per_s == 1e7
    assert published.classes == ("chat", "default")
    drawn = published.draw("t", "default", 14e6, 1e7, 0.1)
    assert drawn.arm == table.arms[table.winners[drawn.cell]]


def test_equality_is_about_what_is_published(plan: Plan, profile: Build, request_for: Build, small_grid: Grid) -> None:
    assert not plan_equal(None, plan)
    assert plan_equal(plan, replace(plan, decided_unix_s=99.0, policy_generation=9))
    table = plan.tables[0]
    assert not plan_equal(plan, replace(plan, tables=()))
    assert not plan_equal(plan, Plan((replace(table, prior_bandwidth_bytes_per_s=2e7),)))
    changed = table.cells.copy()
    changed[0] = (changed[0] + 1) % len(table.mixtures)
    assert not plan_equal(plan, Plan((replace(table, cells=changed),)))
    assert not plan_equal(plan, decide([request_for(profile(), goals=GOALS)], grid=small_grid))


@pytest.mark.parametrize("broken", ["", "[]", "{}", '{"format": 2}', "format", "tables", "knob"])
def test_other_documents_are_refused(plan: Plan, broken: str) -> None:
    text = broken
    if broken.isalpha():
        document = json.loads(plan.to_json())
        if broken == "knob":
            document["tables"][0]["knob"]["name"] = "video"
        else:
            document[broken] = "x"
        text = json.dumps(document)
    with pytest.raises(FieldError):
        Plan.from_json(text)


def test_edges_and_points_of_the_default_grid() -> None:
    grid = Grid()
    assert grid.size_edges_bytes[0] == 256e3
    assert 256e6 <= grid.size_edges_bytes[-1] <= 512e6
    assert grid.bandwidth_edges_bytes_per_s[-1] >= 50e9
    points = grid.points
    for low, middle, high in (
        (points.size_low, points.size, points.size_high),
        (points.bandwidth_low, points.bandwidth, points.bandwidth_high),
    ):
        assert (low < middle).all()
        assert (middle < high).all()
    assert len(points.load) == grid.shape[2]
