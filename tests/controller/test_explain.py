from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from controld.candidates.profile import StageTime
from controld.contract.decision import RAW
from controld.contract.effect import Path
from controld.controller.decide import decide
from controld.controller.explain import (
    ArmVerdict,
    ExplanationError,
    explain_cell,
    explain_transfer,
    find_cell,
)
from controld.controller.explain_text import cell_text, transfer_text
from controld.controller.goals import ClassGoal, Objective
from controld.controller.grid import Grid
from controld.controller.guard import Pin, PinBoard
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.controller.plan import TablePlan

Build = Callable[..., Any]

CHAT = ClassGoal(name="chat", workload="dialogue", tenant="acme", max_quality_loss_nats=0.02)
DEFAULT = ClassGoal(name="default", workload="dialogue", max_quality_loss_nats=0.0)


@pytest.fixture
def table(profile: Build, request_for: Build) -> TablePlan:
    profiles = [
        profile(12, ratio=5.0),
        profile(10, ratio=4.0, loss_mean_nats=0.002),
        profile(8, ratio=8.0, loss_mean_nats=0.057),
        profile(6, ratio=6.0, loss_mean_nats=0.015, sender_hardware="elsewhere"),
        profile(5, ratio=6.5, encode=StageTime(30.0, 0.0)),
    ]
    pins = PinBoard((Pin(arm_id=profiles[3].arm_id, reason="3 refused", since_unix_s=0.0),))
    return decide([request_for(*profiles, goals=(CHAT, DEFAULT), pins=pins)]).tables[0]  # type: ignore[no-any-return]


def test_every_arm_has_its_verdict_and_numbers(table: TablePlan, profile: Build) -> None:
    cell = explain_cell(table, find_cell(table, "chat", 14e6, 78e6 / 8, 0.25))
    verdicts = {arm.arm_id: arm.verdict for arm in cell.arms}
    assert verdicts == {
        profile(12).arm_id: ArmVerdict.CHOSEN,
        profile(10).arm_id: ArmVerdict.BEATEN,
        profile(8).arm_id: ArmVerdict.QUALITY,
        profile(6).arm_id: ArmVerdict.PINNED,
        profile(5).arm_id: ArmVerdict.UNSTABLE,
        RAW: ArmVerdict.BEATEN,
    }
    assert cell.arms[0].arm_id == cell.winner == profile(12).arm_id
    assert 1.1 < cell.margin < 1.3
    texts = {arm.arm_id: arm.text for arm in cell.arms}
    assert "0.057" in texts[profile(8).arm_id]
    assert "0.02" in texts[profile(8).arm_id]
    assert "3 refused" in texts[profile(6).arm_id]
    assert "encode" in texts[profile(5).arm_id] or "connection" in texts[profile(5).arm_id]
    assert sum(arm.weight for arm in cell.arms) == pytest.approx(1.0)


def test_on_a_fast_link_raw_is_chosen_and_says_by_how_much(table: TablePlan) -> None:
    cell = explain_cell(table, find_cell(table, "chat", 14e6, 1e9, 0.05))
    assert cell.winner == RAW
    beaten = [arm for arm in cell.arms if arm.verdict is ArmVerdict.SLOWER_THAN_RAW]
    assert beaten
    assert all("raw" in arm.text for arm in beaten)


def test_an_explanation_is_the_decision(table: TablePlan) -> None:
    for cell in np.random.default_rng(3).integers(0, len(table.cells), size=60).tolist():
        explanation = explain_cell(table, cell)
        assert explanation.winner == table.arms[table.winners[cell]].arm_id
        mixture = table.mixtures[table.cells[cell]]
        assert {arm.arm_id for arm in explanation.arms if arm.weight > 0} == {
            table.arms[arm].arm_id for arm in mixture.arms
        }


def test_the_in_use_arm_is_part_of_the_explanation(profile: Build, request_for: Build, small_grid: Grid) -> None:
    first, second = profile(12, ratio=4.0), profile(8, ratio=4.0)
    before = decide([request_for(first, profile(8, ratio=4.1), goals=(CHAT,))], grid=small_grid)
    after = decide([request_for(profile(12, ratio=4.05), second, goals=(CHAT,))], grid=small_grid, previous=before)
    cell = explain_cell(after.tables[0], find_cell(after.tables[0], "chat", 14e6, 1e7, 0.1))
    assert cell.winner == second.arm_id
    assert "in use" in cell.arms[0].text
    loser = cell.arm(first.arm_id)
    assert loser is not None
    assert loser.verdict is ArmVerdict.NEAR


def test_a_transfer_joins_decision_and_effect(table: TablePlan, profile: Build, effect: Build) -> None:
    p = profile(12)
    done = effect(
        arm_id=p.arm_id, service_class="chat", wire_bytes=2_800_000, encode_s=0.024, wire_s=0.32, decode_s=0.012,
        total_s=0.36, path=Path.CODED, chunks=4, bandwidth_bytes_per_s=78e6 / 8, load=0.25, table_version=42,
        expected_bytes=14e6, reconstruction_error=0.0312,
    )  # fmt: skip
    explanation = explain_transfer(table, done, receiver=done)
    assert explanation.predicted is not None
    assert explanation.predicted.wire_s == pytest.approx(14e6 / 5.0 / (78e6 / 8), rel=0.05)
    text = transfer_text(explanation)
    for part in (
        "t0",
        "class chat, tenant acme",
        "table v42",
        "DRAWN",
        "observed",
        "verified",
        "64 Mbit/s",
        "none yet",
        "reconstruction error 0.0312",
    ):
        assert part in text, part
    document = json.loads(json.dumps(explanation.to_document(), allow_nan=False))
    assert document["drawn"] == p.arm_id
    assert document["decision"]["winner"] == p.arm_id
    assert document["observed"]["verdict"] == "verified"


def test_without_a_table_the_reason_is_all(effect: Build) -> None:
    explanation = explain_transfer(None, effect(table_version=0, reason="bandwidth_unknown"))
    assert explanation.cell is None
    assert "bandwidth_unknown" in transfer_text(explanation)
    assert json.loads(json.dumps(explanation.to_document()))["decision"] is None


def test_a_hypothetical_decision_and_an_unknown_class(table: TablePlan) -> None:
    unknown = find_cell(table, "nobody", 20e6, 25e6, 0.1)
    assert explain_cell(table, unknown).service_class == "default"
    text = cell_text(explain_cell(table, unknown))
    assert "hypothetical" in text
    assert "over" in cell_text(explain_cell(table, find_cell(table, "chat", 1e12, 1e12, 99.0)))
    for cell in (-1, len(table.cells)):
        with pytest.raises(ExplanationError):
            explain_cell(table, cell)


def test_a_cell_matches_the_published_tables(table: TablePlan) -> None:
    published = table.decision_table(1)
    generator = np.random.default_rng(5)
    for size, bandwidth, load in zip(
        10 ** generator.uniform(3, 10, 200),
        10 ** generator.uniform(4, 12, 200),
        generator.uniform(0, 6, 200),
        strict=True,
    ):
        for name in ("chat", "default", "nobody"):
            where = (name, float(size), float(bandwidth), float(load))
            assert find_cell(table, *where) == published.cell_index(*where)
    assert find_cell(table, "chat", 256e3, 125e3, 0.1) == published.cell_index("chat", 256e3, 125e3, 0.1)


def test_explaining_is_quick(table: TablePlan) -> None:
    start = time.process_time()
    for cell in range(5):
        explain_cell(table, cell * 100)
    assert (time.process_time() - start) / 5 < 0.05


def random_table(rng: random.Random, profile: Build, request_for: Build) -> TablePlan:
    """Several classes of two tenants with any objective and limit on a link that is often overloaded."""
    profiles = [
        profile(
            levels,
            ratio=rng.uniform(1.2, 9),
            loss_mean_nats=rng.choice([0.0, 0.001, 0.005, 0.01]),
            loss_se_nats=1e-5,
            encode=StageTime(rng.uniform(0, 3e-3), 10 ** rng.uniform(-10, -7)),
            decode=StageTime(rng.uniform(0, 3e-3), 10 ** rng.uniform(-10, -7)),
        )
        for levels in range(4, 4 + rng.randint(2, 6))
    ]
    raw_shares = [rng.random() for _ in range(rng.randint(2, 5))]
    goals = tuple(
        ClassGoal(
            name=f"c{number}" if number else "default",
            workload="dialogue",
            tenant=f"t{rng.randint(0, 1)}",
            objective=rng.choice(list(Objective)),
            max_quality_loss_nats=rng.choice([0.0, 0.002, 0.02]),
            explore_share=0.0,
            slo_s=rng.choice([None, 0.3, 1.0]),
            offered_share=share / sum(raw_shares),
        )
        for number, share in enumerate(raw_shares)
    )
    grid = Grid(
        size_edges_bytes=(1e5, 1e6, 1e7),
        bandwidth_edges_bytes_per_s=(1e6, 4e6, 1.6e7, 6.4e7, 2.5e8),
        load_edges=(0.6, 0.9, 1.2, 1.6, 2.5, 4.0, 8.0),
    )
    knob = KvTransfer(exclusive_connection=rng.random() < 0.5)
    return decide([request_for(*profiles, goals=goals)], knob=knob, grid=grid).tables[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stride", [67, pytest.param(11, marks=pytest.mark.slow)])
def test_every_cell_is_explained_as_it_was_decided(seed: int, stride: int, profile: Build, request_for: Build) -> None:
    table = random_table(random.Random(seed), profile, request_for)
    cells = range(seed, len(table.cells), stride)
    assert [cell for cell in cells if explained_winner(table, cell) != decided(table, cell)] == []


def explained_winner(table: TablePlan, cell: int) -> str:
    (won,) = [arm.arm_id for arm in explain_cell(table, cell).arms if arm.verdict is ArmVerdict.CHOSEN]
    return won


def decided(table: TablePlan, cell: int) -> str:
    return table.arms[table.winners[cell]].arm_id
