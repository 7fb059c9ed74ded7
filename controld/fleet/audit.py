"""Audit events of the fleet, written without making a stream wait."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict

from controld.fleet.tally import Tally
from controld.store.errors import StoreError
from controld.store.interface import Audit
from controld.store.records import AuditEvent

_log = logging.getLogger(__name__)

MAX_PENDING = 1000
MAX_REMEMBERED = 4096


class FleetAudit:
    """Notes events in the background; what repeats itself is noted once.

    Args:
        trail: where they go.
        tally: counts what could not be noted.
    """

    def __init__(self, trail: Audit, tally: Tally) -> None:
        self._trail = trail
        self._tally = tally
        self._pending: set[asyncio.Task[None]] = set()
        self._remembered: OrderedDict[tuple[object, ...], None] = OrderedDict()

    def note(self, event: AuditEvent, **document: object) -> None:
        """Record an event."""
        if len(self._pending) >= MAX_PENDING:
            self._tally.add("audit_dropped")
            return
        task = asyncio.get_running_loop().create_task(self._append(event, json.dumps(document)))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    def note_distinct(self, event: AuditEvent, **document: object) -> None:
        """Record an event unless the same was recorded before (within the last few thousand)."""
        key = (event, *sorted((name, str(value)) for name, value in document.items()))
        if key in self._remembered:
            self._remembered.move_to_end(key)
            return
        self._remembered[key] = None
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        self.note(event, **document)

    async def flush(self) -> None:
        """Wait until everything noted so far is written."""
        while self._pending:
            await asyncio.wait(self._pending)

    async def _append(self, event: AuditEvent, document: str) -> None:
        try:
            await self._trail.append(event, document)
        except StoreError as error:
            self._tally.add("audit_failed", error.code)
            _log.error("audit event %s not written: %s", event, error, extra={"code": error.code})
