"""Effects of one stream: check, store once, acknowledge after the commit, then tell the controller."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from controld.contract.clock import Clock
from controld.contract.errors import FieldError
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.checks import checked_count
from controld.contract.rpc.convert import effect_from_proto
from controld.fleet.tally import Tally
from controld.store.errors import StoreError
from controld.store.interface import Effects
from controld.store.records import EffectRecord

_log = logging.getLogger(__name__)

MAX_BATCH = 1000
MAX_WAITING = 20_000
"""Twice what a conforming agent can have unacknowledged; beyond it the oldest go, as they do in the agent."""

RETRY_FIRST_S = 0.5
RETRY_MAX_S = 30.0


class EffectIntake:
    """Takes reports without waiting for the disk, and stores them in the order in which they came.

    A refused effect is counted by its field and never stored; its sequence number is acknowledged all the same, or the
    agent would send it for ever. While the store fails nothing is acknowledged and the batch is tried again.

    Args:
        on_acked: called with the sequence number up to which everything is durable.
        on_stored: awaited with the effects that were new.
    """

    def __init__(
        self,
        agent_id: str,
        instance_id: str,
        store: Effects,
        clock: Clock,
        tally: Tally,
        *,
        on_acked: Callable[[int], None],
        on_stored: Callable[[tuple[EffectRecord, ...]], Awaitable[None]],
    ) -> None:
        self._agent_id = agent_id
        self._instance_id = instance_id
        self._store = store
        self._clock = clock
        self._tally = tally
        self._on_acked = on_acked
        self._on_stored = on_stored
        self._waiting: deque[EffectRecord] = deque()
        self._up_to_seq = 0
        self._stored_up_to_seq = 0
        self._wake = asyncio.Event()
        self._closing = False

    def offer(self, report: pb.EffectReport) -> None:
        """Check a report and queue what is good of it."""
        now_unix_s = self._clock.unix_s()
        for message in report.effects:
            self._tally.add("effects_received")
            try:
                if checked_count(message.seq, "effect.seq") == 0:
                    raise FieldError("effect.seq", "is 0; it counts from 1")
            except FieldError as error:
                # Not even the number can be acknowledged.
                self._refuse(error)
                continue
            self._up_to_seq = max(self._up_to_seq, message.seq)
            try:
                effect = effect_from_proto(message)
            except FieldError as error:
                self._refuse(error)
                continue
            self._waiting.append(
                EffectRecord(
                    agent_id=self._agent_id,
                    instance_id=self._instance_id,
                    seq=message.seq,
                    effect=effect,
                    received_unix_s=now_unix_s,
                )
            )
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self._tally.add("effects_dropped")
        self._wake.set()

    def _refuse(self, error: FieldError) -> None:
        self._tally.add("effects_refused", error.field)
        _log.warning("effect refused: %s", error, extra={"agent_id": self._agent_id, "code": error.code})

    async def run(self) -> None:
        """Store and acknowledge until `close`; ends when everything offered before is stored."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting or self._up_to_seq > self._stored_up_to_seq:
                await self._store_batch()
            if self._closing:
                return

    def close(self) -> None:
        """Let `run` end; nothing may be offered after."""
        self._closing = True
        self._wake.set()

    async def _store_batch(self) -> None:
        batch = tuple(self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting))))
        # Only the last batch may acknowledge what was refused after it.
        up_to_seq = max(record.seq for record in batch) if self._waiting else self._up_to_seq
        retry_s = RETRY_FIRST_S
        while True:
            try:
                new = await self._store.append(self._agent_id, self._instance_id, batch, up_to_seq=up_to_seq)
                break
            except StoreError as error:
                self._tally.add("effects_store_failed", error.code)
                if self._closing or error.code == "store.closed":
                    # The agent still has them and sends them again on its next stream.
                    self._waiting.clear()
                    self._up_to_seq = self._stored_up_to_seq
                    return
                _log.error("effects not stored: %s", error, extra={"agent_id": self._agent_id, "code": error.code})
                await asyncio.sleep(retry_s)
                retry_s = min(retry_s * 2, RETRY_MAX_S)
        self._stored_up_to_seq = max(self._stored_up_to_seq, up_to_seq)
        self._tally.add("effects_stored", count=len(new))
        self._tally.add("effects_duplicate", count=len(batch) - len(new))
        self._on_acked(self._stored_up_to_seq)
        if new:
            await self._on_stored(new)
