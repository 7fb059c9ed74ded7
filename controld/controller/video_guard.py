"""The guard of video quality: latents that drift away, and motion that a setting lost. Pure.

A chunk report has the latents' drift from the sink's and the mean difference of neighbouring frames. Neighbouring
chunks are alike, so evidence is taken from their discounted mean with a standard error that counts every fourth chunk.
What a clip shows moves the difference of frames as well: it is compared with what the setting's own profile showed of
the workload, so served clips should be like those of the workload. (LongLive-2.0's published dynamic degree falls from
60.6 to 45.9 under NVFP4.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from controld.candidates.video_profile import VideoProfile
from controld.contract.video import ChunkReport

LEAST_CHUNKS = 16
DISCOUNT = 0.97
CHUNKS_PER_SAMPLE = 4.0
PINNED_S = 600.0
"""So long a setting stays out; then it is tried again, for clips change."""

_Z = 1.645
_LEAST_MOTION = 1e-9
_MOST_TIMES = 10.0
_MOST_DRIFT = 100.0
_LEAST_FRAMES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A discounted mean with its standard error."""

    weight: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> Running:
        """With one value more."""
        weight = DISCOUNT * self.weight + 1.0
        step = value - self.mean
        mean = self.mean + step / weight
        squares = DISCOUNT * self.squares + step * (value - mean)
        return Running(weight=weight, mean=mean, squares=squares)

    @property
    def standard_error(self) -> float:
        """Of the mean; infinite below two samples."""
        samples = self.weight / CHUNKS_PER_SAMPLE
        return math.sqrt(self.squares / self.weight / samples) if samples >= 2 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingEvidence:
    """What chunks under one setting showed."""

    chunks: int = 0
    drift: Running = Running()
    log_motion: Running = Running()
    moving: int = 0
    """Of the chunks, those that brought frames enough to tell motion from."""

    def observe(self, report: ChunkReport) -> SettingEvidence:
        """With one chunk more; one that is not finite says nothing of either, one without frames nothing of motion."""
        if report.has_nan:
            return self
        # One absurd chunk must not make the mean so uncertain that what follows goes unseen.
        most = max(_MOST_TIMES * self.drift.mean, _MOST_DRIFT)
        drifted = replace(self, chunks=self.chunks + 1, drift=self.drift.add(min(report.drift, most)))
        if not shows_motion(report):
            return drifted
        motion = math.log(max(report.flicker, _LEAST_MOTION))
        return replace(drifted, moving=self.moving + 1, log_motion=self.log_motion.add(motion))


def shows_motion(report: ChunkReport) -> bool:
    """Whether its flicker says anything: frames of a chunk may all come later, with another chunk or the clip's end."""
    return report.frames >= _LEAST_FRAMES


def breach(
    evidence: SettingEvidence, profile: VideoProfile | None, *, drift: float | None, motion: float | None
) -> str:
    """Why the setting should go out of use; empty where it should not.

    Args:
        profile: of the setting; without its motion, motion is not judged.
        drift: most that is allowed, in the sink's deviations; None: any.
        motion: least part of the profile's motion; None: any.
    """
    if evidence.chunks < LEAST_CHUNKS:
        return ""
    found = evidence.drift.mean
    if drift is not None and found - _Z * evidence.drift.standard_error > drift:
        return f"latents drift by {found:.2f} of the sink's deviation over {evidence.chunks} chunks, above {drift:g}"
    if motion is None or profile is None or not profile.motion or evidence.moving < LEAST_CHUNKS:
        return ""
    # The median clip moves like the profile's; a mean of logs is not swayed by one wild scene.
    kept_log = evidence.log_motion.mean - math.log(profile.motion)
    if kept_log + _Z * evidence.log_motion.standard_error < math.log(motion):
        kept = math.exp(kept_log)
        return f"frames move {kept:.0%} of what its profile says over {evidence.moving} chunks, below {motion:.0%}"
    return ""
