"""Which arms are out of use, in the audit trail: once when each is taken out, and once when it comes back."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable

from controld.controller.guard import Pin
from controld.fleet.published import Selector
from controld.policy.model import PlaneKind
from controld.store.interface import Audit
from controld.store.records import AuditEvent

_log = logging.getLogger(__name__)

_AUDIT_LINES = 10_000

PinnedArm = tuple[str, str]
"""An arm's id, and the service class for which it is out of use."""


async def audit_pin(
    audit: Audit, event: AuditEvent, selector: Selector, pinned: PinnedArm, reason: str, *, agent_id: str | None = None
) -> None:
    """Write one line.

    Args:
        agent_id: of the one engine that it is about; None: it is about all planes of the selector.

    Raises:
        StoreError: it could not be written.
    """
    arm_id, service_class = pinned
    document = {
        "kind": selector.kind, "deployment": selector.deployment, "arm_id": arm_id,
        "service_class": service_class, "reason": reason,
    }  # fmt: skip
    if agent_id is not None:
        document["agent_id"] = agent_id
    await audit.append(event, json.dumps(document, sort_keys=True))


class PinTrail:
    """What the trail says of the arms of all planes but video engines, and the lines that it lacks.

    Args:
        audit: the trail.
    """

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._pinned: dict[Selector, frozenset[PinnedArm]] = {}

    async def restore(self) -> None:
        """What the trail says is not written there again: what it does not say yet, is. Raises: StoreError."""
        lines = [
            (record.sequence, record.event, record.document)
            for event in (AuditEvent.ARM_PINNED_OFF, AuditEvent.ARM_RELEASED)
            for record in await self._audit.recent(_AUDIT_LINES, event)
        ]
        for _, event, text in sorted(lines):
            try:
                document = json.loads(text)
                selector = Selector(document["kind"], document["deployment"])
                if selector.kind == PlaneKind.LONGLIVE.value:
                    continue  # `VideoPlanner`'s
                pinned = (str(document["arm_id"]), str(document["service_class"]))
            except (ValueError, KeyError, TypeError) as error:
                _log.error("a line of the audit trail cannot be read: %s", error)
                continue
            known = self._pinned.get(selector, frozenset())
            self._pinned[selector] = known | {pinned} if event is AuditEvent.ARM_PINNED_OFF else known - {pinned}

    async def note(self, selector: Selector, pins: Iterable[Pin]) -> int:
        """Write down which arms were taken out of use, and which came back; how many are out. Raises: StoreError."""
        reasons = {(pin.arm_id, pin.service_class): pin.reason for pin in pins}
        before = self._pinned.get(selector, frozenset())
        for pinned in sorted(reasons.keys() - before):
            _log.warning("arm out of use", extra={"arm_id": pinned[0], "class": pinned[1], "reason": reasons[pinned]})
            await audit_pin(self._audit, AuditEvent.ARM_PINNED_OFF, selector, pinned, reasons[pinned])
        for pinned in sorted(before - reasons.keys()):
            await audit_pin(self._audit, AuditEvent.ARM_RELEASED, selector, pinned, "")
        self._pinned[selector] = frozenset(reasons)
        return len(reasons)

    async def note_release(self, selector: Selector, pin: Pin) -> None:
        """Write down that a person ended a pin. Raises: StoreError."""
        pinned = (pin.arm_id, pin.service_class)
        await audit_pin(self._audit, AuditEvent.ARM_RELEASED, selector, pinned, "by the operator")
        self._pinned[selector] = self._pinned.get(selector, frozenset()) - {pinned}
