from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controld.candidates.profile import StageTime
from controld.contract.decision import RAW
from controld.controller.decide import decide
from controld.controller.explain import explain_cell, find_cell
from controld.controller.goals import ClassGoal, Objective
from controld.controller.grid import Grid
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.controller.overload import quality_caps, within_caps

Build = Callable[..., Any]


def caps_of(demands: list[list[list[float]]], losses: list[list[float]]) -> list[int]:
    """One cell: demands by class, arm and server."""
    arrays = [np.array(d).T[..., None] for d in demands]
    usable = [np.ones((len(loss), 1), dtype=np.bool_) for loss in losses]
    return [int(rows[0]) for rows in quality_caps(arrays, [np.array(loss) for loss in losses], usable)]


def test_while_all_fits_everybody_has_the_best_quality() -> None:
    assert caps_of([[[0.4], [0.1]], [[0.5], [0.1]]], [[0.0, 0.1], [0.0, 0.1]]) == [0, 0]


def test_the_first_class_gives_way_only_as_far_as_the_others_least_work_needs() -> None:
    # 0.7 + 0.2 fits, and leaves the second class its least; 0.7 + 0.5 would not.
    assert caps_of([[[0.7], [0.3]], [[0.5], [0.2]]], [[0.0, 0.1], [0.0, 0.1]]) == [0, 1]
    # Now the second needs 0.4 at the least: the first steps down, and then the second may have its best.
    assert caps_of([[[0.7], [0.3]], [[0.5], [0.4]]], [[0.0, 0.1], [0.0, 0.1]]) == [1, 0]


def test_where_nothing_fits_it_is_the_least_work() -> None:
    assert caps_of([[[2.0], [0.9]], [[3.0], [0.8]]], [[0.0, 0.1], [0.0, 0.1]]) == [1, 1]


def test_of_equal_quality_the_one_with_less_work() -> None:
    assert caps_of([[[0.9], [0.5], [0.1]]], [[0.0, 0.0, 0.1]]) == [1]


def test_every_server_counts() -> None:
    link_bound, codec_bound = [0.9, 0.0], [0.2, 0.7]
    other = [[0.05, 0.5]]
    assert caps_of([[link_bound, codec_bound], other], [[0.1, 0.0], [0.0]]) == [0, 0]


small = st.lists(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=4), min_size=1, max_size=4
)


@settings(max_examples=80, deadline=None)
@given(classes=small)
def test_with_one_server_it_is_the_best_in_order_that_brute_force_finds(classes: list[list[tuple[int, int]]]) -> None:
    # Work in tenths and supply 1: losses compared class by class, in order, over everything that fits.
    demands = [[[work / 10] for work, _ in arms] for arms in classes]
    losses = [[float(loss) for _, loss in arms] for arms in classes]
    found = caps_of(demands, losses)

    def work_of(rows: tuple[int, ...]) -> float:
        return sum(classes[i][row][0] for i, row in enumerate(rows)) / 10

    fitting = [rows for rows in itertools.product(*(range(len(a)) for a in classes)) if work_of(rows) < 1 - 1e-9]
    if not fitting:
        assert found == [int(np.argmin([work for work, _ in arms])) for arms in classes] or work_of(tuple(found)) >= 1
        return
    best = min(fitting, key=lambda rows: [losses[i][row] for i, row in enumerate(rows)])
    assert work_of(tuple(found)) < 1
    assert [losses[i][r] for i, r in enumerate(found)] == [losses[i][r] for i, r in enumerate(best)]


@settings(max_examples=50, deadline=None)
@given(
    numbers=st.lists(
        st.lists(st.lists(st.floats(0, 0.9), min_size=3, max_size=3), min_size=1, max_size=4), min_size=1, max_size=4
    ),
    data=st.data(),
)
def test_with_several_servers_all_fits_at_the_caps_if_it_fits_at_the_least_and_below_them_too(
    numbers: list[list[list[float]]], data: st.DataObject
) -> None:
    losses = [[float(data.draw(st.integers(0, 3))) for _ in arms] for arms in numbers]
    found = caps_of(numbers, losses)
    arrays = [np.array(arms) for arms in numbers]
    least = sum(arms[int(np.argmin(arms.max(axis=1)))] for arms in arrays)
    if (np.asarray(least) >= 0.999).any():
        return
    assert (sum(arms[row] for arms, row in zip(arrays, found, strict=True)) < 1 + 1e-9).all()  # type: ignore[attr-defined]
    for arms, row in zip(arrays, found, strict=True):
        allowed = within_caps(arms.T[..., None], np.array([row]))[:, 0]
        assert allowed[row]
        assert all((arms[a] <= arms[row] + 1e-9).all() for a in np.flatnonzero(allowed))


def test_cells_are_apart() -> None:
    demand = np.array([[[0.6, 0.3], [0.2, 0.1]]])  # server, arm, cell
    rows = quality_caps([demand, demand], [np.array([0.0, 0.1])] * 2, [np.ones((2, 2), dtype=np.bool_)] * 2)
    assert [r.tolist() for r in rows] == [[0, 0], [1, 0]]


QUALITY = {"workload": "dialogue", "max_quality_loss_nats": 0.02, "objective": Objective.QUALITY, "explore_share": 0.0}


def test_an_overloaded_link_is_shared_so_that_all_of_it_fits(profile: Build, request_for: Build) -> None:
    # Two classes that want quality offer 1.2 times what the link carries raw: one of them can have it, not both.
    quick = StageTime(0.0, 1e-11)
    mild, small = (
        profile(16, ratio=2.0, loss_mean_nats=0.001, loss_se_nats=1e-5, encode=quick, decode=quick),
        profile(8, ratio=4.0, loss_mean_nats=0.01, encode=quick, decode=quick),
    )
    goals = (
        ClassGoal(name="first", offered_share=0.5, **QUALITY),
        ClassGoal(name="default", offered_share=0.5, **QUALITY),
    )
    grid = Grid(load_edges=(0.5, 1.1, 1.3, 2.9, 3.1, 20.0, 24.0))
    knob = KvTransfer(exclusive_connection=False)
    table = decide([request_for(mild, small, goals=goals)], knob=knob, grid=grid).tables[0]

    def arms(load: float) -> list[str]:
        cells = [find_cell(table, name, 14e6, 1e7, load) for name in ("first", "default")]
        explained = [explain_cell(table, cell) for cell in cells]
        assert [e.winner for e in explained] == [table.arms[table.winners[cell]].arm_id for cell in cells]
        return [e.winner for e in explained]

    assert arms(0.2) == [RAW, RAW]
    assert arms(1.2) == [RAW, mild.arm_id]
    assert arms(3.0) == [small.arm_id, small.arm_id], "0.75 + 0.375 would not fit"
    assert arms(22.0) == [small.arm_id, small.arm_id], "nothing fits: the least work"
    for load in (1.2, 3.0):
        cell = explain_cell(table, find_cell(table, "default", 14e6, 1e7, load))
        assert cell.arms[0].rho < 1
    raw = explain_cell(table, find_cell(table, "default", 14e6, 1e7, 22.0)).arm(RAW)
    assert raw is not None
    assert "leaves the other classes too little room" in raw.text


@pytest.mark.parametrize("objective", list(Objective))
def test_classes_that_fit_are_decided_as_ever(profile: Build, request_for: Build, objective: Objective) -> None:
    grid = Grid(load_edges=(0.1, 0.3))
    values = {**QUALITY, "objective": objective}
    alone = decide([request_for(profile(), goals=(ClassGoal(name="default", **values),))], grid=grid).tables[0]
    goals = (ClassGoal(name="x", offered_share=0.0, **values), ClassGoal(name="default", offered_share=1.0, **values))
    beside = decide([request_for(profile(), goals=goals)], grid=grid).tables[0]
    half = len(beside.winners) // 2
    stable = np.array([explain_cell(alone, cell).arms[0].rho < 1 for cell in range(0, half, 7)])
    same = (alone.winners == beside.winners[half:])[::7]
    assert same[stable].all()
