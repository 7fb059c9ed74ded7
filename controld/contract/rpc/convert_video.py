"""Between protobuf messages and the contract's values of video engines; the rules are those of `convert`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.checks import MAX_TEXT_CHARACTERS, checked_count, checked_text
from controld.contract.video import (
    MAX_SECONDS,
    Applied,
    ChunkReport,
    EngineFacts,
    EngineSetting,
    EngineState,
    MemorySplit,
    Transition,
)

MAX_REPORTS = 1024
"""So many chunk reports may stand in one message."""

MAX_ENTRIES = 1024
"""So many entries may a map of an engine's have."""

MAX_STEPS = 1024

_MEMORY_FIELDS = ("weights_bytes", "kv_bytes", "activation_bytes", "peak_bytes", "reserved_bytes")
_REPORT_COUNTS = ("chunk", "session_chunk", "frames", "communication_bytes", "sessions")
_REPORT_NUMBERS = (
    "recache_s", "vae_s", "vae_overlap", "total_s", "first_frame_s", "fps_denoise", "fps_end_to_end", "latent_sd",
    "drift", "flicker",
)  # fmt: skip


def engine_setting_to_proto(setting: EngineSetting) -> pb.EngineSetting:
    """The setting with its id."""
    return pb.EngineSetting(
        setting_id=setting.setting_id,
        configuration_json=setting.configuration.canonical_json,
        reason=setting.reason[:MAX_TEXT_CHARACTERS],
    )


def engine_setting_from_proto(message: pb.EngineSetting) -> EngineSetting:
    """Raises: FieldError: not a configuration, or the id is another one's."""
    configuration = Configuration.from_json(message.configuration_json)
    if message.setting_id != configuration.config_id:
        raise FieldError(
            "engine_setting.setting_id", f"{message.setting_id!r}, but the configuration's is {configuration.config_id}"
        )
    reason = checked_text(message.reason, "engine_setting.reason", MAX_TEXT_CHARACTERS)
    return EngineSetting(configuration=configuration, reason=reason)


def engine_facts_to_proto(facts: EngineFacts) -> pb.EngineFacts:
    """What an engine says in its hello."""
    return pb.EngineFacts(
        engine=facts.engine,
        transitions={name: reach.name.lower() for name, reach in facts.transitions.items()},
        chunk_latents=facts.chunk_latents,
        frames_per_chunk=facts.frames_per_chunk,
        sessions=facts.sessions,
        backends=facts.backends,
        left_out=facts.left_out,
    )


def engine_facts_from_proto(message: pb.EngineFacts) -> EngineFacts:
    """Raises: FieldError: a count is below 1, a map is absurdly long, or a transition is unknown."""
    at = "engine_facts"
    return EngineFacts(
        engine=checked_text(message.engine, f"{at}.engine"),
        transitions={
            name: _transition(text, f"{at}.transitions[{name!r}]")
            for name, text in _texts(message.transitions, f"{at}.transitions").items()
        },
        chunk_latents=message.chunk_latents,
        frames_per_chunk=message.frames_per_chunk,
        sessions=message.sessions,
        backends=_texts(message.backends, f"{at}.backends"),
        left_out=_texts(message.left_out, f"{at}.left_out"),
    )


def engine_state_to_proto(state: EngineState) -> pb.EngineState:
    """What an engine says with its telemetry."""
    return pb.EngineState(
        setting_id=state.setting_id,
        setting_version=state.setting_version,
        chunk=state.chunk,
        sessions=state.sessions,
        memory_limit_bytes=state.memory_limit_bytes,
    )


def engine_state_from_proto(message: pb.EngineState) -> EngineState:
    """Raises: FieldError: a count is absurd, or a class's name is."""
    at = "telemetry.engine"
    _bounded(message.sessions, f"{at}.sessions")
    for name in ("setting_version", "chunk", "memory_limit_bytes"):
        checked_count(getattr(message, name), f"{at}.{name}")
    return EngineState(
        setting_id=checked_text(message.setting_id, f"{at}.setting_id"),
        setting_version=message.setting_version,
        chunk=message.chunk,
        sessions={checked_text(name, f"{at}.sessions"): count for name, count in message.sessions.items()},
        memory_limit_bytes=message.memory_limit_bytes,
    )


def setting_applied_to_proto(applied: Applied) -> pb.SettingApplied:
    """An engine's answer to a setting."""
    return pb.SettingApplied(
        version=applied.version,
        setting_id=applied.setting_id,
        chunk=applied.chunk,
        transition=applied.transition.name.lower(),
        seconds=applied.seconds,
        keeps_kv=applied.keeps_kv,
        refused=applied.refused,
    )


def setting_applied_from_proto(message: pb.SettingApplied) -> Applied:
    """Raises: FieldError: a number is not finite, negative or absurd, or the transition is unknown."""
    at = "setting_applied"
    return Applied(
        version=checked_count(message.version, f"{at}.version"),
        setting_id=checked_text(message.setting_id, f"{at}.setting_id"),
        chunk=checked_count(message.chunk, f"{at}.chunk"),
        transition=_transition(message.transition, f"{at}.transition"),
        seconds=_seconds(message.seconds, f"{at}.seconds"),
        keeps_kv=message.keeps_kv,
        refused=_texts(message.refused, f"{at}.refused"),
    )


def chunk_reports_to_proto(reports: Iterable[ChunkReport]) -> pb.ChunkReports:
    """A batch, in order."""
    return pb.ChunkReports(reports=[_report_to_proto(report) for report in reports])


def chunk_report_from_proto(message: pb.ChunkReport) -> ChunkReport:
    """Raises: FieldError: a number is not finite, negative or absurd, or a name is."""
    at = "chunk_report"
    for name in _REPORT_COUNTS:
        checked_count(getattr(message, name), f"{at}.{name}")
    for name in _MEMORY_FIELDS:
        checked_count(getattr(message.memory, name), f"{at}.memory.{name}")
    for name in ("session_id", "service_class", "setting_id"):
        if not checked_text(getattr(message, name), f"{at}.{name}"):
            raise FieldError(f"{at}.{name}", "is empty", code="rpc.empty")
    if len(message.denoise_s) > MAX_STEPS:
        raise FieldError(f"{at}.denoise_s", f"has {len(message.denoise_s)} entries, more than {MAX_STEPS}")
    noise = message.kv_signal_to_noise_db if message.HasField("kv_signal_to_noise_db") else None
    if noise is not None and not math.isfinite(noise):
        raise FieldError(f"{at}.kv_signal_to_noise_db", f"{noise} is not finite", code="telemetry.number")
    return ChunkReport(
        **{name: getattr(message, name) for name in ("session_id", "service_class", "setting_id")},
        **{name: getattr(message, name) for name in (*_REPORT_COUNTS, *_REPORT_NUMBERS)},
        denoise_s=tuple(message.denoise_s),
        memory=MemorySplit(**{name: getattr(message.memory, name) for name in _MEMORY_FIELDS}),
        kv_signal_to_noise_db=noise,
        has_nan=message.has_nan,
    )


def _report_to_proto(report: ChunkReport) -> pb.ChunkReport:
    return pb.ChunkReport(
        **{name: getattr(report, name) for name in ("session_id", "service_class", "setting_id")},
        **{name: getattr(report, name) for name in (*_REPORT_COUNTS, *_REPORT_NUMBERS)},
        denoise_s=report.denoise_s,
        memory=pb.MemorySplit(**{name: getattr(report.memory, name) for name in _MEMORY_FIELDS}),
        kv_signal_to_noise_db=report.kv_signal_to_noise_db,
        has_nan=report.has_nan,
    )


def _transition(text: str, field: str) -> Transition:
    found = Transition.__members__.get(text.upper())
    if found is None or text != text.lower():
        allowed = ", ".join(name.lower() for name in Transition.__members__)
        raise FieldError(field, f"{text!r} is unknown", hint=f"one of {allowed}", code="rpc.enum")
    return found


def _seconds(value: float, field: str) -> float:
    if not 0 <= value <= MAX_SECONDS:
        raise FieldError(field, f"{value} is not in 0..{MAX_SECONDS:g}", code="rpc.number")
    return value


def _bounded(entries: Mapping[str, object], field: str) -> None:
    if len(entries) > MAX_ENTRIES:
        raise FieldError(field, f"has {len(entries)} entries, more than {MAX_ENTRIES}", code="rpc.number")


def _texts(entries: Mapping[str, str], field: str) -> dict[str, str]:
    _bounded(entries, field)
    return {
        checked_text(name, field): checked_text(text, f"{field}[{name!r}]", MAX_TEXT_CHARACTERS)
        for name, text in entries.items()
    }
