"""Who may attach, who replaces whom, and what an operator sees of it."""

from __future__ import annotations

import asyncio
import json
import math
import socket

import pytest

from controld.contract.clock import ManualClock
from controld.contract.configuration import Configuration
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.trial import TrialTask
from controld.fleet import FleetServer
from controld.fleet.errors import FleetError
from controld.fleet.registry import FENCE_S, MAX_RIVALS, RIVAL_GONE_S
from controld.store.records import AuditEvent

NOW_UNIX_S = 1_700_000_000.0


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"protocol_version": 2}, "hello.protocol", "hello.protocol_version"),
        ({"protocol_version": 0}, "hello.protocol", "hello.protocol_version"),
        ({"agent_id": ""}, "hello.field", "hello.agent_id"),
        ({"kind": "x" * 300}, "hello.field", "hello.kind"),
        ({"role": "a\x00b"}, "hello.field", "hello.role"),
        ({"started_unix_s": math.nan}, "hello.field", "hello.started_unix_s"),
        ({"started_unix_s": math.inf}, "hello.field", "hello.started_unix_s"),
        ({"started_unix_s": 4e9}, "hello.field", "hello.started_unix_s"),
        ({"model": pb.Model(kv_bytes_per_token=2**64 - 64)}, "hello.field", "hello.model.kv_bytes_per_token"),
        ({"capabilities": pb.Capabilities(tiers=["y" * 300])}, "hello.field", "hello.capabilities.tiers[0]"),
    ],
)
async def test_a_bad_hello_is_rejected_by_field(server, connect, changes, code, field) -> None:
    agent = await connect(**changes)
    reject = await agent.expect("reject")
    assert reject.code == code and field in reject.reason
    assert await agent.receive() == (None, None)
    assert server[0].sessions(include_gone=True) == ()


async def test_the_first_message_must_be_hello(connect) -> None:
    agent = await connect(raw=True)
    await agent.telemetry(attached=True)
    assert (await agent.expect("reject")).code == "hello.missing"


async def test_a_stream_that_says_nothing_is_ended(start_server, connect) -> None:
    _, address = await start_server(hello_timeout_s=0.05)
    agent = await connect(raw=True, address=address)
    assert (await agent.expect("reject")).code == "hello.timeout"


async def test_a_newer_instance_replaces_the_older_one(server, connect, eventually, heard) -> None:
    fleet, _ = server
    old = await connect("p0", "old", started_unix_s=NOW_UNIX_S)
    await old.expect("welcome")
    await old.telemetry(attached=True)
    await eventually(lambda: fleet.sessions()[0].attached)
    new = await connect("p0", "new", started_unix_s=NOW_UNIX_S + 1)
    await new.expect("welcome")
    assert "replaced" in (await old.expect("drain")).reason
    assert await old.receive() == (None, None)
    (session,) = fleet.sessions()
    assert session.identity.instance_id == "new" and not session.attached
    zombie = await connect("p0", "old", started_unix_s=NOW_UNIX_S)
    assert (await zombie.expect("reject")).code == "hello.fenced"
    assert [s.connected for s in heard.sessions] == [True, True], "the replaced one does not count as a loss"
    await new.telemetry(attached=True)
    await eventually(lambda: fleet.sessions()[0].attached)


async def test_two_processes_under_one_id_are_told_until_one_of_them_is_gone(start_server, connect, eventually) -> None:
    clock = ManualClock()
    fleet, address = await start_server(clock)
    newer = await connect("p0", "newer", address=address, started_unix_s=NOW_UNIX_S + 1)
    await newer.expect("welcome")
    assert not fleet.sessions()[0].rivals and not fleet.sessions()[0].rivalry

    async def older_tries(deployment: str = "chat") -> None:
        older = await connect("p0", "older", address=address, started_unix_s=NOW_UNIX_S, deployment=deployment)
        assert (await older.expect("reject")).code == "hello.fenced"

    await older_tries()
    clock.advance(30)
    await older_tries("other")
    (session,) = fleet.sessions()
    (rival,) = session.rivals
    assert (rival.instance_id, rival.deployment, rival.seen_unix_s) == ("older", "other", clock.unix_s())
    assert "newer" in session.rivalry and "older (sglang/other, " in session.rivalry
    clock.advance(RIVAL_GONE_S)
    assert fleet.sessions()[0].rivals
    clock.advance(1)
    assert not fleet.sessions()[0].rivals, "it does not try any more"
    await older_tries()
    await newer.close()
    await eventually(lambda: not fleet.sessions())
    assert not fleet.sessions(include_gone=True)[0].rivals, "only one is left"
    clock.advance(FENCE_S)
    left = await connect("p0", "older", address=address, started_unix_s=NOW_UNIX_S)
    await left.expect("welcome")
    assert not fleet.sessions()[0].rivals


async def test_rivals_without_end_fill_no_memory(start_server, connect) -> None:
    fleet, address = await start_server()
    served = await connect(address=address)
    await served.expect("welcome")
    for number in range(MAX_RIVALS + 3):
        late = await connect("p0", f"i{number + 2}", address=address)
        await late.expect("reject")
    names = [rival.instance_id for rival in fleet.sessions()[0].rivals]
    assert names == [f"i{number + 5}" for number in range(MAX_RIVALS)], "those that were seen last"


async def test_the_same_instance_may_reconnect_while_its_old_stream_lingers(server, connect, eventually) -> None:
    first = await connect()
    await first.expect("welcome")
    second = await connect()
    await second.expect("welcome")
    assert (await first.expect("drain")).reason
    assert await first.receive() == (None, None)
    await second.telemetry(attached=True)
    await eventually(lambda: server[0].sessions()[0].attached)


async def test_an_agent_is_attached_only_while_it_says_so(server, connect, eventually, heard) -> None:
    fleet, _ = server
    agent = await connect()
    await agent.expect("welcome")
    assert not fleet.sessions()[0].attached
    assert "not said yet" in fleet.sessions()[0].not_attached_reason
    await agent.telemetry(attached=False, attach_reason="signature of KVManager changed")
    await eventually(lambda: "signature" in fleet.sessions()[0].not_attached_reason)
    await agent.telemetry(attached=False)
    await eventually(lambda: "no reason" in fleet.sessions()[0].not_attached_reason)
    await agent.telemetry(attached=True, links=[pb.LinkEstimate(tier="pd", link_group="default", transfers=3)])
    await eventually(lambda: fleet.sessions()[0].attached)
    assert fleet.sessions()[0].telemetry.links[0].transfers == 3
    await agent.close()
    await eventually(lambda: not fleet.sessions())
    (gone,) = fleet.sessions(include_gone=True)
    assert not gone.connected and not gone.attached and gone.not_attached_reason == "not connected"
    await eventually(lambda: [s.connected for s in heard.sessions] == [True, False])


@pytest.mark.parametrize(
    ("telemetry", "field"),
    [
        (pb.Telemetry(lease_left_s=math.nan), "telemetry.lease_left_s"),
        (pb.Telemetry(applied_version=2**63), "telemetry.applied_version"),
        (
            pb.Telemetry(links=[pb.LinkEstimate(tier="pd", link_group="d", bandwidth_bytes_per_s=-1.0)]),
            "link_estimate.bandwidth_bytes_per_s",
        ),
        (
            pb.Telemetry(links=[pb.LinkEstimate(tier="pd", link_group="d", backlog_bytes=2**64 - 1)]),
            "telemetry.links[].backlog_bytes",
        ),
    ],
)
async def test_malformed_telemetry_is_counted_by_field_and_changes_nothing(
    server, connect, eventually, heard, telemetry, field
) -> None:
    agent = await connect()
    await agent.expect("welcome")
    telemetry.attached = True
    await agent.send(pb.AgentMessage(telemetry=telemetry))
    await eventually(lambda: server[0].sessions()[0].counters.get(f"telemetry_refused.{field}") == 1)
    assert not server[0].sessions()[0].attached and not heard.telemetry


async def test_unknown_kinds_of_message_are_tolerated(server, connect, eventually) -> None:
    agent = await connect()
    await agent.expect("welcome")
    # Field 99 of a later release, then something we know.
    await agent.send(pb.AgentMessage.FromString(b"\x9a\x06\x03abc"))
    await agent.telemetry(attached=True)
    await eventually(lambda: server[0].sessions()[0].attached)
    assert server[0].sessions()[0].counters["messages_unknown"] == 1


async def test_trials_go_to_the_worker_and_come_back(server, connect, heard, eventually) -> None:
    fleet, _ = server
    task = TrialTask(
        study_id="s",
        trial_id="t",
        workload="dialogue",
        lossy=Configuration({"key_levels": 16}),
        coders=("zstd",),
        prompt_tokens=(256,),
        segments_per_length=2,
    )
    with pytest.raises(FleetError) as caught:
        fleet.request_trial("w0", task)
    assert caught.value.code == "fleet.not_connected"
    worker = await connect("w0", role="profiler")
    await worker.expect("welcome")
    fleet.request_trial("w0", task)
    fleet.cancel_trial("w0", "s")
    assert (await worker.expect("trial_request")).lossy_json == '{"key_levels":16}'
    assert (await worker.expect("trial_cancel")).trial_id == ""
    loss = pb.SegmentLoss(prompt_tokens=256, segment=0, loss_nats=math.nan, top1_agreement=1.0)
    result = pb.TrialResult(study_id="s", trial_id="t", status="measured", losses=[loss])
    await worker.send(pb.AgentMessage(trial_result=result))
    result.losses[0].loss_nats = 0.25
    await worker.send(pb.AgentMessage(trial_result=result))
    await eventually(lambda: len(heard.trials) == 1)
    assert heard.trials[0].losses[0].loss_nats == 0.25
    assert fleet.sessions()[0].counters["trial_results_refused.segment_loss.loss_nats"] == 1


async def test_agents_are_told_when_the_daemon_stops(server, connect) -> None:
    fleet, _ = server
    agent = await connect()
    await agent.expect("welcome")
    await fleet.stop(2.0)
    drain = await agent.expect("drain")
    assert drain.reconnect_after_s > 0
    assert await agent.receive() == (None, None)


async def test_one_audit_event_for_each_distinct_refusal(
    start_server, connect, selector, resources, store, eventually
) -> None:
    fleet, address = await start_server()
    await fleet.publish(selector, resources, policy_generation=1)
    agent = await connect(address=address)
    await agent.expect("welcome")
    for error in ("same", "same"):
        await agent.nack(await agent.expect("snapshot"), error)
    await eventually(lambda: fleet.sessions()[0].counters.get("nacks") == 2)
    await fleet.audit.flush()
    refused = await store.audit.recent(10, AuditEvent.SNAPSHOT_REFUSED)
    assert [json.loads(r.document)["error"] for r in refused] == ["same"]


async def test_two_servers_cannot_share_an_address(store, tmp_path) -> None:
    first, second = FleetServer(store), FleetServer(store)
    port, path = await first.start(["127.0.0.1:0", f"unix://{tmp_path}/shared.sock"])
    assert not port.endswith(":0")
    try:
        for address in (port, path):
            with pytest.raises(FleetError) as caught:
                await second.start([address])
            assert caught.value.code == "fleet.address"
        (tmp_path / "file").touch()
        with pytest.raises(FleetError, match="file: File exists"):
            await second.start([f"unix://{tmp_path}/file/f.sock"])
        (made,) = await second.start([f"unix://{tmp_path}/new/folder/f.sock"])
        assert made.endswith("/new/folder/f.sock")
    finally:
        await second.stop()
        await first.stop(0.1)


async def test_the_socket_of_a_killed_daemon_is_replaced(store, tmp_path) -> None:
    left = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))
    assert left.is_socket()
    server = FleetServer(store)
    assert await server.start([f"unix://{left}"]) == (f"unix://{left}",)
    await server.stop(0.1)


async def test_a_slow_daemon_callback_does_not_delay_the_welcome(start_server, connect, heard, monkeypatch) -> None:
    released = asyncio.Event()

    async def slow(_session: object) -> None:
        await released.wait()

    monkeypatch.setattr(heard, "on_session", slow)
    _, address = await start_server()
    agent = await connect(address=address)
    await agent.expect("welcome")
    released.set()
