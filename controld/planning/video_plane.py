"""A video engine as planning sees it: what it serves, and which settings it has profiles of. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from controld.candidates.video_profile import VideoProfile
from controld.contract.configuration import Configuration
from controld.contract.decision import DEFAULT_CLASS
from controld.contract.errors import ControldError
from controld.contract.space import StrategySpace
from controld.controller.video_view import VideoGoal, VideoObjective
from controld.fleet.identity import AgentIdentity
from controld.policy.model import Policy, ServiceClass, VideoTargets

ENGINE_ROLE = "engine"


def video_goals(policy: Policy, sessions: Mapping[str, int]) -> list[VideoGoal]:
    """What the open sessions are owed; where none is open, what the first class with targets would be.

    A class that the policy does not know is `default`.
    """
    counts: dict[str, int] = {}
    for name, count in sessions.items():
        known = name if policy.service_class(name) is not None else DEFAULT_CLASS
        if count:
            counts[known] = counts.get(known, 0) + count
    if not counts:
        first = next((c for c in policy.classes if c.video is not None), policy.classes[0])
        counts = {first.name: 1}
    return [_goal(each, counts[each.name]) for each in policy.classes if each.name in counts]


def served_workloads(policy: Policy, sessions: Mapping[str, int]) -> list[str]:
    """Those of the classes that `video_goals` names."""
    served = {goal.service_class for goal in video_goals(policy, sessions)}
    return sorted({each.workload for each in policy.classes if each.name in served})


def _goal(service_class: ServiceClass, sessions: int) -> VideoGoal:
    targets = service_class.video or VideoTargets()
    return VideoGoal(
        service_class=service_class.name,
        sessions=sessions,
        max_quality_loss=service_class.max_quality_loss,
        objective=VideoObjective(service_class.objective.value),
        fps=targets.fps,
        fps_denoise=targets.fps_denoise,
        first_frame_s=targets.first_frame_s,
        memory_bytes=targets.memory_bytes,
        percentile=targets.percentile,
        only_setting=service_class.pin,
    )


def engine_profiles(
    profiles: Iterable[VideoProfile], identity: AgentIdentity, workloads: Iterable[str]
) -> list[VideoProfile]:
    """One profile for each setting that was measured with this model on every one of the workloads.

    Of several the one from this hardware, else the newest; of several workloads that on which it loses most.
    """
    wanted = sorted(set(workloads))
    best: dict[tuple[str, str], VideoProfile] = {}
    for profile in profiles:
        if profile.model_fingerprint != identity.model_fingerprint or profile.workload not in wanted:
            continue
        key = (profile.setting_id, profile.workload)
        kept = best.get(key)
        if kept is None or _preference(profile, identity) > _preference(kept, identity):
            best[key] = profile
    settings = sorted({setting_id for setting_id, _ in best})
    return [
        max((best[setting_id, workload] for workload in wanted), key=lambda profile: profile.loss_upper)
        for setting_id in settings
        if all((setting_id, workload) in best for workload in wanted)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """The profiles that fit an engine and what it serves.

    Args:
        profiles: one for each setting.
        by_setting: the same by id.
        offered: ids of those settings that the engine offers.
    """

    profiles: tuple[VideoProfile, ...]
    by_setting: Mapping[str, VideoProfile]
    offered: frozenset[str]


def fitting_of(profiles: Iterable[VideoProfile], identity: AgentIdentity, workloads: Iterable[str]) -> Fitting:
    """What `engine_profiles` and `offered_settings` say; with thousands of profiles it takes a while."""
    found = engine_profiles(profiles, identity, workloads)
    return Fitting(
        profiles=tuple(found),
        by_setting={profile.setting_id: profile for profile in found},
        offered=offered_settings(identity.space_json, found),
    )


def _preference(profile: VideoProfile, identity: AgentIdentity) -> tuple[bool, float]:
    return profile.hardware == identity.hardware, profile.measured_unix_s


def offered_settings(space_json: str, profiles: Sequence[VideoProfile]) -> frozenset[str]:
    """Ids of the profiles' settings that are points of an engine's space; none where the space cannot be read."""
    try:
        space = StrategySpace.from_json(space_json)
    except ControldError:
        return frozenset()
    return frozenset(profile.setting_id for profile in profiles if _is_in(space, profile.configuration))


def is_of_space(space_json: str, configuration: Configuration) -> bool:
    """Whether a setting is a point of an engine's space; none is where the space cannot be read."""
    try:
        return _is_in(StrategySpace.from_json(space_json), configuration)
    except ControldError:
        return False


def _is_in(space: StrategySpace, configuration: Configuration) -> bool:
    try:
        space.validate(configuration)
    except ControldError:
        return False
    return True
