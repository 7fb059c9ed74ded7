from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from controld.candidates.profile import NO_TIME, StageTime
from controld.controller.decide import decide
from controld.controller.energy import COEFFICIENTS, CORE, MEMORY, PREFILL, WIRE, transfer_joules
from controld.controller.explain import explain_cell, find_cell
from controld.controller.explain_text import cell_text
from controld.controller.goals import ClassGoal, Objective, PrefillTime, TableRequest
from controld.controller.knobs.base import Context, Prediction
from controld.controller.knobs.kv_load import KvLoad
from controld.controller.knobs.kv_transfer import KvTransfer

Build = Callable[..., Any]
SIZES = np.array([1e6, 14e6])


def predicted(request: TableRequest, knob: KvTransfer | KvLoad) -> tuple[Prediction, np.ndarray]:
    [item] = request.class_inputs()
    context = Context(sizes_bytes=SIZES, bandwidths_bytes_per_s=np.array([1e7, 1e9]), loads=np.array([0.1]))
    return knob.predict(item.models, np.ones((len(item.models), 4)), context), item.models.wire_share


def test_every_coefficient_says_that_it_is_estimated_and_from_what() -> None:
    assert all(one.estimated and one.source and one.value > 0 for one in COEFFICIENTS)


def test_the_parts_are_bytes_and_seconds_times_their_coefficients(profile: Build, request_for: Build) -> None:
    p = profile(ratio=4.0)
    prediction, shares = predicted(request_for(p, raw_overhead=NO_TIME), KvTransfer())
    joules = transfer_joules(prediction, shares, SIZES)
    for index, size in enumerate(SIZES):
        codec_s = p.encode.seconds(size) + p.decode.seconds(size)
        assert joules.computing_j[:, index, 0, 0] == pytest.approx([0.0, CORE.value * codec_s])
        assert joules.wire_j[:, index, 0, 0] == pytest.approx([WIRE.value * size, WIRE.value * size / 4])
        assert joules.memory_j[:, index, 0, 0] == pytest.approx([2 * MEMORY.value * size, 2.5 * MEMORY.value * size])
    total = joules.computing_j + joules.wire_j + joules.memory_j
    np.testing.assert_allclose(joules.total_j, total)


def test_a_larger_transfer_needs_more_in_every_part_and_the_wires_is_no_constant(
    profile: Build, request_for: Build
) -> None:
    prediction, shares = predicted(request_for(profile()), KvTransfer())
    joules = transfer_joules(prediction, shares, SIZES)
    assert joules.wire_j[:, 1] / joules.wire_j[:, 0] == pytest.approx(14.0)
    assert (joules.total_j[:, 1] > joules.total_j[:, 0]).all()


def test_computing_a_prefix_again_is_the_prefill_engines_energy(profile: Build, request_for: Build) -> None:
    prefill = PrefillTime(a_s=0.0, b_s_per_byte=1e-8)
    request = request_for(profile(), tier="prefix_store", prefill=prefill)
    prediction, shares = predicted(request, KvLoad())
    joules = transfer_joules(prediction, shares, SIZES)
    assert joules.computing_j[1, :, 0, 0] == pytest.approx(PREFILL.value * 1e-8 * SIZES)
    assert joules.wire_j[1].max() == 0


def test_the_objective_moves_the_choice_to_where_joules_are_least_and_says_so(
    profile: Build, request_for: Build
) -> None:
    # 14 MB: the small one saves 0.03 J on the wire and spends 2 J in the codec.
    small = profile(4, ratio=8.0, encode=StageTime(0.0, 2.5e-9), decode=StageTime(0.0, 2.5e-9))
    frugal = profile(12, ratio=2.0, encode=StageTime(0.0, 2e-11), decode=StageTime(0.0, 2e-11))
    chosen = {}
    for objective in (Objective.LATENCY, Objective.ENERGY):
        goal = ClassGoal(name="default", workload="dialogue", max_quality_loss_nats=0.02, objective=objective)
        table = decide([request_for(small, frugal, goals=(goal,))]).tables[0]
        cell = explain_cell(table, find_cell(table, "default", 14e6, 1e6, 0.05))
        chosen[objective] = cell.winner
        text = cell_text(cell)
        assert ("estimated: a busy core 30 W" in text) is (objective is Objective.ENERGY)
        assert (" J\n" in text) is (objective is Objective.ENERGY)
        arms = {arm.arm_id: arm.energy_j for arm in cell.arms}
        assert arms[frugal.arm_id] < arms["raw"] < arms[small.arm_id]
    assert chosen == {Objective.LATENCY: small.arm_id, Objective.ENERGY: frugal.arm_id}
