"""Cost model of a video engine: what a chunk takes under a setting.

A chunk of S denoising steps takes S + 1 forward passes, for one more writes its clean keys and values. Decoding runs
beside the next chunk's passes where it is asynchronous, so a chunk then takes max(DiT, VAE), else DiT + VAE. Sessions
take turns: each gets the engine's frames divided by their number. Memory is weights + a KV window a session +
activations. (LongLive-2.0, arXiv 2605.18739, tables 3: 32/29.7 s for five passes and 32/45.7 s for three agree within
8 % on one pass.)

Each stage of each setting has a posterior of log(observed / predicted), as a transfer's stages have; the whole chunk
has one of its own, for what overlaps on paper shares a machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

from controld.candidates.video_profile import VideoProfile
from controld.contract.video import ChunkReport
from controld.controller.posterior import StageCorrection, StagePrior

ASYNCHRONOUS = frozenset({"async", "pipeline"})
AT_THE_END = "batch"
"""This mode decodes nothing before the clip is whole."""


class VideoStage(StrEnum):
    """What is corrected by chunk reports."""

    FORWARD = "forward"
    VAE = "vae"
    CHUNK = "chunk"


LOCAL_PRIORS = {
    VideoStage.FORWARD: StagePrior(0.10**2, 0.10**2),
    VideoStage.VAE: StagePrior(0.10**2, 0.15**2),
    VideoStage.CHUNK: StagePrior(0.10**2, 0.10**2),
}
"""Measured on this hardware."""

FOREIGN_PRIORS = {
    **LOCAL_PRIORS,
    VideoStage.FORWARD: StagePrior(0.5**2, 0.10**2),
    VideoStage.VAE: StagePrior(0.5**2, 0.15**2),
}
"""Measured elsewhere, or published: right within a factor of 1.6, two times in three."""

EXACT = StageCorrection(0.0, 0.0, 0.0, 0.0)
"""Taken as it stands: nothing learned, no scatter."""

Corrections = Mapping[VideoStage, StageCorrection]


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoPrediction:
    """What an engine would do under a setting, with so many sessions.

    Args:
        dit_s, vae_s, chunk_s: of one chunk, posterior means.
        slow_chunk_s: the percentile of chunks that the targets name takes no longer.
        fps_denoise: of the denoising loop alone, the whole engine's, at that percentile.
        fps_end_to_end: of each session, decoding included, at that percentile.
        first_frame_s: from opening a session beside the others to its first frame; infinite where it comes with the
            last.
        memory_bytes: None: not known.
    """

    dit_s: float
    vae_s: float
    chunk_s: float
    slow_chunk_s: float
    fps_denoise: float
    fps_end_to_end: float
    first_frame_s: float
    memory_bytes: int | None


def predict(
    profile: VideoProfile,
    *,
    sessions: int = 1,
    percentile: float = 50.0,
    corrections: Corrections | None = None,
    memory_factor: float = 1.0,
) -> VideoPrediction:
    """What a setting costs.

    Args:
        sessions: that take turns, at least 1.
        percentile: of chunks, in (0, 100).
        corrections: by stage; a stage that is missing is exact.
        memory_factor: by what chunks showed its memory to be above the profile's.
    """
    learned = {stage: (corrections or {}).get(stage, EXACT) for stage in VideoStage}
    dit_s = learned[VideoStage.FORWARD].factor * profile.forward_s * (profile.steps + 1)
    vae_s = learned[VideoStage.VAE].factor * profile.vae_s
    chunk_s = _whole_chunk(profile, dit_s, vae_s, learned[VideoStage.CHUNK].factor)
    z = NormalDist().inv_cdf(percentile / 100)
    slow_dit = math.exp(z * _spread(learned[VideoStage.FORWARD]))
    # The chunk's own scatter was observed with that of its stages in it; of theirs only what is not known yet adds.
    slow = math.exp(z * math.sqrt(_spread(learned[VideoStage.CHUNK]) ** 2 + learned[VideoStage.FORWARD].variance))
    slow_chunk_s = chunk_s * slow
    mode = profile.configuration.get("vae")
    waits_s = slow_chunk_s if sessions > 1 else 0.0
    return VideoPrediction(
        dit_s=dit_s,
        vae_s=vae_s,
        chunk_s=chunk_s,
        slow_chunk_s=slow_chunk_s,
        fps_denoise=_rate(profile.frames_per_chunk, dit_s * slow_dit),
        fps_end_to_end=_rate(profile.frames_per_chunk, slow_chunk_s * sessions),
        first_frame_s=math.inf if mode == AT_THE_END else waits_s + (dit_s + vae_s) * slow,
        memory_bytes=None if profile.memory is None else round(profile.memory.total(sessions) * memory_factor),
    )


def _whole_chunk(profile: VideoProfile, dit_s: float, vae_s: float, factor: float) -> float:
    """Seconds of a chunk, decoding included, where `factor` is what the chunk stage learned."""
    if profile.configuration.get("vae") == AT_THE_END:
        # What the stage learns of is chunks without decoding.
        return factor * dit_s + vae_s
    return factor * _together(profile, dit_s, vae_s)


def _together(profile: VideoProfile, dit_s: float, vae_s: float) -> float:
    """Seconds that a chunk's report counts, from those of its two parts."""
    mode = profile.configuration.get("vae")
    if mode == AT_THE_END:
        return dit_s
    return max(dit_s, vae_s) if mode in ASYNCHRONOUS else dit_s + vae_s


def _spread(correction: StageCorrection) -> float:
    return math.sqrt(correction.variance + correction.noise_variance)


def _rate(frames: int, seconds: float) -> float:
    return frames / seconds if seconds > 0 else math.inf


def log_ratios(profile: VideoProfile, report: ChunkReport, corrections: Corrections) -> dict[VideoStage, float]:
    """What one chunk says of each stage: log(observed / predicted); a stage that it says nothing of is absent.

    The chunk's ratio is taken to what its own stages took, so that it learns the overlap and the rest alone; what is
    still being decoded counts with what is known of it. A report may bring the frames of several chunks, after a mode
    that decoded nothing or where the decoder was behind: decoding is then taken by the chunk, and the whole says
    nothing of how the two parts of one chunk lie beside each other.
    """
    passes = len(report.denoise_s) + 1
    decoded = max(1, round(report.frames / profile.frames_per_chunk))
    vae_s = report.vae_s or corrections.get(VideoStage.VAE, EXACT).factor * profile.vae_s
    pairs = {
        VideoStage.FORWARD: (report.dit_s / passes, profile.forward_s),
        VideoStage.VAE: (report.vae_s / decoded, profile.vae_s),
    }
    decodes_late = profile.configuration.get("vae") == AT_THE_END and report.vae_s > 0
    if decoded == 1 and not decodes_late:
        pairs[VideoStage.CHUNK] = (report.total_s, _together(profile, report.dit_s, vae_s))
    return {
        stage: math.log(observed / predicted)
        for stage, (observed, predicted) in pairs.items()
        if observed > 0 and predicted > 0
    }
