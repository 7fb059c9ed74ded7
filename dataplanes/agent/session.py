"""One stream to the daemon, from Hello to its end."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from controld.contract.effect import Effect
from controld.contract.errors import ControldError, FieldError
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.convert import PROTOCOL_VERSION, effect_to_proto, telemetry_to_proto
from controld.contract.rpc.convert_trial import trial_outcome_to_proto
from controld.contract.telemetry import Telemetry
from dataplanes.agent.applied import PageAssembler, SnapshotRefusedError
from dataplanes.agent.counters import Counters, ErrorEdge
from dataplanes.agent.effect_ring import EffectRing
from dataplanes.agent.engine_desk import EngineDesk
from dataplanes.agent.identity import AgentTiming
from dataplanes.agent.in_force import InForce
from dataplanes.agent.plain_text import plain_text
from dataplanes.agent.trials import TrialDesk

_log = logging.getLogger(__name__)

EFFECTS_PER_MESSAGE = 256
MAX_DRAIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParts:
    """What outlives a stream and is used by it."""

    in_force: InForce
    effects: EffectRing
    trials: TrialDesk
    counters: Counters
    edge: ErrorEdge
    timing: AgentTiming
    telemetry: Callable[[], Telemetry]
    engine: EngineDesk | None = None


class SessionEndedError(ControldError):
    """The stream must end.

    Args:
        wait_s: seconds before the next one, at least.
    """

    def __init__(self, message: str, *, code: str, wait_s: float = 0.0) -> None:
        super().__init__(message, code=code)
        self.wait_s = wait_s


class Session:
    """The state of one stream: nonces, pages and what was sent live and die with it.

    gRPC pulls `requests` from a thread of its own, and no faster than the daemon reads; the agent's thread calls
    `handle` with each answer.
    """

    def __init__(self, hello: pb.Hello, parts: SessionParts) -> None:
        self._hello = hello
        self._parts = parts
        self._pages = PageAssembler()
        self._answers: deque[pb.AgentMessage] = deque()
        self._event = threading.Event()
        self._closed = False
        self._telemetry_due = True
        self._accepted_any = False
        self._sent_seq = 0
        self._effects_waiting_since_s: float | None = None
        self.welcomed = False
        self.started_s = time.monotonic()
        self.last_message_s = self.started_s

    # ----------------------------------------------------------------------------------- to the daemon

    def wake(self) -> None:
        """There may be something to send."""
        if not self._event.is_set():
            self._event.set()

    def telemetry_is_due(self) -> None:
        """Send telemetry as soon as possible."""
        self._telemetry_due = True
        self.wake()

    def close(self) -> None:
        """Let `requests` end."""
        self._closed = True
        self._event.set()

    def requests(self) -> Iterator[pb.AgentMessage]:
        """What gRPC sends; ends when the session is closed."""
        yield pb.AgentMessage(hello=self._hello)
        while not self._closed:
            self._event.clear()
            try:
                message, wait_s = self._next()
            except Exception as error:  # noqa: BLE001 - the edge of gRPC's sending thread: what cannot be said is left out
                self._parts.edge.caught("sending", error)
                message, wait_s = None, self._parts.timing.effect_delay_s
            if message is not None:
                yield message
            elif not self._closed:
                self._event.wait(wait_s)

    def _next(self) -> tuple[pb.AgentMessage | None, float]:
        """The next message, or how long to wait for one."""
        timing = self._parts.timing
        if not self.welcomed:
            return None, timing.telemetry_interval_s
        if self._answers:
            return self._answers.popleft(), 0.0
        outcome = self._parts.trials.take()
        if outcome is not None:
            return pb.AgentMessage(trial_result=trial_outcome_to_proto(outcome)), 0.0
        engine = self._parts.engine
        told = engine.take_applied() if engine is not None else None
        if told is not None:
            return told, 0.0
        if self._telemetry_due:
            self._telemetry_due = False
            return pb.AgentMessage(telemetry=telemetry_to_proto(self._parts.telemetry())), 0.0
        chunks = engine.take_chunks() if engine is not None else None
        if chunks is not None:
            return chunks, 0.0
        unsent = self._parts.effects.last_seq() - self._sent_seq
        if unsent <= 0:
            return None, timing.telemetry_interval_s
        now_s = time.monotonic()
        if self._effects_waiting_since_s is None:
            self._effects_waiting_since_s = now_s
        wait_s = self._effects_waiting_since_s + timing.effect_delay_s - now_s
        if unsent < EFFECTS_PER_MESSAGE and wait_s > 0:
            return None, wait_s
        self._effects_waiting_since_s = None
        batch = self._parts.effects.after(self._sent_seq, EFFECTS_PER_MESSAGE)
        if not batch:
            self._sent_seq = self._parts.effects.last_seq()
            return None, 0.0
        self._sent_seq = batch[-1][0]
        return self._effect_report(batch), 0.0

    def _effect_report(self, batch: list[tuple[int, Effect]]) -> pb.AgentMessage | None:
        """The message; an effect that cannot be expressed is left out, or it would end every stream to come."""
        messages = []
        for seq, effect in batch:
            try:
                messages.append(effect_to_proto(effect, seq=seq))
            except Exception as error:  # noqa: BLE001 - effects are made by the data plane, and the stream must outlive them
                self._parts.counters.count("effects_unsendable")
                self._parts.edge.caught("effect", error)
        return pb.AgentMessage(effects=pb.EffectReport(effects=messages)) if messages else None

    # ----------------------------------------------------------------------------------- from the daemon

    def handle(self, message: pb.ControlMessage) -> None:
        """Take one message.

        Raises:
            SessionEndedError: the daemon, or its conduct, ends the stream.
        """
        self.last_message_s = time.monotonic()
        kind = message.WhichOneof("message")
        if kind is None:
            self._parts.counters.count("message_kind_unknown")
        elif kind == "reject":
            self._parts.counters.count("rejected")
            raise SessionEndedError(
                f"rejected: {message.reject.code}: {message.reject.reason}",
                code="agent.rejected",
                wait_s=self._parts.timing.backoff_max_s,
            )
        elif kind == "welcome":
            self._welcome(message.welcome)
        elif not self.welcomed:
            raise SessionEndedError(f"{kind} came before the welcome", code="agent.protocol")
        elif kind == "snapshot":
            self._snapshot(message.snapshot)
        elif kind == "lease_renewal":
            self._renewal(message.lease_renewal)
        elif kind == "effect_ack":
            self._acknowledge(message.effect_ack.up_to_seq)
        elif kind == "trial_request":
            self._parts.trials.request(message.trial_request)
        elif kind == "trial_cancel":
            self._parts.trials.cancel(message.trial_cancel.study_id, message.trial_cancel.trial_id)
        elif kind == "drain":
            self._drain(message.drain)

    def _welcome(self, welcome: pb.Welcome) -> None:
        if welcome.protocol_version != PROTOCOL_VERSION:
            self._parts.counters.count("protocol_version_mismatch")
            raise SessionEndedError(
                f"the daemon speaks protocol {welcome.protocol_version}, this agent {PROTOCOL_VERSION}",
                code="agent.protocol_version",
                wait_s=self._parts.timing.backoff_max_s,
            )
        self._acknowledge(welcome.effects_acked_up_to)
        if self._parts.engine is not None:
            self._parts.engine.new_stream()
        self.welcomed = True
        self._parts.counters.count("streams_welcomed")
        self.wake()
        _log.info("attached to %s at policy generation %d", welcome.server_id, welcome.policy_generation)

    def _snapshot(self, page: pb.Snapshot) -> None:
        try:
            snapshot = self._pages.add(page)
            if snapshot is None:
                return
            self._parts.in_force.accept(snapshot, whole=not self._accepted_any)
        except SnapshotRefusedError as refused:
            self._parts.counters.count("snapshots_refused")
            _log.warning("refused snapshot %d (%s): %s", refused.version, refused.resource or "whole", refused)
            nack = pb.Nack(
                nonce=refused.nonce,
                version=refused.version,
                error_detail=plain_text(refused) or refused.code,
                resource=plain_text(refused.resource),
            )
            self._answer(pb.AgentMessage(nack=nack))
            return
        self._accepted_any = True
        self._answer(pb.AgentMessage(ack=pb.Ack(nonce=snapshot.nonce, version=snapshot.version)))
        self.telemetry_is_due()

    def _renewal(self, renewal: pb.LeaseRenewal) -> None:
        try:
            self._parts.in_force.renew(renewal.version, renewal.ttl_s)
        except FieldError as error:
            self._parts.counters.count("lease_renewal_refused")
            _log.debug("refused a lease renewal: %s", error)

    def _acknowledge(self, up_to_seq: int) -> None:
        if not self._parts.effects.acknowledge(up_to_seq):
            self._parts.counters.count("effect_ack_refused")

    def _drain(self, drain: pb.Drain) -> None:
        wait_s = drain.reconnect_after_s
        if not math.isfinite(wait_s) or wait_s < 0:
            wait_s = 0.0
        raise SessionEndedError(f"drained: {drain.reason}", code="agent.drained", wait_s=min(wait_s, MAX_DRAIN_S))

    def _answer(self, message: pb.AgentMessage) -> None:
        self._answers.append(message)
        self.wake()
