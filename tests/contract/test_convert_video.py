"""What a video engine and controld say to each other survives the wire; what is malformed is refused by field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.rpc import convert, convert_video
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.snapshot import Resource, ResourceKind
from controld.contract.telemetry import Telemetry
from controld.contract.video import (
    Applied,
    ChunkReport,
    EngineFacts,
    EngineSetting,
    EngineState,
    MemorySplit,
    Transition,
)

SETTING = EngineSetting(configuration=Configuration({"kv": "nvfp4", "steps": 4}), reason="best quality within 20 GB")
FACTS = EngineFacts(
    engine="longlive", transitions={"steps": Transition.CHUNK, "kv": Transition.KV_REBUILD}, chunk_latents=8,
    frames_per_chunk=32, sessions=2, backends={"te": "speed"}, left_out={"weights=nvfp4": "compute capability 9.0"},
)  # fmt: skip
APPLIED = Applied(
    version=7, setting_id="a" * 16, chunk=3, transition=Transition.RELOAD, seconds=1.5, keeps_kv=False,
    refused={"steps": "no checkpoint"},
)  # fmt: skip
REPORT = ChunkReport(
    session_id="s", service_class="live", setting_id="a" * 16, chunk=3, session_chunk=2, frames=32,
    denoise_s=(0.2, 0.25), recache_s=0.2, vae_s=0.5, vae_overlap=0.75, total_s=0.7, first_frame_s=1.2, fps_denoise=49.0,
    fps_end_to_end=45.0, memory=MemorySplit(weights_bytes=1, kv_bytes=2,
    activation_bytes=3, peak_bytes=4, reserved_bytes=5), communication_bytes=6, kv_signal_to_noise_db=-3.5,
    latent_sd=0.9, drift=0.1, flicker=0.02, has_nan=True,
    sessions=2,
)  # fmt: skip


def test_a_setting_survives_as_a_resource_of_its_own_kind() -> None:
    resource = Resource("engine_setting/e0", SETTING)
    assert resource.kind is ResourceKind.ENGINE_SETTING
    wire = pb.Resource.FromString(convert.resource_to_proto(resource).SerializeToString())
    assert convert.resource_from_proto(wire, version=3) == resource


def test_facts_state_and_answers_survive() -> None:
    assert convert_video.engine_facts_from_proto(convert_video.engine_facts_to_proto(FACTS)) == FACTS
    assert convert_video.setting_applied_from_proto(convert_video.setting_applied_to_proto(APPLIED)) == APPLIED
    state = EngineState(setting_id="x", setting_version=2, chunk=9, sessions={"live": 2}, memory_limit_bytes=10)
    telemetry = Telemetry(attached=True, engine=state)
    assert convert.telemetry_from_proto(convert.telemetry_to_proto(telemetry)) == telemetry
    plain = Telemetry(attached=True)
    assert convert.telemetry_from_proto(convert.telemetry_to_proto(plain)) == plain


def test_chunk_reports_survive_with_what_was_not_measured_absent() -> None:
    unquantised = ChunkReport(**{**_fields(REPORT), "kv_signal_to_noise_db": None})
    wire = convert_video.chunk_reports_to_proto([REPORT, unquantised])
    assert [convert_video.chunk_report_from_proto(message) for message in wire.reports] == [REPORT, unquantised]


def _fields(report: ChunkReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in ChunkReport.__slots__}


@pytest.mark.parametrize("name", convert_video._REPORT_NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_a_number_that_no_chunk_has_is_refused_by_name(name: str, value: float) -> None:
    (message,) = convert_video.chunk_reports_to_proto([REPORT]).reports
    setattr(message, name, value)
    with pytest.raises(FieldError, match=rf"chunk_report\.{name}"):
        convert_video.chunk_report_from_proto(message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("total_s", 1e308),
        ("total_s", 1e-320),
        ("vae_s", 1e-9),
        ("drift", 1e200),
        ("fps_denoise", 1e300),
        ("flicker", 2.0),
    ],
)
def test_a_finite_number_that_no_engine_measures_is_refused_too(name: str, value: float) -> None:
    (message,) = convert_video.chunk_reports_to_proto([REPORT]).reports
    setattr(message, name, value)
    with pytest.raises(FieldError, match=rf"chunk_report\.{name}"):
        convert_video.chunk_report_from_proto(message)


def test_a_change_takes_no_longer_than_a_day() -> None:
    message = convert_video.setting_applied_to_proto(APPLIED)
    message.seconds = 1e300
    with pytest.raises(FieldError, match=r"setting_applied\.seconds"):
        convert_video.setting_applied_from_proto(message)


def test_hostile_reports_are_refused_by_name() -> None:
    def refused(change: Any, field: str) -> None:
        (message,) = convert_video.chunk_reports_to_proto([REPORT]).reports
        change(message)
        with pytest.raises(FieldError) as caught:
            convert_video.chunk_report_from_proto(message)
        assert caught.value.field == field

    refused(lambda m: m.denoise_s.append(math.nan), "chunk_report.denoise_s")
    refused(lambda m: m.denoise_s.extend([0.0] * 2000), "chunk_report.denoise_s")
    refused(lambda m: setattr(m, "chunk", 2**64 - 1), "chunk_report.chunk")
    refused(lambda m: setattr(m.memory, "kv_bytes", 2**60), "chunk_report.memory.kv_bytes")
    refused(lambda m: setattr(m, "vae_overlap", 1.5), "chunk_report.vae_overlap")
    refused(lambda m: setattr(m, "kv_signal_to_noise_db", math.inf), "chunk_report.kv_signal_to_noise_db")
    refused(lambda m: setattr(m, "session_id", ""), "chunk_report.session_id")
    refused(lambda m: setattr(m, "service_class", "x" * 300), "chunk_report.service_class")


def test_hostile_facts_states_settings_and_answers_are_refused_by_name() -> None:
    def refused(read: Any, message: Any, change: Any, field: str) -> None:
        change(message)
        with pytest.raises(FieldError) as caught:
            read(message)
        assert caught.value.field == field

    facts = convert_video.engine_facts_from_proto
    make = convert_video.engine_facts_to_proto
    refused(facts, make(FACTS), lambda m: setattr(m, "sessions", 0), "engine_facts.sessions")
    refused(facts, make(FACTS), lambda m: m.transitions.update(vae="soon"), "engine_facts.transitions['vae']")
    refused(facts, make(FACTS), lambda m: m.transitions.update(vae="CHUNK"), "engine_facts.transitions['vae']")
    many = {f"p{n}": "x" for n in range(2000)}
    refused(facts, make(FACTS), lambda m: m.left_out.update(many), "engine_facts.left_out")
    answer = convert_video.setting_applied_from_proto
    made = convert_video.setting_applied_to_proto
    refused(answer, made(APPLIED), lambda m: setattr(m, "seconds", math.nan), "setting_applied.seconds")
    refused(answer, made(APPLIED), lambda m: setattr(m, "seconds", -1.0), "setting_applied.seconds")
    refused(answer, made(APPLIED), lambda m: setattr(m, "version", 2**63), "setting_applied.version")
    refused(answer, made(APPLIED), lambda m: setattr(m, "transition", ""), "setting_applied.transition")
    setting = convert_video.engine_setting_to_proto(SETTING)
    read = convert_video.engine_setting_from_proto
    refused(read, setting, lambda m: setattr(m, "setting_id", "0" * 16), "engine_setting.setting_id")
    refused(read, setting, lambda m: setattr(m, "configuration_json", "[1]"), "configuration")
    state = convert_video.engine_state_to_proto(EngineState(setting_id="x"))
    read_state = convert_video.engine_state_from_proto
    refused(read_state, state, lambda m: setattr(m, "memory_limit_bytes", 2**60), "telemetry.engine.memory_limit_bytes")


def test_how_far_a_change_reaches_is_that_of_its_farthest_parameter() -> None:
    at = {"kv": "bf16", "steps": 4}
    assert FACTS.reach(at, at) is Transition.NONE
    assert FACTS.reach(at, {"kv": "bf16", "steps": 2}) is Transition.CHUNK
    assert FACTS.reach(at, {"kv": "nvfp4", "steps": 2}) is Transition.KV_REBUILD
    assert FACTS.reach(at, {"kv": "bf16", "steps": 4, "unheard_of": 1}) is Transition.RELOAD
