"""Cells that raw's break-even runs through: what lies above the line is quicker than raw, and little is left to raw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controld.candidates.profile import Profile, StageTime
from controld.contract.decision import RAW
from controld.controller.decide import decide
from controld.controller.explain import explain_cell, find_cell
from controld.controller.grid import Grid
from controld.controller.knobs.base import Context
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.controller.plan import Plan, TablePlan, plan_equal

Build = Callable[..., Any]

COARSE = Grid(
    size_edges_bytes=(1e6, 2e6, 4e6, 64e6),
    bandwidth_edges_bytes_per_s=tuple(1e7 * 2.0**i for i in range(9)),
    load_edges=(0.3, 0.9),
)


@st.composite
def profiles(draw: st.DrawFn) -> Callable[[Build], list[Profile]]:
    numbers = draw(
        st.lists(
            st.tuples(
                st.floats(1.1, 12), st.floats(0, 2e-2), st.floats(1e-11, 1e-8), st.floats(0, 2e-2),
                st.floats(1e-11, 1e-8),
            ),
            min_size=1, max_size=3,
        )
    )  # fmt: skip
    return lambda profile: [
        profile(4 + i, ratio=ratio, encode=StageTime(ea, eb), decode=StageTime(da, db))
        for i, (ratio, ea, eb, da, db) in enumerate(numbers)
    ]


def seconds(table: TablePlan, arm_id: str, size: float, bandwidth: float, load: float) -> tuple[float, float]:
    """Predicted for the arm and for raw: total seconds where stable, else a huge number in the order of the work."""
    item = table.classes[0]
    context = Context(
        sizes_bytes=np.array([size]), bandwidths_bytes_per_s=np.array([bandwidth]), loads=np.array([load])
    )
    p = table.knob.predict(item.models, item.corrections.factors(), context)
    rank = np.where(p.rho < 1, p.total_s, 1e15 * p.rho)[:, 0, 0, 0]
    row = next(row for row, candidate in enumerate(item.candidates) if candidate.arm_id == arm_id)
    return float(rank[row]), float(rank[0])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(
    made=profiles(),
    chunk_bytes=st.sampled_from([1.5e6, 1e12]),
    points=st.lists(
        st.tuples(st.floats(3e5, 2e8), st.floats(6e6, 5e9), st.sampled_from([0.05, 0.5, 1.5])), min_size=20, max_size=60
    ),
)
def test_what_is_drawn_is_never_predicted_to_be_slower_than_raw(
    profile: Build, request_for: Build, made: Build, chunk_bytes: float, points: list[tuple[float, float, float]]
) -> None:
    table = decide([request_for(*made(profile))], knob=KvTransfer(chunk_bytes=chunk_bytes), grid=COARSE).tables[0]
    published = table.decision_table(1)
    for number, (size, bandwidth, load) in enumerate(points):
        drawn = published.draw(f"t{number}", "default", size, bandwidth, load)
        if not drawn.explored:
            chosen_s, raw_s = seconds(table, drawn.arm.arm_id, size, bandwidth, load)
            assert chosen_s <= raw_s * (1 + 1e-9)


def drawn_at(table: TablePlan, size: float, bandwidth: float) -> str:
    return table.decision_table(1).draw("t", "default", size, bandwidth, 0.05).arm.arm_id


def test_the_break_even_divides_a_cell(profile: Build, request_for: Build) -> None:
    """30 ms of codec for whatever size, ratio 4: quicker than raw where raw takes more than 40 ms on the wire, and by
    3 % from 42.5 ms on."""
    p = profile(encode=StageTime(0.02, 0.0), decode=StageTime(0.01, 0.0), loss_se_nats=0.0)
    table = decide([request_for(p)], knob=KvTransfer(chunk_bytes=1e12)).tables[0]
    size = 9.1e6
    assert drawn_at(table, size, size / 0.039) == RAW
    assert drawn_at(table, size, size / 0.045) == p.arm_id
    cells = {find_cell(table, "default", size, size / raw_s, 0.05) for raw_s in (0.039, 0.045)}
    assert len(cells) == 1, "one cell, divided"


@pytest.mark.parametrize("knob", [KvTransfer(exclusive_connection=False), KvTransfer(switch_cost_s=0.1)])
def test_where_the_border_is_not_known_raw_keeps_the_cell(profile: Build, request_for: Build, knob: KvTransfer) -> None:
    table = decide([request_for(profile())], knob=knob).tables[0]
    assert not any(mixture.is_split for mixture in table.mixtures)


def test_a_divided_cell_is_kept_published_and_explained(profile: Build, request_for: Build) -> None:
    p = profile(encode=StageTime(0.02, 0.0), decode=StageTime(0.01, 0.0))
    plan = decide([request_for(p)], knob=KvTransfer(chunk_bytes=1e12))
    table = plan.tables[0]
    assert plan_equal(plan, Plan.from_json(plan.to_json()))
    cell = find_cell(table, "default", 10e6, 10e6 / 0.045, 0.05)
    assert table.mixtures[table.cells[cell]].is_split
    explanation = explain_cell(table, cell)
    chosen = explanation.arm(explanation.winner)
    assert chosen is not None
    assert chosen.arm_id == p.arm_id
    assert "raw below that line" in chosen.text
    raw = explanation.arm(RAW)
    assert raw is not None
    assert raw.text.startswith("takes what is below that line")


def test_news_that_move_the_border_by_little_move_no_line(profile: Build, request_for: Build) -> None:
    p = profile(encode=StageTime(0.02, 0.0), decode=StageTime(0.01, 0.0))
    plan = decide([request_for(p)])
    nearly = replace(p, encode=StageTime(0.02001, 0.0))
    lines = [
        {(m.raw_below_s, m.raw_below_s_per_byte) for m in each.tables[0].mixtures}
        for each in (plan, decide([request_for(nearly)]))
    ]
    assert len(lines[0]) > 5
    assert len(lines[0] & lines[1]) >= 0.8 * len(lines[0])
