"""A fleet server on a real socket with a real store, and agents that speak plain gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from controld.contract.clock import Clock
from controld.contract.configuration import Configuration
from controld.contract.decision import RAW, Arm, ClassRule, DecisionTable, Mixture
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.fleet_pb2_grpc import FleetStub
from controld.contract.rpc.limits import CLIENT_OPTIONS
from controld.contract.snapshot import ClassRules, Resource
from controld.fleet import FleetServer, FleetSettings, Selector
from controld.store.sqlite import SqliteStore

PATIENCE_S = 30.0
"""A busy machine may need some of it."""


class Heard:
    """Everything that the server told the daemon."""

    def __init__(self) -> None:
        self.effects: list[Any] = []
        self.telemetry: list[Any] = []
        self.trials: list[Any] = []
        self.sessions: list[Any] = []

    async def on_effects(self, _session: Any, effects: Any) -> None:
        self.effects.extend(effects)

    async def on_telemetry(self, _session: Any, telemetry: Any) -> None:
        self.telemetry.append(telemetry)

    async def on_trial_result(self, _session: Any, outcome: Any) -> None:
        self.trials.append(outcome)

    async def on_session(self, session: Any) -> None:
        self.sessions.append(session)


class RawAgent:
    """One stream of an agent, message by message."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        self.call = FleetStub(self.channel).Attach()

    @staticmethod
    def hello(agent_id: str = "p0", instance_id: str = "i1", **changes: Any) -> pb.AgentMessage:
        values: dict[str, Any] = {
            "protocol_version": 1,
            "deployment": "chat",
            "agent_id": agent_id,
            "instance_id": instance_id,
            "kind": "sglang",
            "role": "prefill",
            "role_peers": 1,
            "started_unix_s": 1_700_000_000.0,
        }
        return pb.AgentMessage(hello=pb.Hello(**{**values, **changes}))

    async def send(self, message: pb.AgentMessage) -> None:
        await self.call.write(message)

    async def receive(self) -> Any:
        """The next message's kind and body, or (None, None) at the end of the stream."""
        message = await asyncio.wait_for(self.call.read(), PATIENCE_S)
        if message is grpc.aio.EOF:
            return None, None
        kind = message.WhichOneof("message")
        return kind, getattr(message, kind)

    async def expect(self, kind: str) -> Any:
        """The next message, which must be of this kind."""
        got, body = await self.receive()
        assert got == kind, f"expected {kind}, got {got}: {body}"
        return body

    async def ack(self, snapshot: pb.Snapshot, version: int | None = None) -> None:
        chosen = snapshot.version if version is None else version
        await self.send(pb.AgentMessage(ack=pb.Ack(nonce=snapshot.nonce, version=chosen)))

    async def nack(self, snapshot: pb.Snapshot, error: str = "cannot") -> None:
        body = pb.Nack(nonce=snapshot.nonce, version=snapshot.version, error_detail=error, resource="t")
        await self.send(pb.AgentMessage(nack=body))

    async def telemetry(self, **values: Any) -> None:
        await self.send(pb.AgentMessage(telemetry=pb.Telemetry(**values)))

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = await SqliteStore.open(tmp_path / "state")
    yield opened
    await opened.close()


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
async def start_server(
    store: SqliteStore, tmp_path: Path, heard: Heard
) -> AsyncIterator[Callable[..., Awaitable[tuple[FleetServer, str]]]]:
    servers: list[FleetServer] = []

    async def start(clock: Clock | None = None, **settings: Any) -> tuple[FleetServer, str]:
        server = FleetServer(
            store,
            settings=FleetSettings(**settings),
            clock=clock,
            on_effects=heard.on_effects,
            on_telemetry=heard.on_telemetry,
            on_trial_result=heard.on_trial_result,
            on_session=heard.on_session,
        )
        servers.append(server)
        (address,) = await server.start([f"unix://{tmp_path}/f{len(servers)}.sock"])
        return server, address

    yield start
    for server in servers:
        await server.stop(0.2)


@pytest.fixture
async def server(start_server: Callable[..., Awaitable[tuple[FleetServer, str]]]) -> tuple[FleetServer, str]:
    return await start_server()


@pytest.fixture
async def connect(server: tuple[FleetServer, str]) -> AsyncIterator[Callable[..., Awaitable[RawAgent]]]:
    """Connects and says hello; `raw=True` only connects; `address` names another server."""
    agents: list[RawAgent] = []

    async def connect(*names: str, raw: bool = False, address: str = server[1], **changes: Any) -> RawAgent:
        agent = RawAgent(address)
        agents.append(agent)
        if not raw:
            await agent.send(RawAgent.hello(*names, **changes))
        return agent

    yield connect
    for agent in agents:
        await agent.close()


@pytest.fixture
def selector() -> Selector:
    return Selector("sglang", "chat")


@pytest.fixture
def resources() -> tuple[Resource, ...]:
    coded = Configuration({"code": "zstd", "key_levels": 16})
    table = DecisionTable(
        tier="pd",
        link_group="default",
        version=1,
        classes=("chat", "default"),
        size_edges_bytes=(1e6,),
        bandwidth_edges_bytes_per_s=(),
        load_edges=(),
        arms=(Arm(RAW), Arm(coded.config_id, coded)),
        mixtures=(Mixture((0,), (1.0,)), Mixture((1, 0), (0.98, 0.02))),
        cells=(0, 1, 0, 0),
    )
    return (
        Resource("pd/default", table),
        Resource("classes", ClassRules((ClassRule("chat", extra_key="class=chat"),))),
    )


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits for a condition that another task brings about."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)

    return wait
