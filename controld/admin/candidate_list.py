"""Profiles as the admin API lists them: each document with what follows from it, and its mark on the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from controld.admin.backend import Json
from controld.candidates.distill import pareto_front
from controld.candidates.profile import Profile
from controld.candidates.stored import ProfileKind
from controld.candidates.video_profile import VideoProfile
from controld.controller.video_front import seconds_per_frame, session_memory_bytes, video_front

_Profile = TypeVar("_Profile", Profile, VideoProfile)


def kv_entries(profiles: Sequence[Profile]) -> list[Json]:
    """KV profiles; the front is that of a model, workload and pair of machines."""
    # What was imported without a loss would beat everything that has one.
    measured = (profile for profile in profiles if profile.loss_samples)
    front = _on_front(measured, _kv_place, pareto_front)
    return [
        {
            **profile.to_document(),
            "kind": ProfileKind.KV,
            "config_id": profile.arm_id,
            "lossy_id": profile.configuration.lossy_id,
            "latency_s_per_byte": profile.latency_objective,
            "bytes_objective": profile.bytes_objective,
            "pareto": id(profile) in front,
        }
        for profile in profiles
    ]


def video_entries(profiles: Sequence[VideoProfile]) -> list[Json]:
    """Video profiles; the front is that of a model, workload and machine. What is not known is null."""
    front = _on_front(profiles, _video_place, video_front)
    return [
        {
            **profile.to_document(),
            "kind": ProfileKind.VIDEO,
            "config_id": profile.setting_id,
            "loss_upper": profile.loss_upper if math.isfinite(profile.loss_upper) else None,
            "seconds_per_frame": seconds_per_frame(profile),
            "memory_bytes": session_memory_bytes(profile),
            "pareto": id(profile) in front,
        }
        for profile in profiles
    ]


def _on_front(
    profiles: Iterable[_Profile],
    place_of: Callable[[_Profile], Hashable],
    front_of: Callable[[Sequence[_Profile]], list[_Profile]],
) -> set[int]:
    """Identities of those on the front of their place."""
    groups: dict[Hashable, list[_Profile]] = {}
    for profile in profiles:
        groups.setdefault(place_of(profile), []).append(profile)
    return {id(profile) for group in groups.values() for profile in front_of(group)}


def _kv_place(profile: Profile) -> Hashable:
    return profile.model_fingerprint, profile.workload, profile.sender_hardware, profile.receiver_hardware


def _video_place(profile: VideoProfile) -> Hashable:
    # Losses of different sources are of different units.
    return profile.model_fingerprint, profile.workload, profile.hardware, profile.source
