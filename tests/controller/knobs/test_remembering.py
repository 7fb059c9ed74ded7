"""What is predicted once and shared decides as if it had been predicted anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from controld.candidates.profile import Profile
from controld.controller import decide as deciding
from controld.controller.goals import ClassGoal, TableRequest
from controld.controller.grid import Grid
from controld.controller.knobs.base import Array, AtRest, Context, Corrections, StageModels
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.controller.knobs.remembering import Remembering
from controld.controller.plan import Plan

GRID = Grid(size_edges_bytes=(4e6, 64e6), bandwidth_edges_bytes_per_s=(1e6, 3e7, 1e9), load_edges=(0.3, 1.0))


class Counting(KvTransfer):
    """How often arms are predicted from nothing."""

    calls = 0

    def at_rest(self, models: StageModels, factors: Array, context: Context) -> AtRest:
        Counting.calls += 1
        return super().at_rest(models, factors, context)


@pytest.fixture
def asked(profile: Callable[..., Profile], request_for: Callable[..., TableRequest]) -> TableRequest:
    names = ("default", "chat", "batch", "code")
    goals = tuple(
        ClassGoal(
            name=name, workload="dialogue", max_quality_loss_nats=0.02, tenant=f"t{index % 2}", offered_share=0.25
        )
        for index, name in enumerate(names)
    )
    return request_for(profile(), profile(8, ratio=6.0, loss_mean_nats=0.015), goals=goals)


def decided(asked: TableRequest) -> Plan:
    return deciding.decide([asked], knob=KvTransfer(), grid=GRID)


@pytest.mark.parametrize("shares_known", [False, True])
def test_decisions_are_those_of_a_knob_that_forgets(
    asked: TableRequest, shares_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shares_known:
        asked = replace(asked, goals=tuple(replace(goal, offered_share=None) for goal in asked.goals))
    remembered = decided(asked)
    monkeypatch.setattr(deciding, "Remembering", lambda knob: knob)
    assert remembered.to_json() == decided(asked).to_json()
    assert len(remembered.tables[0].mixtures) > 2


def test_classes_of_one_workload_share_what_no_load_changes(asked: TableRequest) -> None:
    Counting.calls = 0
    deciding.decide([asked], knob=Counting(), grid=GRID)
    # Middles, corners, and the lower ends: for four classes and all their sweeps.
    assert Counting.calls == 3


def test_other_arms_corrections_or_points_are_other_predictions(asked: TableRequest) -> None:
    item = asked.class_inputs()[0]
    knob, points = Remembering(KvTransfer()), GRID.points
    factors: Any = Corrections.none(len(item.models)).factors()
    first = knob.predict(item.models, factors, points.middle)
    assert knob.predict(item.models, factors, points.middle) is first
    assert knob.predict(item.models, factors * 2, points.middle) is not first
    assert knob.predict(item.models, factors, points.corners[0]) is not first
    assert knob.predict(item.models, factors, points.middle, share=0.5) is not first
    fewer = knob.predict(item.models.rows(np.array([0, 1])), factors[:2], points.middle)
    assert fewer.total_s.shape[0] == 2
    assert (knob.name, knob.work_stages, knob.to_document()) == (
        KvTransfer().name, KvTransfer().work_stages, KvTransfer().to_document()
    )  # fmt: skip
