"""The prefix store's knob: load in which coding, or compute the prefix again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controld.candidates.profile import StageTime
from controld.contract.decision import RAW, RECOMPUTE
from controld.contract.effect import Path, Verdict
from controld.contract.errors import FieldError
from controld.controller.decide import decide
from controld.controller.explain import explain_cell, find_cell
from controld.controller.explain_text import cell_text
from controld.controller.goals import ClassGoal, Objective, PrefillTime
from controld.controller.grid import Grid
from controld.controller.guard import Pin, PinBoard
from controld.controller.knobs.base import STAGES, Context, Knob, Stage, StageModels
from controld.controller.knobs.kv_load import KvLoad
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.controller.knobs.tiers import knob_for_tier, knob_from_document
from controld.controller.learner import Feedback, Learner
from controld.controller.plan import Plan, TablePlan, plan_equal

Build = Callable[..., Any]
KNOB = KvLoad(chunk_bytes=4e6, latency_s=2e-3)
PREFILL = PrefillTime(a_s=0.01, b_s_per_byte=1e-8, c_s_per_byte2=1e-16)
NOW = 10_000.0

# Raw, recompute, one coded arm.
MODELS = StageModels(
    encode_a_s=np.array([1e-3, PREFILL.a_s, 5.0]),
    encode_b_s_per_byte=np.array([0.0, PREFILL.b_s_per_byte, 5.0]),
    encode_c_s_per_byte2=np.array([0.0, PREFILL.c_s_per_byte2, 0.0]),
    decode_a_s=np.array([0.0, 0.0, 2e-3]),
    decode_b_s_per_byte=np.array([0.0, 0.0, 1e-9]),
    wire_share=np.array([1.0, 0.0, 0.25]),
    framed=np.array([False, False, True]),
)
ONES = np.ones((3, len(STAGES)))


def predict(size: float, bandwidth: float, load: float = 0.0, knob: KvLoad = KNOB, factors: Any = ONES) -> Any:
    context = Context(
        sizes_bytes=np.array([size]), bandwidths_bytes_per_s=np.array([bandwidth]), loads=np.array([load])
    )
    return knob.predict(MODELS, factors, context)


def test_loading_pays_wire_and_decode_and_the_store_and_recomputing_the_prefill() -> None:
    prediction = predict(16e6, 1e7)
    raw, recompute, coded = prediction.service_s[:, 0, 0, 0]
    assert raw == pytest.approx(2e-3 + 1e-3 + 1.6)
    assert recompute == pytest.approx(PREFILL.seconds(16e6)) == pytest.approx(0.01 + 0.16 + 0.0256)
    wire, decode = 4e6 * 0.25 / 1e7, 2e-3 / 4 + 1e-9 * 4e6
    assert coded == pytest.approx(2e-3 + wire + decode + 3 * wire), "what encoding took was paid when it was stored"


def test_each_arm_takes_its_own_corrections() -> None:
    factors = ONES.copy()
    factors[:, STAGES.index(Stage.ENCODE)] = 3.0
    plain, slow = predict(16e6, 1e7), predict(16e6, 1e7, factors=factors)
    ratio = (slow.service_s / plain.service_s)[:, 0, 0, 0]
    assert ratio == pytest.approx([1.0, 3.0, 1.0])


@pytest.mark.parametrize("load", [0.0, 0.4])
def test_a_load_is_a_transfer_that_was_encoded_before(load: float) -> None:
    loaded = predict(16e6, 1e7, load)
    transfer = KvTransfer(chunk_bytes=KNOB.chunk_bytes, rtt_s=KNOB.latency_s, exclusive_connection=False)
    encoded = replace(
        MODELS, encode_a_s=np.array([1e-3, 0.0, 0.0]), encode_b_s_per_byte=np.zeros(3), encode_c_s_per_byte2=np.zeros(3)
    )
    context = Context(sizes_bytes=np.array([16e6]), bandwidths_bytes_per_s=np.array([1e7]), loads=np.array([load]))
    moved = transfer.predict(encoded, ONES, context)
    for arm in (0, 2):
        for name in ("encode_s", "wire_s", "decode_s", "service_s", "wait_s", "total_s"):
            assert getattr(loaded, name)[arm] == pytest.approx(getattr(moved, name)[arm]), (name, arm)


def test_recomputing_under_load_pays_for_its_room_in_the_prefill_engine() -> None:
    # 5 transfers a second of 16 MB, each 0.196 s of prefill: the engine is nearly full.
    prediction = predict(16e6, 1e9, load=0.08)
    assert prediction.rho[1, 0, 0, 0] == pytest.approx(5 * PREFILL.seconds(16e6))
    assert prediction.wait_s[1, 0, 0, 0] > 2 * prediction.service_s[1, 0, 0, 0]
    assert prediction.wait_s[2, 0, 0, 0] < 0.01
    assert predict(16e6, 1e9, load=0.09).wait_s[1, 0, 0, 0] == np.inf


def test_what_an_effect_is_compared_with() -> None:
    known = {"raw_bytes": 16e6, "wire_bytes": 4e6, "bandwidth": 1e7}
    assert KNOB.stage_seconds(MODELS, 1, **known) == {Stage.ENCODE: pytest.approx(PREFILL.seconds(16e6))}
    assert KNOB.stage_seconds(MODELS, 0, **known) == {Stage.WIRE: pytest.approx(1.603)}
    coded = KNOB.stage_seconds(MODELS, 2, **known)
    assert coded == {Stage.BYTES: 4e6, Stage.WIRE: pytest.approx(0.4), Stage.DECODE: pytest.approx(0.018)}
    assert KNOB.stage_seconds(MODELS, 0, raw_bytes=16e6, wire_bytes=16e6, bandwidth=0.0) == {}


def test_knobs_by_tier_and_by_name() -> None:
    knobs: list[Knob] = [KvLoad(chunk_bytes=7.0), KvTransfer(rtt_s=0.1)]
    for knob in knobs:
        assert knob_from_document(json.loads(json.dumps({"name": knob.name, **knob.to_document()}))) == knob
    assert isinstance(knob_for_tier("prefix_store"), KvLoad)
    assert isinstance(knob_for_tier("pd"), KvTransfer)
    with pytest.raises(FieldError):
        knob_from_document({"name": "no"})


def request_with(request_for: Build, *profiles: object, **changes: object) -> Any:
    return request_for(*profiles, tier="prefix_store", **{"prefill": PREFILL, **changes})


def drawn(table: TablePlan, size: float, bandwidth: float, load: float = 0.05, name: str = "default") -> str:
    return str(table.arms[table.winners[find_cell(table, name, size, bandwidth, load)]].arm_id)


def test_the_prefix_store_recomputes_where_loading_is_slower(profile: Build, request_for: Build) -> None:
    coded = profile(ratio=4.0)
    plan = decide([request_with(request_for, coded)])
    [table] = plan.tables
    assert table.knob == KvLoad()
    assert drawn(table, 14e6, 1e6) == RECOMPUTE, "3.5 s on the wire against 0.17 s of prefill"
    assert drawn(table, 14e6, 1e8) == coded.arm_id
    assert drawn(table, 14e6, 4e10) == RAW
    assert plan_equal(Plan.from_json(plan.to_json()), plan)
    assert Plan.from_json(plan.to_json()).tables[0].classes[0].candidates == table.classes[0].candidates
    published = table.decision_table(1)
    assert published.draw("t", "default", 14e6, 1e6, 0.05).arm.arm_id == RECOMPUTE


def test_recomputing_is_open_in_the_prefix_store_only(profile: Build, request_for: Build) -> None:
    with pytest.raises(FieldError, match="prefill"):
        request_for(profile(), prefill=PREFILL)
    unmeasured = decide([request_with(request_for, profile(), prefill=None)]).tables[0]
    assert RECOMPUTE not in {arm.arm_id for arm in unmeasured.arms}
    elsewhere = (ClassGoal(name="default", workload="dialogue", only_arm=RAW),)
    assert drawn(decide([request_with(request_for, profile(), goals=elsewhere)]).tables[0], 14e6, 1e6) == RAW
    pins = PinBoard((Pin(arm_id=RECOMPUTE, reason="the prefill engine is down", since_unix_s=0.0),))
    assert drawn(decide([request_with(request_for, pins=pins)]).tables[0], 14e6, 1e6) == RAW


def test_a_published_order_loading_coded_before_recomputing_before_loading_raw(
    profile: Build, request_for: Build
) -> None:
    # KVServe's artefact, 780 MiB of prefix at 5 Gbit/s: 186 ms coded at 8.7, 1,100 ms recomputed, 1,235 ms raw.
    size, rate = 772e6, 5e9 / 8
    coded = profile(ratio=8.7, decode=StageTime(0.0, 0.04 / size))
    prefill = PrefillTime(a_s=0.0, b_s_per_byte=1.1 / size)
    table = decide([request_with(request_for, coded, prefill=prefill)], grid=Grid(load_edges=(0.01,))).tables[0]
    cell = explain_cell(table, find_cell(table, "default", size, rate, 0.0))
    assert [arm.arm_id for arm in cell.arms] == [coded.arm_id, RECOMPUTE, RAW]
    # Without a codec, computing is the better choice, if clearly so: it must not be worse at any corner of the cell.
    assert drawn(decide([request_with(request_for, prefill=prefill)]).tables[0], size, rate / 2, 0.0) == RECOMPUTE


@pytest.mark.parametrize("bad", [{"a_s": -1.0}, {"b_s_per_byte": np.nan}, {"c_s_per_byte2": np.inf}, {"a_s": 0.0}])
def test_a_prefill_time_that_is_none_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(FieldError, match="prefill_time"):
        PrefillTime(**{"a_s": 0.0, "b_s_per_byte": 0.0, **bad})


def test_an_explanation_names_it(request_for: Build, profile: Build) -> None:
    table = decide([request_with(request_for, profile())]).tables[0]
    text = cell_text(explain_cell(table, find_cell(table, "default", 14e6, 1e6, 0.05)))
    [line] = [line for line in text.splitlines() if line.startswith(RECOMPUTE)]
    assert "chosen" in line
    json.dumps(explain_cell(table, 0).to_document(), allow_nan=False)
    fewest = (ClassGoal(name="default", workload="dialogue", max_quality_loss_nats=1.0, objective=Objective.BYTES),)
    by_bytes = decide([request_with(request_for, profile(), goals=fewest)]).tables[0]
    cell = explain_cell(by_bytes, find_cell(by_bytes, "default", 14e6, 1e9, 0.0))
    assert cell.winner == RECOMPUTE
    assert "instead of none" in cell_text(cell)


def recomputed(effect: Build, number: int, seconds: float, **changes: object) -> Any:
    values = {
        "transfer_id": f"t{number}", "arm_id": RECOMPUTE, "tier": "prefix_store", "wire_bytes": 0, "encode_s": seconds,
        "wire_s": 0.0, "path": Path.RECOMPUTED, "verdict": Verdict.VERIFIED, **changes,
    }  # fmt: skip
    return effect(**values)


def test_its_time_is_learned_and_survives_a_restart(effect: Build, profile: Build, request_for: Build) -> None:
    p = profile()
    learner = Learner("prefix_store", "default", KvLoad())
    learner.set_candidates([p], prefill=PREFILL, sender_hardware="p", receiver_hardware="d")
    for number in range(30):
        slow = recomputed(effect, number, 4 * PREFILL.seconds(14e6))
        assert learner.observe(slow, NOW) is Feedback.LEARNED
    learned = learner.corrections(NOW)
    assert learned[RECOMPUTE][STAGES.index(Stage.ENCODE)].factor == pytest.approx(4.0, rel=0.1)
    assert learned[RAW] == fresh_learner(p).corrections(NOW)[RAW]
    assert learned[p.arm_id][STAGES.index(Stage.ENCODE)].factor == pytest.approx(1.0, abs=0.025), "no codec was slow"
    again = fresh_learner(p)
    again.restore(learner.to_json())
    assert again.corrections(NOW) == learned
    # 0.7 s of prefill now, where coded loading takes 0.4 s.
    before, after = (decide([request_with(request_for, p, corrections=c)]).tables[0] for c in ({}, learned))
    assert (drawn(before, 14e6, 1e7), drawn(after, 14e6, 1e7)) == (RECOMPUTE, p.arm_id)


def fresh_learner(profile: Any) -> Learner:
    learner = Learner("prefix_store", "default", KvLoad())
    learner.set_candidates([profile], prefill=PREFILL, sender_hardware="p", receiver_hardware="d")
    return learner


@pytest.mark.parametrize(
    ("changes", "feedback"),
    [
        ({"wire_bytes": 5}, Feedback.IMPLAUSIBLE),
        ({"path": Path.RAW}, Feedback.IMPLAUSIBLE),
        ({"arm_id": RAW}, Feedback.IMPLAUSIBLE),
        ({"path": Path.FAILED, "verdict": Verdict.ERROR}, Feedback.NOT_VERIFIED),
        ({"tier": "pd"}, Feedback.ORPHAN),
    ],
)
def test_what_cannot_be_a_recomputation_teaches_nothing(
    effect: Build, profile: Build, changes: dict[str, object], feedback: Feedback
) -> None:
    learner = fresh_learner(profile())
    before = learner.corrections(NOW)
    assert learner.observe(recomputed(effect, 0, 0.2, **changes), NOW) is feedback
    assert learner.corrections(NOW) == before


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)
@given(
    ratio=st.floats(0.5, 12), decode_b=st.floats(0, 1e-7),
    prefill=st.builds(PrefillTime, a_s=st.floats(1e-300, 1), b_s_per_byte=st.floats(0, 1e-7),
                      c_s_per_byte2=st.floats(0, 1e-14)),
)  # fmt: skip
def test_never_slower_than_loading_raw(
    profile: Build, request_for: Build, ratio: float, decode_b: float, prefill: PrefillTime
) -> None:
    coarse = Grid(
        size_edges_bytes=(1e6, 1e7),
        bandwidth_edges_bytes_per_s=tuple(1e6 * 8.0**i for i in range(5)),
        load_edges=(0.3, 0.9),
    )
    p = profile(ratio=ratio, decode=StageTime(0.0, decode_b))
    table = decide([request_with(request_for, p, prefill=prefill)], grid=coarse).tables[0]
    [item] = table.classes
    rows = np.array([[c.arm_id for c in item.candidates].index(arm.arm_id) for arm in table.arms])
    chosen = rows[table.winners].reshape(coarse.shape)
    for context in (coarse.points.middle, *coarse.points.corners):
        prediction = table.knob.predict(item.models, item.corrections.factors(), context)
        seconds = np.take_along_axis(prediction.total_s, chosen[None], axis=0)[0]
        raw = prediction.total_s[0]
        assert (seconds <= raw * (1 + 1e-9))[prediction.rho[0] < 1].all()
