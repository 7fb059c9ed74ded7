from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from controld.contract.decision import RAW
from controld.controller.compare import MOST_RANGES, compare_class, cover
from controld.controller.decide import decide
from controld.controller.explain import find_cell
from controld.controller.goals import ClassGoal
from controld.controller.grid import Grid
from controld.controller.plan import TablePlan

Build = Callable[..., Any]


def table_for(request_for: Build, *profiles: object, limit: float, grid: Grid | None = None) -> TablePlan:
    goals = (
        ClassGoal(name="chat", workload="dialogue", max_quality_loss_nats=limit),
        ClassGoal(name="default", workload="dialogue", max_quality_loss_nats=0.0),
    )
    return decide([request_for(*profiles, goals=goals)], grid=grid).tables[0]


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(np.bool_, st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4))))
def test_boxes_are_disjoint_and_are_the_mask(mask: np.ndarray) -> None:
    painted = np.zeros(mask.shape, dtype=int)
    for box in cover(mask):
        assert painted[box].size > 0
        painted[box] += 1
    assert np.array_equal(painted, mask.astype(int))


def test_a_box_is_found_as_one_whatever_its_shape() -> None:
    mask = np.zeros((5, 7, 4), dtype=bool)
    mask[1:4, 2:6, :] = True
    assert cover(mask) == [(slice(1, 4), slice(2, 6), slice(0, 4))]


def test_equal_tables_do_not_differ(profile: Build, request_for: Build) -> None:
    table = table_for(request_for, profile(), limit=0.02)
    change = compare_class(table, "chat", table, "chat")
    assert (change.changed, change.ranges, change.moves) == (0, (), ())


def test_a_stricter_limit_shows_where_which_arm_goes_and_why(profile: Build, request_for: Build) -> None:
    lossy, lossless = profile(12), profile(16, loss_mean_nats=0.0, loss_se_nats=0.0, ratio=1.5)
    before = table_for(request_for, lossy, lossless, limit=0.02)
    after = table_for(request_for, lossy, lossless, limit=0.0)
    change = compare_class(before, "chat", after, "chat")
    used = {(a, b) for a, b, _ in change.moves}
    assert used == {(lossy.arm_id, lossless.arm_id), (lossy.arm_id, RAW)}
    assert sum(cells for _, _, cells in change.moves) == change.changed
    assert change.cells_beside == change.changed - sum(r.cells for r in change.ranges)
    assert change.ranges[0].cells == max(r.cells for r in change.ranges)
    for item in change.ranges:
        assert "above limit 0" in item.why
        assert item.before.loss_mean_nats == 0.01
        assert item.after.loss_mean_nats == 0.0
        assert item.after.total_s >= item.before.total_s > 0 or "raw below that line" in item.before.text
        assert item.before.text
    json.dumps(change.to_document(), allow_nan=False)


def test_ranges_say_the_truth_in_every_cell(profile: Build, request_for: Build, small_grid: Grid) -> None:
    lossy, lossless = profile(12), profile(16, loss_mean_nats=0.0, loss_se_nats=0.0, ratio=1.5)
    before, after = (table_for(request_for, lossy, lossless, limit=limit, grid=small_grid) for limit in (0.02, 0.0))
    change = compare_class(before, "chat", after, "chat")
    assert len(change.ranges) <= MOST_RANGES
    assert change.cells_beside == 0

    def arm(table: TablePlan, *where: float) -> str:
        return str(table.arms[table.winners[find_cell(table, "chat", *where)]].arm_id)

    points = small_grid.points
    for size in points.size:
        for bandwidth in points.bandwidth:
            for load in points.load:
                where = (float(size), float(bandwidth), float(load))
                holding = [
                    r
                    for r in change.ranges
                    if r.size_bytes[0] <= size < r.size_bytes[1]
                    and r.bandwidth_bytes_per_s[0] <= bandwidth < r.bandwidth_bytes_per_s[1]
                    and r.load[0] <= load < r.load[1]
                ]
                old, new = arm(before, *where), arm(after, *where)
                assert [(r.before.arm_id, r.after.arm_id) for r in holding] == ([(old, new)] if old != new else [])


def test_recent_transfers_are_counted_where_they_lie(profile: Build, request_for: Build, effect: Build) -> None:
    lossy = profile(12)
    before, after = (table_for(request_for, lossy, limit=limit) for limit in (0.02, 0.0))
    where = {"service_class": "chat", "expected_bytes": 14e6, "load": 0.05}
    recent = [
        *(effect(transfer_id=f"a{i}", bandwidth_bytes_per_s=10e6, **where) for i in range(3)),
        effect(bandwidth_bytes_per_s=20e9, **where),
        effect(bandwidth_bytes_per_s=10e6, **{**where, "service_class": "default"}),
        effect(bandwidth_bytes_per_s=10e6, tier="prefix_store", **where),
        effect(bandwidth_bytes_per_s=0.0, **where),
    ]
    change = compare_class(before, "chat", after, "chat", recent=recent)
    assert (change.transfers, change.transfers_changed) == (4, 3)
    assert sum(r.transfers for r in change.ranges) <= 3
    other = compare_class(before, "default", after, "chat", recent=recent)
    assert other.transfers == 0, "nobody knows which requests a new class takes"


def test_an_arm_that_is_gone_is_named_as_such(profile: Build, request_for: Build) -> None:
    old, new = profile(12), profile(8, ratio=4.2)
    change = compare_class(
        table_for(request_for, old, limit=0.02), "chat", table_for(request_for, new, limit=0.02), "chat"
    )
    assert {r.why for r in change.ranges if r.before.arm_id == old.arm_id} == {"not a candidate any more"}
