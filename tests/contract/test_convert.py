"""Values survive the wire unchanged; what is malformed is refused by field."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controld.contract.configuration import Configuration
from controld.contract.decision import RAW, RECOMPUTE, Arm, ClassRule, DecisionTable, Mixture
from controld.contract.effect import MAX_RECONSTRUCTION_ERROR, Effect, Half, Path, Verdict
from controld.contract.errors import FieldError
from controld.contract.rpc import convert, convert_trial
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.snapshot import CalibratedArtefact, ClassRules, Resource, TenantShare
from controld.contract.telemetry import LinkEstimate, Telemetry
from controld.contract.trial import (
    ClipLoss,
    CoderMeasurement,
    EngineMeasurement,
    SegmentLoss,
    TrialOutcome,
    TrialStatus,
    TrialTask,
)
from controld.contract.video import MemorySplit

NAMES = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
NUMBERS = st.floats(0, allow_infinity=False, allow_nan=False)
COUNTS = st.integers(0, 2**53)
VALUES = (
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.integers(-(2**40), 2**40)
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: not x.is_integer())
)
IDENTIFIERS = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(lambda name: name != "code")
CONFIGURATIONS = st.dictionaries(IDENTIFIERS, VALUES, min_size=1, max_size=5).map(Configuration)
EDGES = st.lists(NUMBERS, max_size=4, unique=True).map(lambda edges: tuple(sorted(edges)))


@st.composite
def decision_tables(draw: st.DrawFn) -> DecisionTable:
    coded = draw(st.lists(CONFIGURATIONS, max_size=4, unique_by=lambda c: c.config_id))
    arms = (Arm(RAW), Arm(RECOMPUTE), *(Arm(c.config_id, c) for c in coded))
    mixtures = []
    for _ in range(draw(st.integers(1, 4))):
        members = draw(st.lists(st.integers(0, len(arms) - 1), min_size=1, max_size=len(arms), unique=True))
        parts = draw(st.lists(st.integers(1, 100), min_size=len(members), max_size=len(members)))
        raw_below = draw(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e3, 1e3)))
        mixtures.append(Mixture(tuple(members), tuple(part / sum(parts) for part in parts), *raw_below))
    classes = ("default", *draw(st.lists(NAMES.filter(lambda n: n != "default"), max_size=3, unique=True)))
    sizes, bandwidths, loads = draw(EDGES), draw(EDGES), draw(EDGES)
    count = len(classes) * (len(sizes) + 1) * (len(bandwidths) + 1) * (len(loads) + 1)
    cells = draw(st.lists(st.integers(0, len(mixtures) - 1), min_size=count, max_size=count))
    return DecisionTable(
        tier=draw(NAMES),
        link_group=draw(NAMES),
        version=draw(st.integers(1, 2**53)),
        classes=classes,
        size_edges_bytes=sizes,
        bandwidth_edges_bytes_per_s=bandwidths,
        load_edges=loads,
        arms=arms,
        mixtures=tuple(mixtures),
        cells=tuple(cells),
        prior_bandwidth_bytes_per_s=draw(NUMBERS),
        guard_sample=draw(st.floats(0, 1)),
    )


ERRORS = st.none() | st.floats(0, MAX_RECONSTRUCTION_ERROR)
EFFECTS = st.builds(
    Effect,
    transfer_id=NAMES,
    half=st.sampled_from(Half),
    arm_id=NAMES,
    table_version=COUNTS,
    service_class=NAMES,
    tier=NAMES,
    link_group=NAMES,
    tokens=COUNTS,
    chunks=st.integers(0, 2**32 - 1),
    raw_bytes=COUNTS,
    wire_bytes=COUNTS,
    encode_s=NUMBERS,
    wire_s=NUMBERS,
    decode_s=NUMBERS,
    wait_s=NUMBERS,
    total_s=NUMBERS,
    path=st.sampled_from(Path),
    verdict=st.sampled_from(Verdict),
    reason=st.just("") | NAMES,
    expected_bytes=NUMBERS,
    bandwidth_bytes_per_s=NUMBERS,
    load=NUMBERS,
    explored=st.booleans(),
    finished_unix_s=NUMBERS,
    reconstruction_error=ERRORS,
)
RULES = st.builds(
    ClassRule,
    service_class=NAMES,
    extra_key=st.none() | NAMES,
    priority=st.none() | st.integers(-(2**63), 2**63 - 1),
    learn=st.booleans(),
    tenant=st.just("") | NAMES,
)
SHARES = st.builds(TenantShare, name=NAMES, weight=st.floats(min_value=1e-6, max_value=1e6))
LINKS = st.builds(
    LinkEstimate,
    link_group=NAMES,
    tier=NAMES,
    bandwidth_bytes_per_s=NUMBERS,
    bandwidth_sd_bytes_per_s=NUMBERS,
    bandwidth_age_s=NUMBERS,
    offered_bytes_per_s=NUMBERS,
    offered_sd_bytes_per_s=NUMBERS,
    backlog_bytes=COUNTS,
    transfers=COUNTS,
    offered_by_class_bytes_per_s=st.dictionaries(NAMES, NUMBERS, max_size=3),
)
TELEMETRY = st.builds(
    Telemetry,
    attached=st.booleans(),
    attach_reason=st.just("") | NAMES,
    applied_version=COUNTS,
    links=st.lists(LINKS, max_size=3, unique_by=lambda link: (link.tier, link.link_group)).map(tuple),
    counters=st.dictionaries(NAMES, COUNTS, max_size=3),
    lease_left_s=st.floats(allow_nan=False, allow_infinity=False),
)
TOKENS = st.integers(1, 2**31)
TASKS = st.builds(
    TrialTask,
    study_id=NAMES,
    trial_id=NAMES,
    workload=NAMES,
    lossy=CONFIGURATIONS,
    coders=st.lists(NAMES, min_size=1, max_size=3).map(tuple),
    prompt_tokens=st.lists(TOKENS, min_size=1, max_size=3).map(tuple),
    segments_per_length=TOKENS,
    first_segment=st.integers(0, 2**31),
    continuation_tokens=TOKENS,
    deadline_s=NUMBERS,
)
LOSSES = st.builds(
    SegmentLoss,
    prompt_tokens=TOKENS,
    segment=st.integers(0, 2**31),
    loss_nats=st.floats(allow_nan=False, allow_infinity=False),
    top1_agreement=st.floats(0, 1),
    answer_nats=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    reconstruction_error=ERRORS,
)
MEASUREMENTS = st.builds(
    CoderMeasurement,
    code=NAMES,
    prompt_tokens=TOKENS,
    segment=st.integers(0, 2**31),
    raw_bytes=COUNTS,
    wire_bytes=COUNTS,
    encode_s=NUMBERS,
    decode_s=NUMBERS,
)
CLIP_TASKS = st.builds(
    TrialTask,
    study_id=NAMES,
    trial_id=NAMES,
    workload=NAMES,
    lossy=CONFIGURATIONS,
    coders=st.lists(NAMES, min_size=1, max_size=3).map(tuple),
    clip_chunks=st.lists(TOKENS, min_size=1, max_size=3).map(tuple),
    segments_per_length=TOKENS,
    first_segment=st.integers(0, 2**31),
)
ENGINE_NUMBERS = st.floats(0, 1e4)
CHUNKS = st.integers(1, 2**31 - 1)
CLIP_OUTCOMES = st.builds(
    TrialOutcome,
    study_id=NAMES,
    trial_id=NAMES,
    status=st.sampled_from(TrialStatus),
    clips=st.lists(
        st.builds(ClipLoss, chunks=CHUNKS, segment=st.integers(0, 2**31), loss=st.floats(-1e6, 1e6)),
        min_size=1,
        max_size=3,
    ).map(tuple),
    engine=st.lists(
        st.builds(
            EngineMeasurement,
            variant=NAMES,
            forward_s=st.floats(1e-9, 1e4),
            vae_s=ENGINE_NUMBERS,
            frames_per_chunk=CHUNKS,
            memory=st.builds(MemorySplit, weights_bytes=COUNTS, kv_bytes=COUNTS, activation_bytes=COUNTS),
            session_bytes=COUNTS,
            reference_bytes=st.integers(1, 2**53),
            drift=st.none() | ENGINE_NUMBERS,
            motion=st.none() | ENGINE_NUMBERS,
        ),
        max_size=2,
    ).map(tuple),
)
OUTCOMES = st.builds(
    TrialOutcome,
    study_id=NAMES,
    trial_id=NAMES,
    status=st.sampled_from(TrialStatus),
    detail=st.just("") | NAMES,
    losses=st.lists(LOSSES, min_size=1, max_size=3).map(tuple),
    coders=st.lists(MEASUREMENTS, max_size=3).map(tuple),
    seconds=NUMBERS,
    corpus=st.just("") | NAMES,
)


@settings(max_examples=40)
@given(decision_tables())
def test_a_table_survives_the_wire_and_draws_alike(table: DecisionTable) -> None:
    message = pb.DecisionTable.FromString(convert.decision_table_to_proto(table).SerializeToString())
    received = convert.decision_table_from_proto(message, version=table.version)
    assert received == table
    assert received.draw("t", "default", 1e6, 1e7, 0.5) == table.draw("t", "default", 1e6, 1e7, 0.5)


@given(EFFECTS, st.integers(1, 2**53))
def test_an_effect_survives_the_wire(effect: Effect, seq: int) -> None:
    message = pb.Effect.FromString(convert.effect_to_proto(effect, seq=seq).SerializeToString())
    assert (convert.effect_from_proto(message), message.seq) == (effect, seq)


@given(
    st.lists(RULES, max_size=4).map(tuple), st.lists(SHARES, max_size=3, unique_by=lambda share: share.name).map(tuple)
)
def test_class_rules_survive_the_wire(rules: tuple[ClassRule, ...], tenants: tuple[TenantShare, ...]) -> None:
    sent = ClassRules(rules, tenants)
    message = convert.class_rules_to_proto(sent)
    assert convert.class_rules_from_proto(pb.ClassRules.FromString(message.SerializeToString())) == sent


@pytest.mark.parametrize(
    ("tenants", "field"),
    [
        ([pb.TenantShare(weight=1.0)], "tenant_share.name"),
        ([pb.TenantShare(name="acme")], "tenant_share.acme.weight"),
        ([pb.TenantShare(name="acme", weight=math.nan)], "tenant_share.acme.weight"),
        ([pb.TenantShare(name="acme", weight=1.0)] * 2, "class_rules.tenants"),
    ],
)
def test_tenants_that_cannot_share_are_refused_by_field(tenants: list[pb.TenantShare], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        convert.class_rules_from_proto(pb.ClassRules(tenants=tenants))
    assert caught.value.field == field


def test_a_class_that_offers_nonsense_is_refused() -> None:
    link = pb.LinkEstimate(tier="pd", link_group="default", offered_by_class_bytes_per_s={"chat": -1.0})
    with pytest.raises(FieldError, match="offered_by_class"):
        convert.telemetry_from_proto(pb.Telemetry(links=[link]))


@given(TELEMETRY)
def test_telemetry_survives_the_wire(telemetry: Telemetry) -> None:
    message = convert.telemetry_to_proto(telemetry)
    assert convert.telemetry_from_proto(pb.Telemetry.FromString(message.SerializeToString())) == telemetry


@given(TASKS | CLIP_TASKS)
def test_a_trial_task_survives_the_wire(task: TrialTask) -> None:
    message = convert_trial.trial_task_to_proto(task)
    assert convert_trial.trial_task_from_proto(pb.TrialRequest.FromString(message.SerializeToString())) == task


def test_a_worker_that_measures_no_answers_and_one_that_measures_nonsense() -> None:
    loss = pb.SegmentLoss(prompt_tokens=256, segment=0, loss_nats=0.5, top1_agreement=1.0)
    message = pb.TrialResult(study_id="s", trial_id="t", status="measured", losses=[loss])
    assert convert_trial.trial_outcome_from_proto(message).losses[0].answer_nats is None
    message.losses[0].answer_nats = 0.0
    assert convert_trial.trial_outcome_from_proto(message).losses[0].answer_nats == 0.0
    message.losses[0].answer_nats = math.nan
    with pytest.raises(FieldError, match=r"answer_nats"):
        convert_trial.trial_outcome_from_proto(message)


@given(OUTCOMES | CLIP_OUTCOMES)
def test_a_trial_outcome_survives_the_wire(outcome: TrialOutcome) -> None:
    message = convert_trial.trial_outcome_to_proto(outcome)
    assert convert_trial.trial_outcome_from_proto(pb.TrialResult.FromString(message.SerializeToString())) == outcome


@given(st.binary(max_size=100), NAMES)
def test_an_artefact_survives_the_wire(content: bytes, name: str) -> None:
    artefact = CalibratedArtefact(hashlib.sha256(content).hexdigest(), "f", content)
    message = convert.resource_to_proto(Resource(name, artefact))
    assert convert.resource_from_proto(message, version=1) == Resource(name, artefact)


def test_an_artefact_with_another_hash_is_refused() -> None:
    artefact = pb.CalibratedArtefact(sha256="0" * 64, content=b"x")
    with pytest.raises(FieldError) as caught:
        convert.resource_from_proto(pb.Resource(name="a", calibrated_artefact=artefact), version=1)
    assert caught.value.field == "calibrated_artefact.sha256"


def test_a_resource_of_a_later_kind_is_none() -> None:
    assert convert.resource_from_proto(pb.Resource.FromString(b"\x0a\x01a\x9a\x06\x01x"), version=1) is None


def a_table() -> pb.DecisionTable:
    return pb.DecisionTable(
        tier="pd",
        link_group="default",
        classes=["default"],
        arms=[pb.Arm(arm_id="raw")],
        mixtures=[pb.Mixture(arms=[0], weights=[1.0])],
        cells=[0],
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tier": ""}, "decision_table.tier"),
        ({"classes": ["chat"]}, "decision_table.classes"),
        ({"size_edges_bytes": [1.0, math.nan]}, "decision_table.size_edges_bytes"),
        ({"bandwidth_edges_bytes_per_s": [2.0, 1.0]}, "decision_table.bandwidth_edges_bytes_per_s"),
        ({"load_edges": [math.inf]}, "decision_table.load_edges"),
        ({"arms": [pb.Arm(arm_id="recompute")]}, "decision_table.arms"),
        ({"arms": [pb.Arm(arm_id="0123", configuration_json='{"a":1}')]}, "arm.0123"),
        ({"arms": [pb.Arm(arm_id="x", configuration_json="{")]}, "configuration"),
        ({"mixtures": [pb.Mixture(arms=[0], weights=[0.5])]}, "mixture.weights"),
        ({"mixtures": [pb.Mixture(arms=[0], weights=[math.nan])]}, "mixture.weights"),
        ({"mixtures": [pb.Mixture(arms=[7], weights=[1.0])]}, "decision_table.mixtures"),
        ({"mixtures": [pb.Mixture()]}, "mixture.arms"),
        ({"mixtures": [pb.Mixture(arms=[0], weights=[1.0], raw_below_s=math.nan)]}, "mixture.raw_below_s"),
        ({"cells": [1]}, "decision_table.cells"),
        ({"cells": []}, "decision_table.cells"),
        ({"prior_bandwidth_bytes_per_s": -1.0}, "decision_table.prior_bandwidth_bytes_per_s"),
        ({"guard_sample": 1.5}, "decision_table.guard_sample"),
        ({"guard_sample": math.nan}, "decision_table.guard_sample"),
    ],
)
def test_a_malformed_table_is_refused_by_field(change: dict[str, Any], field: str) -> None:
    assert convert.decision_table_from_proto(a_table(), version=1).version == 1
    message = a_table()
    for name in change:
        message.ClearField(name)  # type: ignore[arg-type]
    message.MergeFrom(pb.DecisionTable(**change))
    with pytest.raises(FieldError) as caught:
        convert.decision_table_from_proto(message, version=1)
    assert caught.value.field == field


def test_a_rule_for_no_class_and_an_empty_key_are_refused() -> None:
    with pytest.raises(FieldError, match="service_class"):
        convert.class_rules_from_proto(pb.ClassRules(rules=[pb.ClassRule()]))
    with pytest.raises(FieldError, match="extra_key"):
        convert.class_rules_to_proto(ClassRules((ClassRule("c", extra_key=""),)))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_valid_effect_or_refused_by_field(data: bytes) -> None:
    from google.protobuf.message import DecodeError

    try:
        message = pb.Effect.FromString(data)
    except DecodeError:
        return
    try:
        effect = convert.effect_from_proto(message)
    except FieldError as error:
        assert error.field.startswith("effect.")
    else:
        assert math.isfinite(effect.total_s)


@pytest.mark.parametrize("error", [math.nan, math.inf, -1e-9, 1e9])
def test_an_impossible_reconstruction_error_is_refused_by_field(error: float) -> None:
    message = pb.Effect(
        seq=1, transfer_id="t", half="sender", arm_id="a", service_class="c", tier="pd", link_group="default",
        path="coded", verdict="verified",
    )  # fmt: skip
    assert convert.effect_from_proto(message).reconstruction_error is None
    message.reconstruction_error = 0.0
    assert convert.effect_from_proto(message).reconstruction_error == 0.0
    message.reconstruction_error = error
    with pytest.raises(FieldError, match=r"effect\.reconstruction_error"):
        convert.effect_from_proto(message)
    loss = pb.SegmentLoss(prompt_tokens=256, top1_agreement=1.0, reconstruction_error=error)
    result = pb.TrialResult(study_id="s", trial_id="t", status="measured", losses=[loss])
    with pytest.raises(FieldError, match=r"segment_loss\.reconstruction_error"):
        convert_trial.trial_outcome_from_proto(result)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"forward_s": 0.0}, "engine_measurement.forward_s"),
        ({"forward_s": math.nan}, "engine_measurement.forward_s"),
        ({"vae_s": -1.0}, "engine_measurement.vae_s"),
        ({"frames_per_chunk": 0}, "engine_measurement.frames_per_chunk"),
        ({"kv_bytes": 2**63}, "trial.engine[0].kv_bytes"),
        ({"reference_bytes": 0}, "engine_measurement.reference_bytes"),
        ({"drift": math.inf}, "engine_measurement.drift"),
        ({"variant": ""}, "engine_measurement.variant"),
        ({"variant": "x" * 5000}, "trial.engine[0].variant"),
    ],
)
def test_what_no_engine_measures_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    values = {"variant": "v", "forward_s": 0.1, "frames_per_chunk": 12, "reference_bytes": 100, **changes}
    message = pb.TrialResult(
        study_id="s",
        trial_id="t",
        status="measured",
        clips=[pb.ClipLoss(chunks=3, segment=0, loss=0.1)],
        engine=[pb.EngineMeasurement(**values)],
    )
    with pytest.raises(FieldError) as refused:
        convert_trial.trial_outcome_from_proto(message)
    assert refused.value.field == field


def test_a_clip_without_a_finite_loss_is_refused() -> None:
    message = pb.TrialResult(
        study_id="s", trial_id="t", status="measured", clips=[pb.ClipLoss(chunks=3, loss=math.nan)]
    )
    with pytest.raises(FieldError, match=r"clip_loss\.loss"):
        convert_trial.trial_outcome_from_proto(message)


def test_a_task_is_about_prompts_or_about_clips() -> None:
    values: dict[str, Any] = {
        "study_id": "s",
        "trial_id": "t",
        "workload": "w",
        "lossy": Configuration({"steps": 2}),
        "coders": ("v",),
        "segments_per_length": 1,
    }
    with pytest.raises(FieldError, match="clip_chunks"):
        TrialTask(**values)
    with pytest.raises(FieldError, match="beside prompt_tokens"):
        TrialTask(**values, prompt_tokens=(1,), clip_chunks=(1,))
