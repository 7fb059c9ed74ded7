"""The part of the admin API about what was learned of arms: posteriors, and arms that are out of use."""

from __future__ import annotations

import math
from collections.abc import Iterator

from controld.admin.backend import Json
from controld.admin.problem import NotFoundError
from controld.contract.clock import Clock
from controld.controller.guard import EVERY_CLASS, Pin
from controld.fleet.published import Selector
from controld.planning.planner import Planner
from controld.planning.video_planner import VideoPlanner


class Learned:
    """Implements `LearnedBackend`.

    Args:
        planner, video: who learns.
        clock: pins end.
    """

    def __init__(self, planner: Planner, video: VideoPlanner, clock: Clock) -> None:
        self._planner = planner
        self._video = video
        self._clock = clock

    async def posteriors(self) -> list[Json]:
        return self._planner.learning.to_document()

    async def pins(self) -> list[Json]:
        of_engines = [
            {**_pin_document(selector, "video", pin), "agent_id": agent_id}
            for (selector, agent_id), pin in self._video.pins()
        ]
        return [_pin_document(*found) for found in self._pins()] + of_engines

    async def release(self, arm_id: str, deployment: str | None) -> Json:
        released = [
            _released_document(selector, pin) for selector, pin in await self._planner.release(arm_id, deployment)
        ]
        released += [
            {**_released_document(selector, pin), "agent_id": agent_id}
            for (selector, agent_id), pin in await self._video.release(arm_id, deployment)
        ]
        if not released:
            raise NotFoundError(f"no arm {arm_id} is out of use", hint="GET /v1/pins lists those that are")
        return {"arm_id": arm_id, "released": released}

    def guard_rows(self) -> list[Json]:
        """What the quality guard knows of each arm."""
        return [
            {"kind": selector.kind, "deployment": selector.deployment, "tier": tier, **row}
            for selector, lessons in self._planner.learning.lessons.items()
            for (tier, _), learner in lessons.learners.items()
            for row in learner.quality.rows()
        ]

    def alarms(self) -> list[Json]:
        """An alarm for each arm that is out of use."""
        return [
            {
                "where": f"{selector.kind}/{selector.deployment}",
                "what": f"{pin.arm_id} is out of use"
                + ("" if pin.service_class == EVERY_CLASS else f" for class {pin.service_class}")
                + f": {pin.reason}",
            }
            for selector, _, pin in self._pins()
        ] + [
            {
                "where": f"{selector.kind}/{selector.deployment}/{agent_id}",
                "what": f"{pin.arm_id} is out of use: {pin.reason}",
            }
            for (selector, agent_id), pin in self._video.pins()
        ]

    def _pins(self) -> Iterator[tuple[Selector, str, Pin]]:
        now_unix_s = self._clock.unix_s()
        for selector, lessons in self._planner.learning.lessons.items():
            for (tier, _), learner in lessons.learners.items():
                for pin in learner.pins(now_unix_s).pins:
                    yield selector, tier, pin


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
