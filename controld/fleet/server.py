"""The fleet server: takes streams in, publishes versions, and tells the rest of the daemon what agents say."""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from controld.contract.clock import Clock, SystemClock
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.convert import PROTOCOL_VERSION
from controld.contract.rpc.convert_trial import trial_task_to_proto
from controld.contract.rpc.fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server
from controld.contract.rpc.limits import MAX_PAGE_BYTES, SERVER_OPTIONS
from controld.contract.snapshot import Resource
from controld.contract.telemetry import Telemetry
from controld.contract.trial import TrialOutcome, TrialTask
from controld.contract.video import Applied, ChunkReport
from controld.fleet.audit import FleetAudit
from controld.fleet.errors import FleetError, RejectError
from controld.fleet.identity import AgentIdentity, identity_from_hello
from controld.fleet.published import Published, Selector, SizedResource, resources_json, sized_resources
from controld.fleet.registry import AgentEntry, Registry
from controld.fleet.session import AgentSession
from controld.fleet.stream import AgentStream, StreamContext
from controld.fleet.tally import Tally
from controld.store.errors import ConflictError, StoreError
from controld.store.interface import Store
from controld.store.records import AuditEvent, EffectRecord, VersionRecord

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

OnEffects = Callable[[AgentSession, tuple[EffectRecord, ...]], Awaitable[None]]
OnTelemetry = Callable[[AgentSession, Telemetry], Awaitable[None]]
OnTrialResult = Callable[[AgentSession, TrialOutcome], Awaitable[None]]
OnSession = Callable[[AgentSession], Awaitable[None]]
OnApplied = Callable[[AgentSession, Applied], Awaitable[None]]
OnChunks = Callable[[AgentSession, tuple[ChunkReport, ...]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Seconds and bytes.

    Args:
        lease_ttl_s: how long an agent may use what it has without hearing from us.
        lease_interval_s: how often that is renewed.
        hello_timeout_s: how long a stream may be silent before its first message.
        page_bytes: about how large one message of a snapshot may be.
        drain_reconnect_s: what agents are told to wait when this daemon stops.
    """

    lease_ttl_s: float = 600.0
    lease_interval_s: float = 30.0
    hello_timeout_s: float = 10.0
    page_bytes: int = MAX_PAGE_BYTES
    drain_reconnect_s: float = 1.0


class FleetServer(FleetServicer):
    """Serves agents on one event loop.

    A callback that raises is logged and counted (`callback_failed`); the stream goes on.

    Args:
        store: where versions, effects and audit events go.
        on_effects: awaited with effects that are new and durable, in order, for each agent.
        on_telemetry: awaited with each valid report.
        on_trial_result: awaited with each valid trial result, progress included.
        on_session: awaited when an agent has connected or left (`session.connected` says which).
        on_applied: awaited with each valid answer of a video engine to a setting.
        on_chunks: awaited with the valid chunk reports of a message.
    """

    def __init__(
        self,
        store: Store,
        *,
        settings: FleetSettings | None = None,
        clock: Clock | None = None,
        on_effects: OnEffects | None = None,
        on_telemetry: OnTelemetry | None = None,
        on_trial_result: OnTrialResult | None = None,
        on_session: OnSession | None = None,
        on_applied: OnApplied | None = None,
        on_chunks: OnChunks | None = None,
    ) -> None:
        self.store = store
        self.settings = settings or FleetSettings()
        self.clock = clock or SystemClock()
        self.server_id = secrets.token_hex(8)
        self.tally = Tally()
        self.audit = FleetAudit(store.audit, self.tally)
        self.last_version = 0
        self._on_effects = on_effects
        self._on_telemetry = on_telemetry
        self._on_trial_result = on_trial_result
        self._on_session = on_session
        self._on_applied = on_applied
        self._on_chunks = on_chunks
        self._registry = Registry(self.clock, self.tally)
        self._published: dict[Selector, Published] = {}
        self._policy_generation = 0
        self._publishing = asyncio.Lock()
        self._server: grpc.aio.Server | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._stopping = False

    # ------------------------------------------------------------------------------------ life

    async def start(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """Listen on `unix:///path` and `host:port` addresses.

        Returns:
            The addresses as bound: a port 0 has become a real one.

        Raises:
            FleetError: an address cannot be bound.
            StoreError: the last version's number cannot be read.
        """
        self.last_version = await self.store.versions.last_number()
        self._policy_generation = (await self.store.policy_generations.current()).generation
        server = grpc.aio.server(options=SERVER_OPTIONS)
        add_FleetServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        bound = tuple(_bind(server, address) for address in addresses)
        await server.start()
        self._server = server
        return bound

    async def stop(self, grace_s: float = 2.0) -> None:
        """Say goodbye to all agents, wait at most `grace_s` for their streams to end, then cut them off."""
        self._stopping = True
        for entry in self._registry:
            if entry.stream is not None:
                entry.stream.drain("controld stops", self.settings.drain_reconnect_s)
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s)
        while self._background:
            await asyncio.wait(self._background)
        await self.audit.flush()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that `stop` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # ------------------------------------------------------------------------------------ for the daemon

    def sessions(self, *, include_gone: bool = False) -> tuple[AgentSession, ...]:
        """The agents connected now, or all that are remembered."""
        now_s = self.clock.monotonic_s()
        return tuple(
            entry.view(now_s, self.last_version) for entry in self._registry if include_gone or entry.stream is not None
        )

    def desired(self, selector: Selector) -> Published | None:
        """What was last published for a selector in this process."""
        return self._published.get(selector)

    async def publish(
        self,
        selector: Selector,
        resources: Sequence[Resource],
        *,
        policy_generation: int,
        explanations_json: str = "{}",
    ) -> int:
        """Keep the next version in the store, then push it to every agent that the selector names.

        The resources are everything that these agents should have; what is not among them goes. The number given here
        is the version of every decision table in it, whatever version the table was built with.

        Returns:
            The version's number.

        Raises:
            StoreError: it could not be kept; nothing was pushed.
            FleetError, FieldError: a resource cannot be sent.
        """
        # Many or large tables take a while to convert; streams must not wait for it.
        sized, document = await asyncio.to_thread(_prepare, resources)
        async with self._publishing:
            number = await self._append_version(selector, policy_generation, document, explanations_json)
            published = Published(number, policy_generation, sized)
            self.last_version = number
            self._policy_generation = max(self._policy_generation, policy_generation)
            self._published[selector] = published
            for entry in self._registry:
                if entry.identity.selector == selector:
                    entry.delivery.want(published)
                    if entry.stream is not None:
                        entry.stream.wake()
        self.tally.add("versions_published")
        self.audit.note(
            AuditEvent.VERSION_PUBLISHED,
            version=number,
            kind=selector.kind,
            deployment=selector.deployment,
            policy_generation=policy_generation,
            resources=[resource.name for resource in sized],
        )
        return number

    async def _append_version(
        self, selector: Selector, policy_generation: int, tables_json: str, explanations_json: str
    ) -> int:
        number = self.last_version + 1
        while True:
            record = VersionRecord(
                number=number,
                kind=selector.kind,
                deployment=selector.deployment,
                policy_generation=policy_generation,
                created_unix_s=self.clock.unix_s(),
                tables_json=tables_json,
                explanations_json=explanations_json,
            )
            try:
                await self.store.versions.append(record)
                return number
            except ConflictError:
                # Another controld on the same store has published since.
                number = await self.store.versions.last_number() + 1

    def request_trial(self, agent_id: str, task: TrialTask) -> None:
        """Ask a profiling worker. Raises: FleetError: it is not connected."""
        message = pb.ControlMessage(trial_request=trial_task_to_proto(task))
        self._connected(agent_id).send_trial(message)

    def cancel_trial(self, agent_id: str, study_id: str, trial_id: str = "") -> None:
        """Ask a worker to drop a trial, or all of a study. Raises: FleetError: it is not connected."""
        cancel = pb.TrialCancel(study_id=study_id, trial_id=trial_id)
        self._connected(agent_id).send_trial(pb.ControlMessage(trial_cancel=cancel))

    def _connected(self, agent_id: str) -> AgentStream:
        entry = self._registry.get(agent_id)
        if entry is None or entry.stream is None:
            raise FleetError(f"agent {agent_id} is not connected", code="fleet.not_connected")
        return entry.stream

    # ------------------------------------------------------------------------------------ streams

    async def Attach(self, _requests: object, context: StreamContext) -> None:  # noqa: N802 - gRPC names it
        """One agent's stream."""
        self.tally.add("streams")
        try:
            identity = await self._hello(context)
            entry, replaced = self._registry.admit(identity, context.peer())
            stream = AgentStream(entry, context, self)
            # From here to the `try` nothing may wait, or two streams could both think that they are the agent's.
            entry.stream = stream
        except RejectError as error:
            await self._reject(context, error)
            return
        try:
            if replaced is not None:
                replaced.drain("replaced by a newer stream of this agent", 30.0)
            await self._serve(entry, stream, context)
        finally:
            if entry.stream is stream:
                entry.stream = None
                entry.left_at_s = self.clock.monotonic_s()
                if not self._stopping:
                    self.audit.note(AuditEvent.AGENT_LOST, **_names(identity))
                if self._registry.is_current(entry):
                    self.in_background(self._notify("on_session", self._on_session, self._view(entry)))

    async def _serve(self, entry: AgentEntry, stream: AgentStream, context: grpc.aio.ServicerContext) -> None:
        identity = entry.identity
        entry.peer = context.peer()
        entry.connected_since_unix_s = self.clock.unix_s()
        try:
            acked = await self.store.effects.acked_up_to(identity.agent_id, identity.instance_id)
        except StoreError as error:
            # It sends again what it has; what is known already is recognised by its identity.
            acked = 0
            self.tally.add("store_failed", error.code)
            _log.error("acknowledged effects of %s unknown: %s", identity.agent_id, error)
        entry.effects_acked_up_to = acked
        published = self._published.get(identity.selector)
        if published is not None:
            entry.delivery.want(published)
        self.audit.note(AuditEvent.AGENT_CONNECTED, **_names(identity), peer=entry.peer)
        self.in_background(self._notify("on_session", self._on_session, self._view(entry)))
        await stream.serve(
            pb.Welcome(
                protocol_version=PROTOCOL_VERSION,
                server_id=self.server_id,
                policy_generation=self._policy_generation,
                effects_acked_up_to=acked,
            )
        )

    async def _hello(self, context: StreamContext) -> AgentIdentity:
        if self._stopping:
            raise RejectError("controld stops", code="hello.stopping", hint="reconnect in a moment")
        try:
            async with asyncio.timeout(self.settings.hello_timeout_s):
                first = await context.read()
        except TimeoutError:
            raise RejectError(f"no hello within {self.settings.hello_timeout_s:g} s", code="hello.timeout") from None
        except DecodeError as error:
            raise RejectError(f"the first message is malformed: {error}", code="hello.missing") from error
        if not isinstance(first, pb.AgentMessage) or first.WhichOneof("message") != "hello":
            raise RejectError("the first message must be hello", code="hello.missing")
        try:
            return identity_from_hello(first.hello, now_unix_s=self.clock.unix_s())
        except RejectError as error:
            names = {name: getattr(first.hello, name)[:256] for name in ("agent_id", "deployment", "kind")}
            self.audit.note_distinct(AuditEvent.AGENT_REJECTED, code=error.code, reason=error.message, **names)
            raise

    async def _reject(self, context: StreamContext, error: RejectError) -> None:
        self.tally.add("streams_rejected", error.code)
        _log.warning("agent turned away: %s", error, extra={"code": error.code})
        if error.code == "hello.fenced":
            self.audit.note_distinct(AuditEvent.AGENT_FENCED, reason=error.message)
        await context.write(pb.ControlMessage(reject=pb.Reject(code=error.code, reason=str(error))))

    # ------------------------------------------------------------------------------------ to the daemon

    async def notify_effects(self, entry: AgentEntry, effects: tuple[EffectRecord, ...]) -> None:
        """New and durable effects of an agent."""
        await self._notify("on_effects", self._on_effects, self._view(entry), effects)

    async def notify_telemetry(self, entry: AgentEntry, telemetry: Telemetry) -> None:
        """A valid report of an agent."""
        await self._notify("on_telemetry", self._on_telemetry, self._view(entry), telemetry)

    async def notify_trial(self, entry: AgentEntry, outcome: TrialOutcome) -> None:
        """A valid trial result of an agent."""
        await self._notify("on_trial_result", self._on_trial_result, self._view(entry), outcome)

    async def notify_applied(self, entry: AgentEntry, applied: Applied) -> None:
        """A video engine's answer to a setting."""
        await self._notify("on_applied", self._on_applied, self._view(entry), applied)

    async def notify_chunks(self, entry: AgentEntry, reports: tuple[ChunkReport, ...]) -> None:
        """Chunks that a video engine made."""
        await self._notify("on_chunks", self._on_chunks, self._view(entry), reports)

    async def _notify(self, name: str, callback: Callable[..., Awaitable[None]] | None, *arguments: object) -> None:
        if callback is None:
            return
        try:
            await callback(*arguments)
        except Exception:  # noqa: BLE001 - another component's code: its faults must not end the stream
            self.tally.add("callback_failed", name)
            _log.exception("%s failed", name)

    def _view(self, entry: AgentEntry) -> AgentSession:
        return entry.view(self.clock.monotonic_s(), self.last_version)


def _prepare(resources: Sequence[Resource]) -> tuple[tuple[SizedResource, ...], str]:
    sized = sized_resources(resources)
    return sized, resources_json(sized)


def _names(identity: AgentIdentity) -> dict[str, object]:
    return {
        "agent_id": identity.agent_id,
        "instance_id": identity.instance_id,
        "deployment": identity.deployment,
        "kind": identity.kind,
        "role": identity.role,
        "rank": identity.rank,
    }


def _is_listening(path: Path) -> bool:
    """Whether a socket has a process behind it; one that was killed leaves its file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) != errno.ECONNREFUSED


def _bind(server: grpc.aio.Server, address: str) -> str:
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:").removeprefix("//"))
        if path.is_socket():
            if _is_listening(path):
                raise FleetError(
                    f"{address}: another process listens there",
                    code="fleet.address",
                    hint="stop it, or use another path",
                )
            path.unlink()
        else:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise FleetError(f"{address}: {path.parent}: {error.strerror}", code="fleet.address") from error
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise FleetError(f"{address}: cannot be bound: {error}", code="fleet.address") from error
    if address.startswith("unix:"):
        return address
    return f"{address.rpartition(':')[0]}:{port}"
