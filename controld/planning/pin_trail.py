"""Which arms are out of use, as the audit trail says it: a change is written there once, over restarts too."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from controld.controller.guard import Pin
from controld.fleet.published import Selector
from controld.obs.metrics import Metrics
from controld.policy.model import PlaneKind
from controld.store.interface import Store
from controld.store.records import AuditEvent

_log = logging.getLogger(__name__)

BY_THE_OPERATOR = "by the operator"
_RESTORED_LINES = 10_000

PinnedArm = tuple[str, str]
"""An arm's id, and the class that it is out of use for."""


def trail_line(selector: Selector, pinned: PinnedArm, reason: str, *, agent_id: str | None = None) -> str:
    """The document of an audit line; `agent_id` where it is about one agent alone."""
    arm_id, service_class = pinned
    document = {
        "kind": selector.kind, "deployment": selector.deployment, "arm_id": arm_id,
        "service_class": service_class, "reason": reason,
    }  # fmt: skip
    if agent_id is not None:
        document["agent_id"] = agent_id
    return json.dumps(document, sort_keys=True)


class PinTrail:
    """Of the arms of KV transfers.

    Args:
        store: with the audit trail.
        metrics: that show how many are out.
    """

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._written: dict[Selector, frozenset[PinnedArm]] = {}

    async def restore(self) -> None:
        """What the trail says is out of use is not written there again. Raises: StoreError."""
        lines = [
            (record.sequence, record.event, record.document)
            for event in (AuditEvent.ARM_PINNED_OFF, AuditEvent.ARM_RELEASED)
            for record in await self._store.audit.recent(_RESTORED_LINES, event)
        ]
        for _, event, text in sorted(lines):
            try:
                document = json.loads(text)
                selector = Selector(document["kind"], document["deployment"])
                pinned = str(document["arm_id"]), str(document["service_class"])
            except (ValueError, KeyError, TypeError) as error:
                _log.error("a line of the audit trail cannot be read: %s", error)
                continue
            if selector.kind != PlaneKind.LONGLIVE:  # settings of video engines are told by who keeps those
                self._believe(selector, pinned, is_out=event is AuditEvent.ARM_PINNED_OFF)

    async def note(self, selector: Selector, pins: Mapping[PinnedArm, str]) -> None:
        """Write down which arms were taken out of use, and which came back.

        Args:
            pins: all arms that are out now, each with its reason.

        Raises:
            StoreError: the rest is written down the next time.
        """
        before = self._written.get(selector, frozenset())
        for pinned in sorted(pins.keys() - before):
            _log.warning("arm out of use", extra={"arm_id": pinned[0], "class": pinned[1], "reason": pins[pinned]})
            await self._write(AuditEvent.ARM_PINNED_OFF, selector, pinned, pins[pinned])
        for pinned in sorted(before - pins.keys()):
            await self._write(AuditEvent.ARM_RELEASED, selector, pinned, "")
        self._metrics.arms_out.labels(selector.kind, selector.deployment).set(len(pins))

    async def released(self, selector: Selector, pin: Pin) -> None:
        """A person let an arm come back. Raises: StoreError."""
        await self._write(AuditEvent.ARM_RELEASED, selector, (pin.arm_id, pin.service_class), BY_THE_OPERATOR)

    async def _write(self, event: AuditEvent, selector: Selector, pinned: PinnedArm, reason: str) -> None:
        await self._store.audit.append(event, trail_line(selector, pinned, reason))
        self._believe(selector, pinned, is_out=event is AuditEvent.ARM_PINNED_OFF)

    def _believe(self, selector: Selector, pinned: PinnedArm, *, is_out: bool) -> None:
        known = self._written.get(selector, frozenset())
        self._written[selector] = known | {pinned} if is_out else known - {pinned}
