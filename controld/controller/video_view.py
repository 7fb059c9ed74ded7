"""What a video engine's decision is made from: what is owed, what is known of the engine, how eagerly it is turned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from controld.contract.configuration import Configuration
from controld.contract.video import EngineFacts, Transition
from controld.controller.guard import PinBoard
from controld.controller.knobs.video import Corrections


class VideoObjective(StrEnum):
    """What decides among the settings that pass."""

    QUALITY = "quality"
    LATENCY = "latency"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoGoal:
    """What the sessions of one class are owed; None: no such target.

    Args:
        sessions: open ones; a goal without any says what is wanted of the first.
        max_quality_loss: settings whose loss's upper bound is above it are out.
        fps, fps_denoise, first_frame_s, memory_bytes, percentile: as in `policy.model.VideoTargets`.
        only_setting: the one setting that the class takes; None: any.
    """

    service_class: str
    sessions: int = 1
    max_quality_loss: float = 0.0
    objective: VideoObjective = VideoObjective.QUALITY
    fps: float | None = None
    fps_denoise: float | None = None
    first_frame_s: float | None = None
    memory_bytes: float | None = None
    percentile: float = 90.0
    only_setting: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Steering:
    """How eagerly an engine is turned.

    Args:
        horizon_s: a gain counts for so long.
        dwell_s: a setting that passes stays at least so long.
        margin: by so much better than the target must a setting look before it is taken in place of one that passes.
        tie: losses that differ by less than this part of the limit are alike when settings are ranked; a setting that
            passes is not left for one whose loss is lower by less than their standard errors.
        least_gain, least_speed: a setting that passes is left for no less than this part of the limit in loss (or of
            what else the objective wants), or, where quality is wanted and alike, of the chunk's time.
        least_relief: where nothing passes, by so much of the target less must another setting miss it.
    """

    horizon_s: float = 60.0
    dwell_s: float = 10.0
    margin: float = 0.03
    tie: float = 0.02
    least_gain: float = 0.03
    least_speed: float = 0.25
    least_relief: float = 0.1


USUAL_SECONDS: Mapping[Transition, float] = {
    Transition.NONE: 0.0,
    Transition.CHUNK: 0.0,
    Transition.NEXT_CALL: 1.0,
    Transition.KV_REBUILD: 1.0,
    Transition.RELOAD: 20.0,
    Transition.RESTART: 60.0,
}
"""What a change takes before the engine showed it."""

USUAL_WINDOW_CHUNKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """What is known of one engine.

    Args:
        in_force: the configuration it runs under; None: not known.
        in_force_s: for how long.
        facts: what it said of itself; None: then every change is taken to be a reload.
        offered: ids of the settings of its space; None: not known, and all are taken to be offered.
        memory_limit_bytes: what it may use now; 0: it knows of no limit.
        corrections: by setting.
        memory_factors: by setting, what its profile's memory is to be multiplied by; what is missing is 1.
        switch_seconds: what changes took, by how far they reached; what is missing is as usual.
        keeps_kv: whether changes kept history, by how far they reached; what is missing: those beyond a call do not.
        pins: settings out of use.
        motion: least part of the reference setting's motion; None: any.
    """

    in_force: Configuration | None = None
    in_force_s: float = math.inf
    facts: EngineFacts | None = None
    offered: frozenset[str] | None = None
    memory_limit_bytes: int = 0
    corrections: Mapping[str, Corrections] = field(default_factory=dict)
    memory_factors: Mapping[str, float] = field(default_factory=dict)
    switch_seconds: Mapping[Transition, float] = field(default_factory=dict)
    keeps_kv: Mapping[Transition, bool] = field(default_factory=dict)
    pins: PinBoard = field(default_factory=PinBoard)
    motion: float | None = None
