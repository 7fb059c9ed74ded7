"""The stream as the daemon sees it, and how it comes back when the daemon goes, hangs or talks nonsense."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import time

import pytest

from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.convert import PROTOCOL_VERSION
from dataplanes.agent import AgentIdentity, AgentTiming, address_from_environment
from dataplanes.agent.connection import Backoff

TRANSFER = {"transfer_id": "t", "service_class": "chat", "raw_bytes": 14_000_000, "tier": "pd"}

# A daemon in a process of its own: welcomes, sends the snapshot of a file, then (by mode) reads on, reads nothing or
# floods. It can be killed as a real one can.
OTHER_PROCESS = textwrap.dedent(
    """
    import sys, time
    from concurrent import futures
    import grpc
    from controld.contract.rpc import fleet_pb2 as pb, fleet_pb2_grpc

    address, mode, snapshot_file = sys.argv[1:]
    snapshot = pb.Snapshot.FromString(open(snapshot_file, "rb").read())

    class Fleet(fleet_pb2_grpc.FleetServicer):
        def Attach(self, requests, context):
            next(requests)
            yield pb.ControlMessage(welcome=pb.Welcome(protocol_version=1, server_id="other"))
            yield pb.ControlMessage(snapshot=snapshot)
            if mode == "flood":
                while True:
                    yield pb.ControlMessage(snapshot=snapshot)
            if mode == "read":
                for message in requests:
                    pass
            time.sleep(3600)

    server = grpc.server(futures.ThreadPoolExecutor(4))
    fleet_pb2_grpc.add_FleetServicer_to_server(Fleet(), server)
    assert server.add_insecure_port(address)
    server.start()
    print("up", flush=True)
    time.sleep(3600)
    """
)


@pytest.fixture
def other_process(tmp_path, make_snapshot):
    """Starts daemons in processes of their own on one address; kills what is left of them."""
    started = []
    address = f"unix://{tmp_path}/other.sock"
    (tmp_path / "snapshot").write_bytes(make_snapshot(1).SerializeToString())

    def start(mode):
        command = [sys.executable, "-c", OTHER_PROCESS, address, mode, str(tmp_path / "snapshot")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process

    yield address, start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def drawn_version(agent):
    return agent.draw(**TRANSFER).drawn.table_version


def test_hello_says_who_and_what(daemon, make_agent, timing):
    identity = AgentIdentity(
        deployment="chat",
        agent_id="p3",
        kind="sglang",
        role="prefill",
        rank=3,
        role_peers=4,
        model_name="m",
        model_fingerprint="f" * 64,
        kv_dtype="bfloat16",
        kv_bytes_per_token=23_040,
        device="cpu",
        torch_version="2.13.0",
        threads=1,
        config_hash="c0",
        space_json="{}",
        tiers=("pd", "prefix_store"),
    )
    from dataplanes.agent import Agent

    agent = Agent(identity, daemon.address, timing=timing)
    agent.start()
    agent.start()  # once is enough
    hello = daemon.stream().wait_for("hello")[0]
    agent.close()
    assert hello.protocol_version == PROTOCOL_VERSION
    assert hello.instance_id == agent.instance_id
    assert hello.started_unix_s > 1.6e9
    assert (hello.agent_id, hello.rank, hello.role_peers) == ("p3", 3, 4)
    assert (hello.model.fingerprint, hello.model.kv_bytes_per_token) == ("f" * 64, 23_040)
    assert (hello.hardware.device, hello.hardware.threads) == ("cpu", 1)
    assert list(hello.capabilities.tiers) == ["pd", "prefix_store"]
    assert "decision_table" in hello.capabilities.resource_kinds
    assert len(daemon.streams) == 1


def test_telemetry_says_whether_the_plane_is_attached_and_why_not(daemon, make_agent, until):
    agent = make_agent(daemon.address)
    agent.start()
    stream = daemon.stream()
    assert not stream.wait_for("telemetry")[0].attached
    agent.not_attached("hook failed:\n\x1b[31mno such class\udc80")
    reason = "hook failed: ?[31mno such class?"
    until(lambda: stream.of_kind("telemetry")[-1].attach_reason == reason, "the reason arrives")
    agent.attached()
    until(lambda: stream.of_kind("telemetry")[-1].attached, "it is attached")
    assert stream.of_kind("telemetry")[-1].attach_reason == ""


def test_telemetry_reports_links_and_counters_again_and_again(daemon, make_agent, until):
    agent = make_agent(daemon.address)
    agent.start()
    stream = daemon.stream()
    now_s = time.monotonic()
    for start_s, wire_bytes in ((now_s - 3, 1000), (now_s - 2, 5_000_000), (now_s - 1, 5_000_000)):
        agent.observe_wire(tier="pd", start_s=start_s, end_s=start_s + 1, wire_bytes=wire_bytes)
    agent.offered(tier="pd", raw_bytes=123)
    agent.count("fallback.checksum", 2)
    until(lambda: any(t.counters.get("fallback.checksum") == 2 for t in stream.of_kind("telemetry")), "counters arrive")
    telemetry = stream.of_kind("telemetry")[-1]
    link = telemetry.links[0]
    assert (link.tier, link.link_group, link.backlog_bytes, link.transfers) == ("pd", "default", 123, 2)
    assert link.bandwidth_bytes_per_s == pytest.approx(5e6)
    assert 0 < link.bandwidth_sd_bytes_per_s < 5e6
    assert 0 <= link.bandwidth_age_s < 10
    assert link.offered_bytes_per_s > 0
    stream.wait_for("telemetry", len(stream.of_kind("telemetry")) + 3)


def test_a_daemon_that_comes_late_is_found(daemon, make_agent, make_snapshot):
    daemon.stop()
    agent = make_agent(daemon.address)
    agent.start()
    assert agent.draw(**TRANSFER).reason == "no_table"
    time.sleep(0.2)
    daemon.start()
    stream = daemon.stream()
    stream.send(snapshot=make_snapshot(1))
    stream.wait_for("ack")
    assert agent.snapshot().connected
    assert drawn_version(agent) == 1


def test_the_last_known_good_outlives_the_daemon_until_its_lease_ends(daemon, make_agent, make_snapshot, until):
    from controld.contract.clock import ManualClock

    clock = ManualClock()
    agent = make_agent(daemon.address, clock=clock)
    agent.start()
    stream = daemon.stream()
    stream.send(snapshot=make_snapshot(1, ttl_s=600.0))
    stream.wait_for("ack")
    daemon.stop()
    until(lambda: not agent.snapshot().connected, "the stream has ended")
    assert drawn_version(agent) == 1
    clock.advance(599.0)
    assert agent.draw(**TRANSFER).reason is None
    clock.advance(1.0)
    assert agent.draw(**TRANSFER).reason == "lease_expired"
    daemon.start()
    restarted = daemon.stream(1)
    hello = restarted.wait_for("hello")[0]
    assert hello.instance_id == agent.instance_id
    restarted.send(snapshot=make_snapshot(2))
    restarted.wait_for("ack")
    assert drawn_version(agent) == 2


@pytest.mark.parametrize("mode", ["read", "deaf", "flood"])
def test_a_daemon_killed_in_the_middle_of_the_stream_changes_no_draw(
    other_process, make_agent, make_effect, until, mode
):
    address, start = other_process
    process = start(mode)
    agent = make_agent(address)
    agent.start()
    until(lambda: drawn_version(agent) == 1, "the snapshot is applied")
    for number in range(2000):  # a stream that is full of our own messages, too
        agent.report(make_effect(f"t{number}"))
    process.kill()
    process.wait()
    until(lambda: not agent.snapshot().connected, "the stream has ended")
    assert drawn_version(agent) == 1
    assert agent.snapshot().unacknowledged_effects == 2000
    start("read")
    until(lambda: agent.snapshot().connected, "it is connected again")
    assert "internal_error" not in agent.snapshot().counters


def test_a_refusing_daemon_is_asked_again_at_the_longest_interval(daemon, make_agent, until):
    daemon.welcome = pb.ControlMessage(reject=pb.Reject(code="hello.fenced", reason="a newer instance is here"))
    agent = make_agent(
        daemon.address, timing=AgentTiming(telemetry_interval_s=0.05, backoff_first_s=0.01, backoff_max_s=0.3)
    )
    agent.start()
    daemon.stream(2)
    began_s = time.monotonic()
    count = len(daemon.streams)
    until(lambda: len(daemon.streams) >= count + 2, "it asks again")
    # Of two waits of 0.3 s the first had begun; doubling waits would be of 0.04 and 0.08 s here.
    assert time.monotonic() - began_s > 0.25
    assert agent.snapshot().counters["rejected"] >= 3
    assert agent.draw(**TRANSFER).reason == "no_table"


@pytest.mark.parametrize(
    "first",
    [
        pb.ControlMessage(welcome=pb.Welcome(protocol_version=99)),
        pb.ControlMessage(snapshot=pb.Snapshot(version=1)),
        pb.ControlMessage(effect_ack=pb.EffectAck(up_to_seq=5)),
    ],
)
def test_a_daemon_that_does_not_begin_with_our_welcome_is_left(daemon, make_agent, first):
    daemon.welcome = first
    agent = make_agent(daemon.address, timing=AgentTiming(backoff_first_s=0.01, backoff_max_s=0.05))
    agent.start()
    daemon.stream(1)
    assert not agent.snapshot().connected
    assert "internal_error" not in agent.snapshot().counters


def test_a_message_of_an_unknown_kind_is_tolerated(daemon, make_agent, make_snapshot):
    agent = make_agent(daemon.address)
    agent.start()
    stream = daemon.stream()
    unknown = pb.ControlMessage()
    unknown.MergeFromString(bytes([0xFA, 0x01, 0x01]) + b"x")
    stream.to_send.put(unknown)
    stream.send(snapshot=make_snapshot(1))
    stream.wait_for("ack")
    assert agent.snapshot().counters["message_kind_unknown"] == 1


def test_a_daemon_that_sends_no_protobuf_is_left_and_the_next_one_is_served(
    tmp_path, make_agent, make_snapshot, until, daemon
):
    from concurrent import futures

    import grpc

    daemon.stop()

    def garbage(requests, context):
        next(requests)
        yield b"\xff\xff\xff\xff garbage"

    handler = grpc.method_handlers_generic_handler(
        "controld.v1.Fleet", {"Attach": grpc.stream_stream_rpc_method_handler(garbage)}
    )
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(daemon.address)
    server.start()
    agent = make_agent(daemon.address)
    agent.start()
    until(lambda: agent.snapshot().counters.get("streams_ended", 0) >= 2, "it has been left twice")
    assert "internal_error" not in agent.snapshot().counters
    server.stop(None).wait()
    daemon.start()
    stream = daemon.stream()
    stream.send(snapshot=make_snapshot(1))
    stream.wait_for("ack")
    assert drawn_version(agent) == 1


def test_a_daemon_that_never_welcomes_is_left(daemon, make_agent, until):
    daemon.welcome = None
    agent = make_agent(
        daemon.address, timing=AgentTiming(telemetry_interval_s=0.02, welcome_timeout_s=0.1, backoff_max_s=0.1)
    )
    agent.start()
    daemon.stream(1)
    assert agent.snapshot().counters["welcome_timeouts"] >= 1
    assert all({m.WhichOneof("message") for m in s.received} <= {"hello"} for s in daemon.streams)


def test_a_daemon_that_falls_silent_is_left(daemon, make_agent, make_snapshot, until):
    agent = make_agent(
        daemon.address, timing=AgentTiming(telemetry_interval_s=0.02, silence_limit_s=0.2, backoff_first_s=0.01)
    )
    daemon.greeting = [pb.ControlMessage(snapshot=make_snapshot(1))]
    agent.start()
    daemon.stream(1)
    assert agent.snapshot().counters["silent_daemon"] >= 1
    until(lambda: drawn_version(agent) == 1, "the snapshot is applied")


def test_a_half_closed_stream_is_replaced(daemon, make_agent, make_snapshot):
    agent = make_agent(daemon.address)
    agent.start()
    stream = daemon.stream()
    stream.send(snapshot=make_snapshot(1))
    stream.wait_for("ack")
    stream.finish()
    again = daemon.stream(1)
    again.send(snapshot=make_snapshot(2))
    again.wait_for("ack")
    assert drawn_version(agent) == 2


@pytest.mark.parametrize(("wait_s", "at_least_s"), [(0.4, 0.35), (float("nan"), 0.0), (-3.0, 0.0)])
def test_a_draining_daemon_says_when_to_come_back(daemon, make_agent, wait_s, at_least_s):
    agent = make_agent(daemon.address)
    agent.start()
    stream = daemon.stream()
    stream.wait_for("telemetry")
    began_s = time.monotonic()
    stream.send(drain={"reason": "restart", "reconnect_after_s": wait_s})
    daemon.stream(1)
    assert time.monotonic() - began_s >= at_least_s


def test_close_ends_the_threads_in_time_whatever_the_daemon_does(other_process, make_agent, make_effect, until):
    import threading

    address, start = other_process
    start("deaf")
    agent = make_agent(address)
    agent.start()
    until(lambda: drawn_version(agent) == 1, "the snapshot is applied")
    for number in range(5000):
        agent.report(make_effect(f"t{number}"))
    began_s = time.monotonic()
    agent.close(timeout_s=1.0)
    assert time.monotonic() - began_s < 5.0, "not when the daemon reads again"
    until(
        lambda: not any(t.name.startswith("controld-agent") and t.is_alive() for t in threading.enumerate()),
        "the threads have ended",
    )
    assert agent.draw(**TRANSFER).drawn.table_version == 1  # a closed agent still answers


def test_backoff_doubles_up_to_its_limit_with_jitter_and_starts_afresh():
    backoff = Backoff(0.1, 5.0, random.Random(1))
    waits = [backoff.next_s() for _ in range(200)]
    for attempt, wait_s in enumerate(waits):
        full_s = min(5.0, 0.1 * 2.0 ** min(attempt, 32))
        assert full_s / 2 <= wait_s <= full_s
    assert len(set(waits)) > 150
    backoff.reset()
    assert backoff.next_s() <= 0.1


@pytest.mark.parametrize(
    ("environment", "address"),
    [({}, None), ({"CONTROLD_ADDRESS": ""}, None), ({"CONTROLD_ADDRESS": "unix:///run/x"}, "unix:///run/x")],
)
def test_the_address_comes_from_the_environment(environment, address):
    assert address_from_environment(environment) == address
