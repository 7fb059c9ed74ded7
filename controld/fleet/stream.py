"""One stream of one agent: a reader, a sender and an effect intake that live and die together."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from typing import TYPE_CHECKING, Protocol

import grpc
from google.protobuf.message import DecodeError

from controld.contract.errors import FieldError
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.checks import MAX_TEXT_CHARACTERS
from controld.contract.rpc.convert import telemetry_from_proto
from controld.contract.rpc.convert_trial import trial_outcome_from_proto
from controld.contract.rpc.convert_video import MAX_REPORTS, chunk_report_from_proto, setting_applied_from_proto
from controld.contract.video import ChunkReport
from controld.fleet.delivery import Answer
from controld.fleet.intake import EffectIntake
from controld.fleet.published import Published, snapshot_pages
from controld.store.records import AuditEvent, EffectRecord

if TYPE_CHECKING:
    from controld.fleet.registry import AgentEntry
    from controld.fleet.server import FleetServer

_log = logging.getLogger(__name__)

INTAKE_DRAIN_S = 5.0

DRAIN_S = 5.0
"""An agent that does not even take the goodbye by then is cut off."""


class StreamContext(Protocol):
    """What we use of gRPC's context."""

    async def read(self) -> object: ...

    async def write(self, message: pb.ControlMessage) -> None: ...

    def peer(self) -> str: ...


class AgentStream:
    """Serves one admitted stream until either side ends it.

    Only the sender task writes. What is to be sent waits in slots that hold the latest value (snapshot, effect
    acknowledgement, lease) and in one queue (trials), so a slow reader makes nothing grow.
    """

    def __init__(self, entry: AgentEntry, context: StreamContext, server: FleetServer) -> None:
        self._entry = entry
        self._context = context
        self._server = server
        self._id = secrets.token_hex(4)
        self._sendings = 0
        self._wake = asyncio.Event()
        self._trials: deque[pb.ControlMessage] = deque()
        self._effects_acked = 0
        self._effects_ack_sent = 0
        self._next_lease_s = 0.0
        self._drain: pb.Drain | None = None
        self._sender: asyncio.Task[None] | None = None
        identity = entry.identity
        self._intake = EffectIntake(
            identity.agent_id,
            identity.instance_id,
            server.store.effects,
            server.clock,
            entry.tally,
            on_acked=self._note_acked,
            on_stored=self._note_stored,
        )

    # ------------------------------------------------------------------------------------ from the server

    def wake(self) -> None:
        """Something may have to be sent."""
        self._wake.set()

    def drain(self, reason: str, reconnect_after_s: float) -> None:
        """Say goodbye and end."""
        if self._drain is None:
            self._drain = pb.Drain(reason=reason, reconnect_after_s=reconnect_after_s)
            self._wake.set()
            asyncio.get_running_loop().call_later(DRAIN_S, self._cut_off)

    def _cut_off(self) -> None:
        if self._sender is not None:
            self._sender.cancel()

    def send_trial(self, message: pb.ControlMessage) -> None:
        """Queue a trial's request or cancellation."""
        self._trials.append(message)
        self._wake.set()

    # ------------------------------------------------------------------------------------ life

    async def serve(self, welcome: pb.Welcome) -> None:
        """Run until the agent leaves, the sender has drained, or the call is cancelled."""
        self._effects_acked = self._effects_ack_sent = welcome.effects_acked_up_to
        self._entry.delivery.new_stream()
        self._next_lease_s = self._server.clock.monotonic_s() + self._server.settings.lease_interval_s
        await self._context.write(pb.ControlMessage(welcome=welcome))
        loop = asyncio.get_running_loop()
        reader = loop.create_task(self._read(), name="fleet-reader")
        sender = loop.create_task(self._send(), name="fleet-sender")
        intake = loop.create_task(self._intake.run(), name="fleet-intake")
        self._sender = sender
        try:
            await asyncio.wait({reader, sender, intake}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # gRPC waits for ever for a handler that lets the cancellation of its own tasks escape; so they end here.
            for task in (reader, sender):
                task.cancel()
            self._intake.close()
            self._server.in_background(self._finish_intake(intake))
            for outcome in await asyncio.gather(reader, sender, return_exceptions=True):
                if isinstance(outcome, Exception):
                    self._report(outcome)

    async def _finish_intake(self, intake: asyncio.Task[None]) -> None:
        # What was received is stored although the agent has left; it would only have to send it again.
        await asyncio.wait({intake}, timeout=INTAKE_DRAIN_S)
        intake.cancel()
        for outcome in await asyncio.gather(intake, return_exceptions=True):
            if isinstance(outcome, Exception):
                self._report(outcome)

    def _report(self, error: Exception) -> None:
        name = self._entry.identity.agent_id
        if isinstance(error, DecodeError):
            self._entry.tally.add("messages_malformed")
            _log.warning("agent %s sent what is no message: %s", name, error)
        elif isinstance(error, grpc.RpcError | grpc.aio.BaseError | asyncio.InvalidStateError):
            _log.debug("stream of agent %s ended: %s", name, error)
        else:
            self._entry.tally.add("stream_failed", type(error).__name__)
            _log.error("stream of agent %s failed", name, exc_info=error)

    # ------------------------------------------------------------------------------------ what comes

    async def _read(self) -> None:
        while True:
            message = await self._context.read()
            if not isinstance(message, pb.AgentMessage):
                return
            await self._receive(message)

    async def _receive(self, message: pb.AgentMessage) -> None:
        kind = message.WhichOneof("message")
        tally = self._entry.tally
        if kind == "effects":
            self._intake.offer(message.effects)
        elif not self._is_current():
            tally.add("messages_late")
        elif kind == "telemetry":
            await self._receive_telemetry(message.telemetry)
        elif kind == "ack":
            self._count_answer("acks", self._entry.delivery.ack(message.ack.nonce, message.ack.version))
            self._wake.set()
        elif kind == "nack":
            self._receive_nack(message.nack)
        elif kind == "trial_result":
            try:
                outcome = trial_outcome_from_proto(message.trial_result)
            except FieldError as error:
                tally.add("trial_results_refused", error.field)
                _log.warning("trial result refused: %s", error, extra={"agent_id": self._entry.identity.agent_id})
                return
            await self._server.notify_trial(self._entry, outcome)
        elif kind == "setting_applied":
            await self._receive_applied(message.setting_applied)
        elif kind == "chunk_reports":
            await self._receive_chunks(message.chunk_reports)
        elif kind == "hello":
            tally.add("messages_unexpected", "hello")
        else:
            tally.add("messages_unknown")

    async def _receive_telemetry(self, message: pb.Telemetry) -> None:
        entry = self._entry
        try:
            telemetry = telemetry_from_proto(message)
        except FieldError as error:
            entry.tally.add("telemetry_refused", error.field)
            _log.warning("telemetry refused: %s", error, extra={"agent_id": entry.identity.agent_id})
            return
        entry.telemetry = telemetry
        entry.telemetry_unix_s = self._server.clock.unix_s()
        entry.telemetry_at_s = self._server.clock.monotonic_s()
        entry.delivery.effective = telemetry.applied_version
        await self._server.notify_telemetry(entry, telemetry)

    async def _receive_applied(self, message: pb.SettingApplied) -> None:
        entry = self._entry
        try:
            applied = setting_applied_from_proto(message)
        except FieldError as error:
            entry.tally.add("settings_applied_refused", error.field)
            _log.warning("answer to a setting refused: %s", error, extra={"agent_id": entry.identity.agent_id})
            return
        entry.setting_applied = applied
        entry.tally.add("settings_applied")
        await self._server.notify_applied(entry, applied)

    async def _receive_chunks(self, message: pb.ChunkReports) -> None:
        entry = self._entry
        reports: list[ChunkReport] = []
        for report in message.reports[:MAX_REPORTS]:
            try:
                reports.append(chunk_report_from_proto(report))
            except FieldError as error:
                entry.tally.add("chunk_reports_refused", error.field)
                _log.warning("chunk report refused: %s", error, extra={"agent_id": entry.identity.agent_id})
        entry.tally.add("chunk_reports", count=len(reports))
        if len(message.reports) > MAX_REPORTS:
            entry.tally.add("chunk_reports_dropped", count=len(message.reports) - MAX_REPORTS)
        if reports:
            await self._server.notify_chunks(entry, tuple(reports))

    def _receive_nack(self, nack: pb.Nack) -> None:
        entry, clock = self._entry, self._server.clock
        detail = nack.error_detail[:MAX_TEXT_CHARACTERS]
        answer = entry.delivery.nack(
            nack.nonce,
            nack.version,
            detail,
            nack.resource,
            now_s=clock.monotonic_s(),
            now_unix_s=clock.unix_s(),
        )
        self._count_answer("nacks", answer)
        if answer is Answer.TAKEN:
            _log.warning(
                "agent %s refused version %d: %s", entry.identity.agent_id, nack.version, detail,
                extra={"resource": nack.resource},
            )  # fmt: skip
            self._server.audit.note_distinct(
                AuditEvent.SNAPSHOT_REFUSED,
                agent_id=entry.identity.agent_id,
                instance_id=entry.identity.instance_id,
                error=detail,
                resource=nack.resource,
            )
        self._wake.set()

    def _count_answer(self, name: str, answer: Answer) -> None:
        if answer is Answer.TAKEN:
            self._entry.tally.add(name)
        else:
            self._entry.tally.add(f"{name}_ignored", answer.value)

    def _is_current(self) -> bool:
        return self._entry.stream is self

    def _note_acked(self, up_to_seq: int) -> None:
        self._effects_acked = max(self._effects_acked, up_to_seq)
        self._entry.effects_acked_up_to = self._effects_acked
        self._wake.set()

    async def _note_stored(self, effects: tuple[EffectRecord, ...]) -> None:
        await self._server.notify_effects(self._entry, effects)

    # ------------------------------------------------------------------------------------ what goes

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        while self._drain is None:
            self._wake.clear()
            await self._send_due()
            now_s = self._server.clock.monotonic_s()
            wait_s = max(0.0, self._next_lease_s - now_s)
            backoff_s = self._entry.delivery.wait_s(now_s)
            if backoff_s is not None:
                wait_s = min(wait_s, backoff_s)
            timer = loop.call_later(wait_s, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
        await self._context.write(pb.ControlMessage(drain=self._drain))

    async def _send_due(self) -> None:
        if self._effects_acked > self._effects_ack_sent:
            self._effects_ack_sent = self._effects_acked
            ack = pb.EffectAck(up_to_seq=self._effects_acked)
            await self._context.write(pb.ControlMessage(effect_ack=ack))
        # A stream that was replaced must not touch what its successor sends and hears.
        published = self._entry.delivery.due(self._server.clock.monotonic_s()) if self._is_current() else None
        if published is not None:
            await self._send_snapshot(published)
        while self._trials:
            await self._context.write(self._trials.popleft())
        now_s = self._server.clock.monotonic_s()
        if now_s >= self._next_lease_s:
            self._next_lease_s = now_s + self._server.settings.lease_interval_s
            await self._renew_lease()

    async def _send_snapshot(self, published: Published) -> None:
        delivery, settings = self._entry.delivery, self._server.settings
        self._sendings += 1
        nonce = f"{self._id}-{self._sendings}"
        pages = snapshot_pages(
            published,
            nonce=nonce,
            ttl_s=settings.lease_ttl_s,
            kinds=self._entry.identity.resource_kinds,
            artefacts_held=delivery.artefacts_held,
            names_sent=delivery.names_sent,
            page_bytes=settings.page_bytes,
        )
        delivery.sent(nonce, published)
        self._entry.tally.add("snapshots_sent")
        for page in pages:
            await self._context.write(pb.ControlMessage(snapshot=page))

    async def _renew_lease(self) -> None:
        delivery = self._entry.delivery
        # What it really uses, also where it refuses something newer; never a version that we did not publish.
        version = delivery.effective if 0 < delivery.effective <= self._server.last_version else delivery.acked
        if version:
            self._entry.tally.add("leases_renewed")
            renewal = pb.LeaseRenewal(version=version, ttl_s=self._server.settings.lease_ttl_s)
            await self._context.write(pb.ControlMessage(lease_renewal=renewal))
