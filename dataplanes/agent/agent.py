"""The agent: what a data plane calls, from any thread, at any time, whatever the daemon does."""

from __future__ import annotations

import logging
import os
import random
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from controld.contract.clock import Clock, SystemClock
from controld.contract.configuration import Configuration
from controld.contract.decision import DEFAULT_CLASS, Drawn, is_sampled, match_class
from controld.contract.effect import Effect, Half
from controld.contract.estimators import first_guess_bytes_per_s
from controld.contract.fair_queue import Tenancy
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.checks import MAX_NAME_CHARACTERS
from controld.contract.telemetry import LinkEstimate, Telemetry
from controld.contract.video import engine_setting_name
from dataplanes.agent.applied import Applied, HoldArtefact, ValidateConfiguration
from dataplanes.agent.connection import Connection
from dataplanes.agent.counters import Counters, ErrorEdge
from dataplanes.agent.draw import RAW_ARM, Draw, RawReason
from dataplanes.agent.effect_ring import EffectRing
from dataplanes.agent.engine_desk import EngineDesk
from dataplanes.agent.identity import AgentIdentity, AgentTiming
from dataplanes.agent.in_force import InForce
from dataplanes.agent.links import Links
from dataplanes.agent.plain_text import plain_text
from dataplanes.agent.session import SessionParts
from dataplanes.agent.trials import RunInThread, TrialDesk, TrialHandler

_log = logging.getLogger(__name__)

ADDRESS_VARIABLE = "CONTROLD_ADDRESS"
EFFECT_RING_CAPACITY = 10_000


def address_from_environment(environment: Mapping[str, str] = os.environ) -> str | None:
    """The daemon's address ("unix:///path" or "host:port"), or None: the plane is not steered."""
    return environment.get(ADDRESS_VARIABLE) or None


def _accept_any(configuration: Configuration) -> None:
    """A data plane that can run whatever it is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """What an agent has and knows, at one moment."""

    applied: Applied
    lease_left_s: float
    connected: bool
    attached: bool
    attach_reason: str
    unacknowledged_effects: int
    links: tuple[LinkEstimate, ...]
    counters: Mapping[str, int]
    instance_id: str


class Agent:
    """A data plane's end of the control stream.

    No call blocks on the daemon and none raises into the data plane: an internal error is logged whole, counted, and
    shows in telemetry; the answer is then the one that changes nothing (`RAW`, `default`).

    Threads and gRPC channels start with `start` and do not survive a fork: make and start the agent in the process
    that uses it, after it was forked.

    Args:
        identity: who it is.
        address: the daemon's, "unix:///path" or "host:port".
        clock: for leases, estimates and effects.
        validate_configuration: raises where the data plane cannot run a configuration; a snapshot with such an arm is
            refused and the last good one kept.
        hold_artefact: takes over a calibrated artefact; a snapshot with one that it raises for is refused. None: this
            plane has no use for any, and is sent none.
        timing: intervals of the stream.
        effect_ring_capacity: how many unacknowledged effects are kept.
        rng: source of the reconnect jitter.
        engine: what a video engine's agent tells beside (see `VideoAgent`).
    """

    def __init__(
        self,
        identity: AgentIdentity,
        address: str,
        *,
        clock: Clock | None = None,
        validate_configuration: ValidateConfiguration = _accept_any,
        hold_artefact: HoldArtefact | None = None,
        timing: AgentTiming | None = None,
        effect_ring_capacity: int = EFFECT_RING_CAPACITY,
        rng: random.Random | None = None,
        engine: EngineDesk | None = None,
    ) -> None:
        self.identity = identity
        self.instance_id = uuid.uuid4().hex
        self._clock: Clock = clock or SystemClock()
        self._now_s: Callable[[], float] = self._clock.monotonic_s
        self._started_unix_s = self._clock.unix_s()
        self._counters = Counters()
        self._edge = ErrorEdge(self._counters)
        self._takes_artefacts = hold_artefact is not None
        self._in_force = InForce(
            self._clock,
            self._counters,
            validate_configuration,
            hold_artefact or (lambda artefact: None),
            engine_setting_name(identity.agent_id) if engine is not None else "",
        )
        self._engine = engine
        self._links = Links()
        self._attached = False
        self._attach_reason = "the data plane has not said that it is attached"
        self._effects = EffectRing(
            effect_ring_capacity,
            on_overflow=lambda: self._counters.count("effects_overflowed"),
            on_append=lambda: self._connection.wake(),
        )
        self._trials = TrialDesk(self._counters, self._edge, lambda: self._connection.wake())
        parts = SessionParts(
            in_force=self._in_force,
            effects=self._effects,
            trials=self._trials,
            counters=self._counters,
            edge=self._edge,
            timing=timing or AgentTiming(),
            telemetry=self._telemetry,
            engine=engine,
        )
        self._connection = Connection(address, self._hello, parts, self._tick, rng or random.Random())
        self._started = False

    # ----------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Start the agent's threads; does nothing when called again."""
        if self._started:
            return
        self._started = True
        try:
            self._connection.start()
        except RuntimeError as error:  # no thread to be had: the plane serves raw
            self._edge.caught("start", error)

    def close(self, timeout_s: float = 2.0) -> None:
        """End the stream; effects that wait get some of the time to be committed."""
        if not self._started:
            return
        try:
            self._connection.stop(timeout_s)
        except Exception as error:  # noqa: BLE001 - the edge towards the data plane
            self._edge.caught("close", error)

    def attached(self) -> None:
        """Say, from inside the hooked class, that transfers really pass through this plane."""
        self._attached, self._attach_reason = True, ""
        self._connection.telemetry_is_due()

    def not_attached(self, reason: str) -> None:
        """Say that transfers do not pass through this plane, and why."""
        self._attached, self._attach_reason = False, plain_text(reason)
        self._connection.telemetry_is_due()

    # ----------------------------------------------------------------------------------- decisions

    def classify(self, *, extra_key: str | None, priority: int | None) -> str:
        """The service class of a request; `default` (counted as `class_unmapped`) where no rule matches."""
        try:
            found = match_class(self._in_force.applied.rules, extra_key=extra_key, priority=priority)
        except Exception as error:  # noqa: BLE001 - the edge towards the data plane
            self._edge.caught("classify", error)
            found = None
        if found is None:
            self._counters.count("class_unmapped")
            return DEFAULT_CLASS
        return found

    def tenancy(self) -> Tenancy:
        """Who shares the links, and whose share a class uses; the same object until another snapshot applies."""
        return self._in_force.applied.tenancy

    def draw(
        self,
        *,
        transfer_id: str,
        service_class: str,
        raw_bytes: int,
        tier: str,
        link_group: str = "default",
    ) -> Draw:
        """The arm of a transfer of `raw_bytes`, without a lock and without the daemon.

        Raw (with its reason, counted) where there is no table, its lease is over, or the bandwidth is unknown.
        """
        try:
            applied = self._in_force.applied
            key = (tier, link_group)
            table = applied.tables.get(key)
            if table is None:
                return self._raw(RawReason.NO_TABLE, 0)
            if self._now_s() >= self._in_force.lease_ends_s:
                return self._raw(RawReason.LEASE_EXPIRED, table.version)
            link = self._links.get(key)
            bandwidth_bytes_per_s = link.bandwidth_bytes_per_s if link is not None else 0.0
            if bandwidth_bytes_per_s <= 0.0:
                set_up_bytes_per_s = link.set_up_bytes_per_s if link is not None else 0.0
                bandwidth_bytes_per_s = first_guess_bytes_per_s(set_up_bytes_per_s, table.prior_bandwidth_bytes_per_s)
                if bandwidth_bytes_per_s <= 0.0:
                    return self._raw(RawReason.BANDWIDTH_UNKNOWN, table.version)
            load = link.offered_bytes_per_s / bandwidth_bytes_per_s if link is not None else 0.0
            drawn = table.draw(transfer_id, service_class, raw_bytes, bandwidth_bytes_per_s, load)
            self_check = drawn.arm.configuration is not None and is_sampled(transfer_id, table.guard_sample)
            return Draw(drawn, bandwidth_bytes_per_s, load, self_check=self_check)
        except Exception as error:  # noqa: BLE001 - the edge towards the data plane
            self._edge.caught("draw", error)
            return self._raw(RawReason.INTERNAL_ERROR, 0)

    def _raw(self, reason: RawReason, table_version: int) -> Draw:
        self._counters.count(reason.value)
        return Draw(Drawn(RAW_ARM, False, -1, table_version), 0.0, 0.0, reason)

    # ----------------------------------------------------------------------------------- observations

    def offered(
        self, *, tier: str, link_group: str = "default", raw_bytes: int, service_class: str = DEFAULT_CLASS
    ) -> None:
        """A transfer arrived at the queue; it leaves it with the sender's `report`, or with `withdrawn`."""
        try:
            if service_class not in self._in_force.applied.unlearned:
                self._links.of((tier, link_group)).offered(self._now_s(), raw_bytes, service_class)
        except Exception as error:  # noqa: BLE001 - the edge towards the data plane
            self._edge.caught("offered", error)

    def withdrawn(
        self, *, tier: str, link_group: str = "default", raw_bytes: int, service_class: str = DEFAULT_CLASS
    ) -> None:
        """An offered transfer will have no effect: it was given up before it began."""
        try:
            if service_class not in self._in_force.applied.unlearned:
                self._links.of((tier, link_group)).left(raw_bytes)
        except Exception as error:  # noqa: BLE001 - the edge towards the data plane
            self._edge.caught("withdrawn", error)

    def observe_wire(
        self,
        *,
        tier: str,
        link_group: str = "default",
        start_s: float,
        end_s: float,
        wire_bytes: int,
        service_class: str = DEFAULT_CLASS,
    ) -> None:
        """One span on the wire, in seconds of the agent's monotonic clock, ending at the receiver's acknowledgement.

        A class that teaches nothing (an experiment's pinned arms) leaves the estimate as it is.
        """
        try:
            if service_class not in self._in_force.applied.unlearned:
                self._links.of((tier, link_group)).observe_wire(start_s, end_s, wire_bytes)
        except Exception as error:  # noqa: BLE001 - the edge towards the data plane
            self._edge.caught("observe_wire", error)

    def report(self, effect: Effect) -> None:
        """Queue an effect for the daemon; the oldest of a full ring is dropped and counted."""
        try:
            if effect.half is Half.SENDER and effect.service_class not in self._in_force.applied.unlearned:
                link = self._links.get((effect.tier, effect.link_group))
                if link is not None:
                    link.left(effect.raw_bytes)
            if effect.reason:
                effect = replace(effect, reason=plain_text(effect.reason))
            self._effects.append(effect)
        except Exception as error:  # noqa: BLE001 - the edge towards the data plane
            self._edge.caught("report", error)

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter of the data plane's own; names must be few and fixed."""
        try:
            self._counters.count(plain_text(name, MAX_NAME_CHARACTERS) or "other", max(0, int(n)))
        except Exception as error:  # noqa: BLE001 - the edge towards the data plane
            self._edge.caught("count", error)

    # ----------------------------------------------------------------------------------- trials, state

    def on_trial(self, handler: TrialHandler, run_in_thread: RunInThread | None = None) -> None:
        """Measure trials with `handler(task, progress, cancelled) -> TrialOutcome` (role "profiler").

        Args:
            handler: raising means a failed trial.
            run_in_thread: has a worker thread call what it is given, an executor's `submit` for instance; by default
                one thread of the agent's takes trials one after another.
        """
        self._trials.set_handler(handler, run_in_thread)

    def snapshot(self) -> AgentState:
        """What is applied and known now."""
        return AgentState(
            applied=self._in_force.applied,
            lease_left_s=self._in_force.lease_left_s(),
            connected=self._connection.is_welcomed(),
            attached=self._attached,
            attach_reason=self._attach_reason,
            unacknowledged_effects=len(self._effects),
            links=self._links.report(self._now_s()),
            counters=self._counters.totals(),
            instance_id=self.instance_id,
        )

    def _hello(self) -> pb.Hello:
        return self.identity.hello(
            instance_id=self.instance_id,
            started_unix_s=self._started_unix_s,
            takes_artefacts=self._takes_artefacts,
        )

    def _tick(self) -> None:
        self._links.refresh(self._now_s())

    def _telemetry(self) -> Telemetry:
        lease_left_s = self._in_force.lease_left_s()
        return Telemetry(
            attached=self._attached,
            attach_reason=self._attach_reason,
            applied_version=self._in_force.applied.version if lease_left_s > 0 else 0,
            links=self._links.report(self._now_s()),
            counters=self._counters.totals(),
            lease_left_s=lease_left_s,
            engine=self._engine.state if self._engine is not None else None,
        )
