"""Arms and settings out of use, as the admin API shows them and lets them come back."""

from __future__ import annotations

import math
from collections.abc import Iterator

from controld.admin.backend import Json
from controld.admin.problem import NotFoundError
from controld.contract.clock import Clock
from controld.controller.guard import EVERY_CLASS, Pin
from controld.fleet.published import Selector
from controld.planning.planner import Planner
from controld.planning.video_engines import EngineKey
from controld.planning.video_planner import VideoPlanner


class Pins:
    """Of both planners.

    Args:
        planner, video, clock: the running parts that are asked.
    """

    def __init__(self, planner: Planner, video: VideoPlanner | None, clock: Clock) -> None:
        self._planner = planner
        self._video = video
        self._clock = clock

    def to_documents(self) -> list[Json]:
        """Arms out of use, and why; without an end where only a person or a new profile ends it."""
        of_engines = [
            {**_pin_document(selector, "video", pin), "agent_id": agent_id}
            for (selector, agent_id), pin in self._of_settings()
        ]
        return [_pin_document(*found) for found in self._of_arms()] + of_engines

    async def release(self, arm_id: str, deployment: str | None) -> Json:
        """A person's word that it may be used again; raises `NotFoundError` where it is not out of use."""
        released = [
            _released_document(selector, pin) for selector, pin in await self._planner.release(arm_id, deployment)
        ]
        if self._video is not None:
            released += [
                {**_released_document(selector, pin), "agent_id": agent_id}
                for (selector, agent_id), pin in await self._video.release(arm_id, deployment)
            ]
        if not released:
            raise NotFoundError(f"no arm {arm_id} is out of use", hint="GET /v1/pins lists those that are")
        return {"arm_id": arm_id, "released": released}

    def alarms(self) -> list[Json]:
        """One for each."""
        return [
            {
                "where": f"{selector.kind}/{selector.deployment}",
                "what": f"{pin.arm_id} is out of use"
                + ("" if pin.service_class == EVERY_CLASS else f" for class {pin.service_class}")
                + f": {pin.reason}",
            }
            for selector, _, pin in self._of_arms()
        ] + [
            {
                "where": f"{key[0].kind}/{key[0].deployment}/{key[1]}",
                "what": f"{pin.arm_id} is out of use: {pin.reason}",
            }
            for key, pin in self._of_settings()
        ]

    def _of_arms(self) -> Iterator[tuple[Selector, str, Pin]]:
        now_unix_s = self._clock.unix_s()
        for selector, lessons in self._planner.learning.lessons.items():
            for (tier, _), learner in lessons.learners.items():
                for pin in learner.pins(now_unix_s).pins:
                    yield selector, tier, pin

    def _of_settings(self) -> list[tuple[EngineKey, Pin]]:
        return self._video.pins() if self._video is not None else []


def _pin_document(selector: Selector, tier: str, pin: Pin) -> Json:
    return {
        "kind": selector.kind,
        "deployment": selector.deployment,
        "tier": tier,
        "arm_id": pin.arm_id,
        "service_class": pin.service_class,
        "reason": pin.reason,
        "since_unix_s": pin.since_unix_s,
        "until_unix_s": pin.until_unix_s if math.isfinite(pin.until_unix_s) else None,
    }


def _released_document(selector: Selector, pin: Pin) -> Json:
    return {
        "kind": selector.kind,
        "deployment": selector.deployment,
        "service_class": pin.service_class,
        "reason": pin.reason,
    }
