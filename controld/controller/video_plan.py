"""A video engine's decision as it is kept, sent to people and explained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.video import EngineSetting


class Gate(StrEnum):
    """What a setting must pass."""

    OFFERED = "offered"
    GUARD = "guard"
    ONLY = "only"
    QUALITY = "quality"
    MEMORY = "memory"
    FPS = "fps"
    FPS_DENOISE = "fps_denoise"
    FIRST_FRAME = "first_frame"
    NO_USE = "no_use"


_AT_MOST = frozenset({Gate.QUALITY, Gate.MEMORY, Gate.FIRST_FRAME})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why a setting is out, with the numbers where there are any; an infinite value is None."""

    gate: Gate
    text: str
    value: float | None = None
    limit: float | None = None

    def violation(self) -> float:
        """By how much of the target it is missed; 0 for a gate without numbers, 1 for an infinite value."""
        if self.limit is None or self.limit <= 0 or self.gate in (Gate.NO_USE, Gate.QUALITY):
            return 0.0
        if self.value is None:
            return 1.0
        return self.value / self.limit - 1.0 if self.gate in _AT_MOST else 1.0 - self.value / self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPlan:
    """One setting as it was seen.

    Args:
        source: whether its profile was measured or published.
        fps_denoise, fps_end_to_end, first_frame_s: at the targets' percentile; infinite is None.
        transition, switch_s, keeps_kv: what a change from the setting in force would take.
        rejections: every gate that it does not pass.
    """

    setting_id: str
    label: str
    configuration: Configuration
    source: str
    loss_mean: float | None
    loss_upper: float | None
    fps_denoise: float
    fps_end_to_end: float
    chunk_s: float
    first_frame_s: float | None
    memory_bytes: int | None
    transition: str
    switch_s: float
    keeps_kv: bool
    chosen: bool = False
    rejections: tuple[Rejection, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoPlan:
    """What an engine should run under.

    Args:
        setting: None: nothing may be pushed, the engine keeps what it has.
        reason: one line.
        in_force: id of the setting it was decided against; empty where that was not known.
        sessions, classes: what was to be served.
        meets_targets: whether all targets are met.
        arms: every setting that has a profile, the best first.
    """

    setting: Configuration | None
    reason: str
    in_force: str
    sessions: int
    classes: tuple[str, ...]
    meets_targets: bool
    arms: tuple[ArmPlan, ...]

    def arm(self, setting_id: str) -> ArmPlan | None:
        """A setting by id."""
        return next((arm for arm in self.arms if arm.setting_id == setting_id), None)

    @property
    def chosen(self) -> ArmPlan | None:
        """The setting that was chosen."""
        return next((arm for arm in self.arms if arm.chosen), None)

    def to_document(self) -> dict[str, Any]:
        """JSON-ready."""
        document = asdict(self)
        document["setting"] = dict(self.setting) if self.setting is not None else None
        document["setting_id"] = self.setting.config_id if self.setting is not None else None
        for arm, kept in zip(self.arms, document["arms"], strict=True):
            kept["configuration"] = dict(arm.configuration)
        return document


def plans_to_json(plans: Mapping[str, VideoPlan], settings: Mapping[str, EngineSetting]) -> str:
    """The plans of a deployment's engines, by agent, as they are kept with the version that they became.

    Args:
        settings: all that the version tells, those of engines without a plan (of an earlier process) among them.
    """
    document = {
        "kind": "video",
        "engines": {agent_id: plan.to_document() for agent_id, plan in plans.items()},
        "settings": {agent_id: setting_to_document(setting) for agent_id, setting in settings.items()},
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def settings_of_json(text: str) -> dict[str, EngineSetting]:
    """The settings by agent of what `plans_to_json` wrote. Raises: FieldError."""
    try:
        return {agent_id: setting_of_document(kept) for agent_id, kept in json.loads(text)["settings"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FieldError("video_plan", f"not the plans of video engines: {error}") from error


def setting_to_document(setting: EngineSetting) -> dict[str, Any]:
    """JSON-ready."""
    return {"configuration": dict(setting.configuration), "reason": setting.reason}


def setting_of_document(document: Mapping[str, Any]) -> EngineSetting:
    """The inverse of `setting_to_document`. Raises: FieldError, KeyError, TypeError: it is no setting."""
    return EngineSetting(configuration=Configuration(document["configuration"]), reason=str(document["reason"]))
