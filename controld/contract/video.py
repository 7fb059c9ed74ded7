"""What controld and a video engine say to each other: how far a change reaches, what came of it, each chunk's report.

A video engine makes a clip chunk by chunk: some denoising steps and one more forward pass that writes the chunk's clean
keys and values, then the decoder turns latents into frames. A setting is a `Configuration` of the engine's space and
takes effect between chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum

from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError


class Transition(IntEnum):
    """How far a change of setting reaches, the mildest first; of several the greatest counts."""

    NONE = 0
    CHUNK = 1
    """Takes effect at the next chunk."""
    NEXT_CALL = 2
    """Takes effect when the engine's generating call ends and the next one begins; the session goes on."""
    KV_REBUILD = 3
    """The KV cache is made anew: history is lost or computed again."""
    RELOAD = 4
    """Weights are loaded again in the same process."""
    RESTART = 5
    """The worker process (or all ranks) starts again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetting:
    """The one setting that an engine should run under, with one line of why."""

    configuration: Configuration
    reason: str = ""

    @property
    def setting_id(self) -> str:
        """Id of the configuration."""
        return self.configuration.config_id


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine says of itself once, and controld plans with.

    Args:
        engine: "reference" or "longlive".
        transitions: by parameter, how far a change of it reaches.
        chunk_latents: latent frames of a chunk; windows and sinks are multiples of it.
        frames_per_chunk: pixel frames of a chunk but the first.
        sessions: how many may be open at a time.
        backends: linear back ends with what they are offered for, "speed" or "memory".
        left_out: `parameter=value` that is not offered, with the reason.
    """

    engine: str
    transitions: Mapping[str, Transition]
    chunk_latents: int
    frames_per_chunk: int
    sessions: int
    backends: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("chunk_latents", "frames_per_chunk", "sessions"):
            if getattr(self, name) < 1:
                raise FieldError(f"engine_facts.{name}", f"{getattr(self, name)} is below 1")

    def reach(self, current: Mapping[str, object], wanted: Mapping[str, object]) -> Transition:
        """How far a change of setting reaches; a parameter without an entry is taken to need a reload."""
        changed = (name for name in {*current, *wanted} if current.get(name) != wanted.get(name))
        return max((self.transitions.get(name, Transition.RELOAD) for name in changed), default=Transition.NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What an engine says of itself with every telemetry.

    Args:
        setting_id: in force now.
        setting_version: of the snapshot that brought it; 0: none did, it is what the engine was started with.
        chunk: the next one, counted over the engine's life.
        sessions: open ones by service class.
        memory_limit_bytes: what the engine may use now; 0: it knows of no limit.
    """

    setting_id: str
    setting_version: int = 0
    chunk: int = 0
    sessions: Mapping[str, int] = field(default_factory=dict)
    memory_limit_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionPlan:
    """What a change of setting would take.

    Args:
        transition: how far it reaches.
        seconds: until the engine works under the new setting, waiting for the safe point not included.
        peak_bytes: device memory while changing, at its highest.
        keeps_kv: whether sessions keep their history.
        is_measured: `seconds` is what such a change took before; else it is an estimate.
    """

    transition: Transition
    seconds: float
    peak_bytes: int
    keeps_kv: bool
    is_measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What came of a setting that was pushed.

    Args:
        version: of the snapshot that brought it.
        setting_id: id of the configuration that is in force now.
        chunk: the first chunk (counted over the engine's life) that runs under it.
        transition: how far the change reached.
        seconds: what the change took.
        keeps_kv: whether sessions kept their history.
        refused: why single parameters, by name, were not taken; empty: all were.
    """

    version: int
    setting_id: str
    chunk: int
    transition: Transition
    seconds: float
    keeps_kv: bool
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySplit:
    """Device memory in bytes. On a CPU: the tensors that the engine holds, by what they are for."""

    weights_bytes: int = 0
    kv_bytes: int = 0
    activation_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReport:
    """One chunk of one session. Seconds are measured on the engine's own machine, never modelled.

    Args:
        chunk: counted over the engine's life; `session_chunk` within the session.
        frames: pixel frames that came out.
        denoise_s: one for each denoising step.
        recache_s: the forward pass that writes clean keys and values.
        vae_s: decoding of the chunk, 0 while it is still under way (its time is in a later report).
        vae_overlap: part of `vae_s` that ran beside denoising, in [0, 1].
        total_s: from the chunk's begin to its frames being ready (or handed to the decoder's queue).
        first_frame_s: from opening the session to its first frame; 0 but in the report that has it.
        fps_denoise: frames / (denoising and recache). The published frame rates are of this kind.
        fps_end_to_end: frames per second of wall time, decoding included, over the last chunks.
        communication_bytes: sent by this rank to others.
        kv_signal_to_noise_db: of the quantised cache against what was written; None where it is not quantised.
        latent_sd: standard deviation of the chunk's latents.
        drift: distance of the latents' per-channel mean and deviation from the sink's, in the sink's deviations.
        flicker: mean absolute difference of neighbouring frames, pixels in [0, 1].
        has_nan: a latent or a frame is not finite.
        sessions: that the engine held meanwhile, which is what `memory` is of; 0: not told.
    """

    session_id: str
    service_class: str
    setting_id: str
    chunk: int
    session_chunk: int
    frames: int
    denoise_s: tuple[float, ...]
    recache_s: float
    vae_s: float
    vae_overlap: float
    total_s: float
    first_frame_s: float
    fps_denoise: float
    fps_end_to_end: float
    memory: MemorySplit
    communication_bytes: int = 0
    kv_signal_to_noise_db: float | None = None
    latent_sd: float = 0.0
    drift: float = 0.0
    flicker: float = 0.0
    has_nan: bool = False
    sessions: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, float):
                    _check_number(item.name, number)

    @property
    def dit_s(self) -> float:
        """Seconds of all forward passes of the chunk."""
        return math.fsum(self.denoise_s) + self.recache_s


def _check_number(name: str, number: float) -> None:
    """What an engine reports is learned from, so one that no engine can have measured is refused."""
    field = f"chunk_report.{name}"
    if name == "kv_signal_to_noise_db":
        low, high = -_MOST["kv_signal_to_noise_db"], _MOST["kv_signal_to_noise_db"]
    else:
        low, high = 0.0, _MOST[name]
    if not math.isfinite(number):
        raise FieldError(field, f"{number} is not finite", code="telemetry.number")
    if not low <= number <= high:
        raise FieldError(field, f"{number:g} is not in {low:g}..{high:g}", code="telemetry.number")
    if name in _SECONDS and 0 < number < LEAST_SECONDS:
        raise FieldError(field, f"{number:g} s is less than any clock shows", code="telemetry.number")


MAX_SECONDS = 86_400.0
MAX_DRIFT = 1e4
"""An engine reports no more: latents that far away are no picture any more."""

LEAST_SECONDS = 1e-6
_SECONDS = frozenset({"denoise_s", "recache_s", "vae_s", "total_s", "first_frame_s"})
_MOST = {
    **dict.fromkeys(_SECONDS, MAX_SECONDS),
    "vae_overlap": 1.0,
    "fps_denoise": 1e12,
    "fps_end_to_end": 1e12,
    "kv_signal_to_noise_db": 1e3,
    "latent_sd": 1e6,
    "drift": MAX_DRIFT,
    "flicker": 1.0,
}


def engine_setting_name(agent_id: str) -> str:
    """The name under which an agent gets its engine's setting."""
    return f"engine_setting/{agent_id}"
