"""Memory of a video engine's settings as chunks show it, against what their profiles say. Pure.

A profile's memory may be of another driver or another clip. Where it says too little, a limit that it seems to keep is
broken for as long as the setting runs. Unlike times, memory is not scattered about its mean: it grows until windows are
full. So what is above the profile counts at once, and what is below says little: it pulls what was seen down by a
fiftieth a chunk. What nothing refreshes halves in a day, so that a setting is tried again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from controld.candidates.video_profile import VideoProfile
from controld.contract.errors import FieldError
from controld.contract.video import ChunkReport

MAX_FACTOR = 4.0
"""No report makes a setting need more than this times its profile: one that is absurd must not take it out for ever."""

HALF_LIFE_S = 86_400.0
_EASE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryExcess:
    """By how much a setting needs more than its profile says.

    Args:
        log_factor: log(measured / profile's), in 0..log(MAX_FACTOR).
        profile_bytes: the profile's for one session; another profile has an excess of its own.
        at_unix_s: when it was last seen.
    """

    log_factor: float
    profile_bytes: int
    at_unix_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.log_factor <= math.log(MAX_FACTOR) or not math.isfinite(self.at_unix_s):
            raise FieldError("memory_excess", f"{self.log_factor} at {self.at_unix_s} is out of range")

    def log_factor_at(self, now_unix_s: float) -> float:
        """What is left of it; a clock that was set back changes nothing."""
        age_s = max(now_unix_s - self.at_unix_s, 0.0)
        return self.log_factor * math.exp2(-age_s / HALF_LIFE_S)


def observe_memory(
    before: MemoryExcess | None, profile: VideoProfile, report: ChunkReport, now_unix_s: float
) -> MemoryExcess | None:
    """What is known after a chunk; `before` where the report or the profile says nothing of memory."""
    held = report.memory.weights_bytes + report.memory.kv_bytes + report.memory.activation_bytes
    if profile.memory is None or not held or not report.sessions:
        return before
    expected = profile.memory.total(report.sessions)
    seen = min(max(math.log(held / max(expected, 1)), 0.0), math.log(MAX_FACTOR))
    base = profile.memory.total(1)
    known = before.log_factor_at(now_unix_s) if before is not None and before.profile_bytes == base else 0.0
    eased = known + _EASE * (seen - known)
    return MemoryExcess(log_factor=max(seen, eased), profile_bytes=base, at_unix_s=now_unix_s)


def memory_factor(excess: MemoryExcess | None, profile: VideoProfile, now_unix_s: float) -> float | None:
    """By what a profile's memory is to be multiplied, at least 1; None: nothing was seen of it."""
    if excess is None or profile.memory is None or excess.profile_bytes != profile.memory.total(1):
        return None
    return math.exp(excess.log_factor_at(now_unix_s))
