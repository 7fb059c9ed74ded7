"""A scripted daemon on a real gRPC stream, and what a snapshot needs."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from controld.contract.configuration import Configuration
from controld.contract.decision import RAW, Arm, ClassRule, DecisionTable, Mixture
from controld.contract.effect import Effect, Half, Verdict
from controld.contract.effect import Path as EffectPath
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc import fleet_pb2_grpc
from controld.contract.rpc.convert import PROTOCOL_VERSION, resource_to_proto
from controld.contract.snapshot import ClassRules, Resource, TenantShare
from dataplanes.agent import Agent, AgentIdentity, AgentTiming

PATIENCE_S = 60.0
"""A busy machine may need some of it."""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {PATIENCE_S} s in vain until {what}")
        time.sleep(0.005)


class Stream:
    """One agent's stream as the scripted daemon sees it."""

    END = object()

    def __init__(self, context: grpc.ServicerContext) -> None:
        self.context = context
        self.received: list[pb.AgentMessage] = []
        self.to_send: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.ended = threading.Event()

    def send(self, **message: object) -> None:
        self.to_send.put(pb.ControlMessage(**message))

    def finish(self) -> None:
        """Close the daemon's half."""
        self.to_send.put(self.END)

    def of_kind(self, kind: str) -> list[object]:
        return [getattr(m, kind) for m in list(self.received) if m.WhichOneof("message") == kind]

    def wait_for(self, kind: str, count: int = 1) -> list[object]:
        wait_until(lambda: len(self.of_kind(kind)) >= count, f"{count} {kind} arrived")
        return self.of_kind(kind)

    def effect_seqs(self) -> list[int]:
        return [effect.seq for report in self.of_kind("effects") for effect in report.effects]


class Daemon(fleet_pb2_grpc.FleetServicer):
    """Answers Hello with Welcome (unless told otherwise) and leaves all else to the test."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.welcome: pb.ControlMessage | None = pb.ControlMessage(
            welcome=pb.Welcome(protocol_version=PROTOCOL_VERSION, server_id="scripted")
        )
        self.greeting: list[pb.ControlMessage] = []
        """What follows the welcome at once."""

        self.streams: list[Stream] = []
        self._server: grpc.Server | None = None

    def start(self) -> None:
        server = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
        fleet_pb2_grpc.add_FleetServicer_to_server(self, server)
        server.add_insecure_port(self.address)
        server.start()
        self._server = server

    def stop(self) -> None:
        for stream in self.streams:
            stream.finish()
        if self._server is not None:
            self._server.stop(grace=None).wait(PATIENCE_S)
            self._server = None

    def Attach(self, requests: Iterator[pb.AgentMessage], context: grpc.ServicerContext) -> Iterator[pb.ControlMessage]:  # noqa: N802
        stream = Stream(context)
        context.add_callback(stream.finish)

        def receive() -> None:
            try:
                for message in requests:
                    stream.received.append(message)
            except grpc.RpcError:
                pass
            except Exception:  # noqa: BLE001 - grpc raises a bare Exception where the peer went away
                pass
            stream.ended.set()

        threading.Thread(target=receive, daemon=True).start()
        self.streams.append(stream)
        if self.welcome is not None:
            yield self.welcome
        yield from self.greeting
        while (message := stream.to_send.get()) is not Stream.END:
            yield message

    def stream(self, number: int = 0) -> Stream:
        wait_until(lambda: len(self.streams) > number, f"stream {number} came")
        return self.streams[number]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    scripted = Daemon(f"unix://{tmp_path}/fleet.sock")
    scripted.start()
    yield scripted
    scripted.stop()


@pytest.fixture
def identity() -> AgentIdentity:
    return AgentIdentity(deployment="chat", agent_id="p0", kind="sglang", role="prefill", tiers=("pd",))


@pytest.fixture
def timing() -> AgentTiming:
    return AgentTiming(telemetry_interval_s=0.05, effect_delay_s=0.01, backoff_first_s=0.02, backoff_max_s=0.1)


CONFIGURATIONS = tuple(
    Configuration({"transform": "hadamard", "key_levels": levels, "code": "bits"}) for levels in (4, 8, 12)
)


def build_table(
    *, version: int = 1, prior: float = 1e7, arm: int = 1, mixed: bool = False, tier: str = "pd"
) -> DecisionTable:
    """Two sizes and two bandwidths; every cell holds arm number `arm` (0 is raw), or a mixture with raw."""
    arms = (Arm(RAW), *(Arm(c.config_id, c) for c in CONFIGURATIONS))
    mixture = Mixture((arm, 0), (0.75, 0.25)) if mixed else Mixture((arm,), (1.0,))
    return DecisionTable(
        tier=tier,
        link_group="default",
        version=version,
        classes=("chat", "default"),
        size_edges_bytes=(1e6,),
        bandwidth_edges_bytes_per_s=(1e7,),
        load_edges=(0.5,),
        arms=arms,
        mixtures=(mixture,),
        cells=(0,) * 16,
        prior_bandwidth_bytes_per_s=prior,
    )


def build_snapshot(
    version: int = 1,
    *,
    nonce: str | None = None,
    ttl_s: float = 600.0,
    table: DecisionTable | None = None,
    rules: tuple[ClassRule, ...] = (ClassRule("chat", extra_key="class=chat"),),
    tenants: tuple[TenantShare, ...] = (),
) -> pb.Snapshot:
    table = table or build_table(version=version)
    return pb.Snapshot(
        version=version,
        nonce=nonce or f"n{version}",
        ttl_s=ttl_s,
        resources=[
            resource_to_proto(Resource("pd/default", table)),
            resource_to_proto(Resource("classes", ClassRules(rules, tenants))),
        ],
        page_count=1,
    )


def build_effect(transfer_id: str = "t1", **changes: object) -> Effect:
    values: dict[str, object] = {
        "transfer_id": transfer_id,
        "half": Half.SENDER,
        "arm_id": "raw",
        "table_version": 1,
        "service_class": "chat",
        "tier": "pd",
        "link_group": "default",
        "tokens": 600,
        "chunks": 1,
        "raw_bytes": 14_000_000,
        "wire_bytes": 14_000_000,
        "encode_s": 0.0,
        "wire_s": 1.4,
        "decode_s": 0.0,
        "wait_s": 0.0,
        "total_s": 1.4,
        "path": EffectPath.RAW,
        "verdict": Verdict.VERIFIED,
    }
    return Effect(**{**values, **changes})


@pytest.fixture
def make_table() -> Callable[..., DecisionTable]:
    return build_table


@pytest.fixture
def make_snapshot() -> Callable[..., pb.Snapshot]:
    return build_snapshot


@pytest.fixture
def make_effect() -> Callable[..., Effect]:
    return build_effect


@pytest.fixture
def until() -> Callable[[Callable[[], bool], str], None]:
    return wait_until


@pytest.fixture
def make_agent(identity: AgentIdentity, timing: AgentTiming) -> Iterator[Callable[..., Agent]]:
    """Makes agents (of `identity`, with short intervals unless told otherwise) and closes them afterwards."""
    agents: list[Agent] = []

    def make(address: str, **options: object) -> Agent:
        agent = Agent(identity, address, **{"timing": timing, **options})
        agents.append(agent)
        return agent

    yield make
    for agent in agents:
        agent.close(timeout_s=0.1)
