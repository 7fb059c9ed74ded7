"""All agents that ever attached (within reason), and which instance of each is the real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from controld.contract.clock import Clock
from controld.contract.snapshot import ResourceKind
from controld.contract.telemetry import Telemetry
from controld.contract.video import Applied
from controld.fleet.delivery import Delivery
from controld.fleet.errors import RejectError
from controld.fleet.identity import AgentIdentity
from controld.fleet.session import AgentSession, Rival
from controld.fleet.tally import Tally

if TYPE_CHECKING:
    from controld.fleet.stream import AgentStream

MAX_AGENTS = 4096
FORGET_AFTER_S = 3600.0
FENCE_S = 60.0
"""A replaced process may come back as the real one when its successor has been away for so long."""

TELEMETRY_SILENT_S = 90.0
RIVAL_GONE_S = 60.0
"""Who was turned away and has not tried again for so long is gone; agents try every few seconds."""

MAX_RIVALS = 8


class AgentEntry:
    """One agent over all of its streams; of its instances only the current one."""

    def __init__(self, identity: AgentIdentity, fleet_tally: Tally) -> None:
        self.identity = identity
        self.delivery = Delivery()
        self.tally = Tally(fleet_tally)
        self.stream: AgentStream | None = None
        self.peer = ""
        self.connected_since_unix_s = 0.0
        self.left_at_s = 0.0
        self.telemetry: Telemetry | None = None
        self.telemetry_unix_s = 0.0
        self.telemetry_at_s = 0.0
        self.effects_acked_up_to = 0
        self.setting_applied: Applied | None = None
        self._rivals: dict[str, tuple[float, Rival]] = {}

    def note_rival(self, rival: Rival, now_s: float) -> None:
        """Another instance was turned away; of too many the ones that were seen last are kept."""
        self._rivals.pop(rival.instance_id, None)
        self._rivals[rival.instance_id] = (now_s, rival)
        while len(self._rivals) > MAX_RIVALS:
            del self._rivals[next(iter(self._rivals))]

    def rivals(self, now_s: float) -> tuple[Rival, ...]:
        """Those that are still there; none while this one is away itself, for then nobody else is served."""
        if self.stream is None:
            return ()
        return tuple(rival for seen_s, rival in self._rivals.values() if now_s - seen_s <= RIVAL_GONE_S)

    def view(self, now_s: float, last_version: int) -> AgentSession:
        """The agent as others see it."""
        reason = self._not_attached_reason(now_s)
        delivery = self.delivery
        return AgentSession(
            identity=self.identity,
            peer=self.peer,
            connected=self.stream is not None,
            connected_since_unix_s=self.connected_since_unix_s,
            attached=not reason,
            not_attached_reason=reason,
            desired_version=delivery.desired,
            acked_version=delivery.acked,
            effective_version=delivery.effective,
            effective_is_known=delivery.effective <= last_version,
            last_failed=delivery.last_failed,
            degraded=delivery.degraded,
            artefacts_held=self._artefacts_held(),
            telemetry=self.telemetry,
            telemetry_unix_s=self.telemetry_unix_s,
            effects_acked_up_to=self.effects_acked_up_to,
            counters=self.tally.flat(),
            setting_applied=self.setting_applied,
            rivals=self.rivals(now_s),
        )

    def _artefacts_held(self) -> dict[str, str]:
        kinds = self.identity.resource_kinds
        takes_any = not kinds or ResourceKind.CALIBRATED_ARTEFACT.value in kinds
        return self.delivery.artefacts_held if takes_any and self.stream is not None else {}

    def _not_attached_reason(self, now_s: float) -> str:
        if self.stream is None:
            return "not connected"
        if self.telemetry is None:
            return "has not said yet that it is attached"
        if not self.telemetry.attached:
            return self.telemetry.attach_reason or "says that it is not attached, and gives no reason"
        silent_s = now_s - self.telemetry_at_s
        if silent_s > TELEMETRY_SILENT_S:
            return f"has been silent for {silent_s:.0f} s"
        return ""


class Registry:
    """Agents by id. Of two instances of one agent the one that started later is the real one."""

    def __init__(self, clock: Clock, fleet_tally: Tally) -> None:
        self._clock = clock
        self._tally = fleet_tally
        self._agents: dict[str, AgentEntry] = {}

    def __iter__(self) -> Iterator[AgentEntry]:
        return iter(tuple(self._agents.values()))

    def get(self, agent_id: str) -> AgentEntry | None:
        """The entry of an agent."""
        return self._agents.get(agent_id)

    def admit(self, identity: AgentIdentity, peer: str = "") -> tuple[AgentEntry, AgentStream | None]:
        """The entry for a new stream, and the stream that it replaces.

        Args:
            peer: where it comes from, for the operator.

        Raises:
            RejectError: a later instance of this agent is (or was until just now) here, or there are too many agents.
        """
        entry = self._agents.get(identity.agent_id)
        if entry is None:
            self._make_room()
            entry = self._agents[identity.agent_id] = AgentEntry(identity, self._tally)
            return entry, None
        if entry.identity.instance_id != identity.instance_id:
            self._check_fence(entry, identity, peer)
            # Another process: what the old one held, refused and said is not true of it.
            replaced = entry.stream
            tally = entry.tally
            entry = self._agents[identity.agent_id] = AgentEntry(identity, self._tally)
            entry.tally = tally
            return entry, replaced
        entry.identity = identity
        return entry, entry.stream

    def is_current(self, entry: AgentEntry) -> bool:
        """Whether this entry still stands for its agent."""
        return self._agents.get(entry.identity.agent_id) is entry

    def _check_fence(self, entry: AgentEntry, newcomer: AgentIdentity, peer: str) -> None:
        now_s = self._clock.monotonic_s()
        here = entry.stream is not None or now_s - entry.left_at_s < FENCE_S
        if here and newcomer.started_unix_s <= entry.identity.started_unix_s:
            rival = Rival(
                instance_id=newcomer.instance_id,
                deployment=newcomer.deployment,
                kind=newcomer.kind,
                peer=peer,
                started_unix_s=newcomer.started_unix_s,
                seen_unix_s=self._clock.unix_s(),
            )
            entry.note_rival(rival, now_s)
            raise RejectError(
                f"instance {newcomer.instance_id} of agent {newcomer.agent_id} is not newer than instance"
                f" {entry.identity.instance_id}",
                code="hello.fenced",
                hint="end the older process, or give each an agent id of its own",
            )

    def _make_room(self) -> None:
        now_s = self._clock.monotonic_s()
        for agent_id, entry in tuple(self._agents.items()):
            if entry.stream is None and now_s - entry.left_at_s > FORGET_AFTER_S:
                del self._agents[agent_id]
        if len(self._agents) < MAX_AGENTS:
            return
        gone = [(entry.left_at_s, agent_id) for agent_id, entry in self._agents.items() if entry.stream is None]
        if not gone:
            raise RejectError(f"there are {MAX_AGENTS} agents already", code="hello.full")
        del self._agents[min(gone)[1]]
