"""The settings of a video engine that no other one beats: in loss, in a session's speed and in its memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from controld.candidates.pareto import non_dominated
from controld.candidates.video_profile import VideoProfile
from controld.controller.knobs.video import predict


def seconds_per_frame(profile: VideoProfile) -> float:
    """Seconds of a frame with decoding, for one session alone, as the cost model has it before it learned anything."""
    return predict(profile).chunk_s / profile.frames_per_chunk


def session_memory_bytes(profile: VideoProfile) -> int | None:
    """Memory of an engine with one session; None: not known."""
    return None if profile.memory is None else profile.memory.total(1)


def video_objectives(profiles: Sequence[VideoProfile]) -> np.ndarray:
    """Objectives, shape [n, 3], all to be minimised: loss, seconds of a frame, bytes of one session.

    A loss below zero is chance and counts as none, as it does in decisions; one that was never measured is NaN. A
    memory that is not known is infinite.
    """
    rows = []
    for profile in profiles:
        loss = math.nan if profile.loss_mean is None else max(profile.loss_mean, 0.0)
        memory = session_memory_bytes(profile)
        rows.append((loss, seconds_per_frame(profile), math.inf if memory is None else float(memory)))
    return np.array(rows, dtype=np.float64).reshape(len(profiles), 3)


def video_front(profiles: Sequence[VideoProfile]) -> list[VideoProfile]:
    """The profiles that no other one beats in all three objectives; input order is kept.

    Args:
        profiles: of one model, workload, hardware and source: others cannot be compared.
    """
    mask = non_dominated(video_objectives(profiles))
    return [profile for profile, keep in zip(profiles, mask, strict=True) if keep]
