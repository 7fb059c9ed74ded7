"""Effects from a stream: stored once, acknowledged after the commit, refused by field."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from controld.contract.effect import Path
from controld.contract.rpc import fleet_pb2 as pb
from controld.fleet.intake import EffectIntake
from controld.fleet.tally import Tally
from controld.store.errors import StoreError


def effect(seq: int, **changes: Any) -> pb.Effect:
    values: dict[str, Any] = {
        "seq": seq,
        "transfer_id": f"t{seq}",
        "half": "sender",
        "arm_id": "raw",
        "table_version": 1,
        "service_class": "chat",
        "tier": "pd",
        "link_group": "default",
        "tokens": 1,
        "chunks": 1,
        "raw_bytes": 10,
        "wire_bytes": 10,
        "path": "raw",
        "verdict": "verified",
    }
    return pb.Effect(**{**values, **changes})


def report(*effects: pb.Effect) -> pb.AgentMessage:
    return pb.AgentMessage(effects=pb.EffectReport(effects=effects))


async def ack_up_to(agent: Any, seq: int) -> None:
    while (await agent.expect("effect_ack")).up_to_seq < seq:
        pass


async def test_effects_are_durable_when_they_are_acknowledged(connect, store, heard) -> None:
    agent = await connect()
    await agent.expect("welcome")
    await agent.send(report(effect(1), effect(2, path="coded")))
    await ack_up_to(agent, 2)
    assert await store.effects.count() == 2
    (record,) = await store.effects.by_transfer("t2")
    assert record.effect.path is Path.CODED and record.seq == 2
    assert [e.seq for e in heard.effects] == [1, 2]


async def test_what_is_sent_again_is_stored_and_learnt_once(connect, store, heard) -> None:
    agent = await connect()
    await agent.expect("welcome")
    await agent.send(report(effect(1), effect(2)))
    await ack_up_to(agent, 2)
    await agent.close()
    again = await connect()
    assert (await again.expect("welcome")).effects_acked_up_to == 2
    await again.send(report(effect(2), effect(3)))
    await ack_up_to(again, 3)
    assert await store.effects.count() == 3
    assert [e.seq for e in heard.effects] == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"wire_s": math.nan}, "effect.wire_s"),
        ({"encode_s": math.inf}, "effect.encode_s"),
        ({"decode_s": -math.inf}, "effect.decode_s"),
        ({"wait_s": -1e-9}, "effect.wait_s"),
        ({"raw_bytes": 2**64 - 64}, "effect.raw_bytes"),
        ({"wire_bytes": 2**63}, "effect.wire_bytes"),
        ({"half": "both"}, "effect.half"),
        ({"path": ""}, "effect.path"),
        ({"verdict": "fine"}, "effect.verdict"),
        ({"transfer_id": ""}, "effect.transfer_id"),
        ({"arm_id": "a" * 257}, "effect.arm_id"),
        ({"reason": "\x00"}, "effect.reason"),
    ],
)
async def test_a_malformed_effect_is_counted_not_stored_and_still_acknowledged(
    server, connect, store, heard, changes, field
) -> None:
    agent = await connect()
    await agent.expect("welcome")
    await agent.send(report(effect(1), effect(2, **changes)))
    await ack_up_to(agent, 2)
    assert await store.effects.acked_up_to("p0", "i1") == 2
    assert [e.seq for e in heard.effects] == [1]
    assert server[0].sessions()[0].counters[f"effects_refused.{field}"] == 1


async def test_an_empty_transfer_is_an_effect_like_any_other(connect, store) -> None:
    agent = await connect()
    await agent.expect("welcome")
    await agent.send(report(effect(1, tokens=0, chunks=0, raw_bytes=0, wire_bytes=0)))
    await ack_up_to(agent, 1)
    assert await store.effects.count() == 1


async def test_a_sequence_number_of_zero_is_refused_and_not_acknowledged(server, connect, eventually) -> None:
    agent = await connect()
    await agent.expect("welcome")
    await agent.send(report(effect(0), effect(2**63)))
    await eventually(lambda: server[0].sessions()[0].counters.get("effects_refused.effect.seq") == 2)
    assert server[0].sessions()[0].effects_acked_up_to == 0


async def test_effects_received_just_before_the_agent_left_are_kept(server, connect, store, eventually) -> None:
    agent = await connect()
    await agent.expect("welcome")
    await agent.send(report(*(effect(seq) for seq in range(1, 500))))
    await agent.call.done_writing()
    await eventually(lambda: not server[0].sessions())
    while await store.effects.count() < 499:
        await asyncio.sleep(0.01)
    assert await store.effects.acked_up_to("p0", "i1") == 499


async def test_a_callback_that_fails_does_not_stop_the_stream(start_server, connect, heard, monkeypatch) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("controller bug")

    monkeypatch.setattr(heard, "on_effects", fail)
    fleet, address = await start_server()
    agent = await connect(address=address)
    await agent.expect("welcome")
    await agent.send(report(effect(1)))
    await ack_up_to(agent, 1)
    await agent.send(report(effect(2)))
    await ack_up_to(agent, 2)
    assert fleet.tally.labelled()["callback_failed", "on_effects"] >= 1


class FullDisk:
    """The aggregate of a store whose disk is full for the first few writes."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.batches: list[tuple[int, ...]] = []

    async def append(self, _agent: str, _instance: str, records: Any, *, up_to_seq: int) -> Any:
        if self.failures > 0:
            self.failures -= 1
            raise StoreError("the disk is full", code="store.disk_full")
        self.batches.append(tuple(record.seq for record in records))
        return tuple(records)


async def test_nothing_is_acknowledged_until_the_disk_has_room_again(monkeypatch) -> None:
    from controld.contract.clock import ManualClock

    monkeypatch.setattr("controld.fleet.intake.RETRY_FIRST_S", 0.001)
    acked: list[int] = []
    disk, tally = FullDisk(failures=3), Tally()

    async def on_stored(_effects: object) -> None:
        assert disk.failures == 0

    intake = EffectIntake(
        "a",
        "i",
        disk,
        ManualClock(),
        tally,
        on_acked=acked.append,
        on_stored=on_stored,  # type: ignore[arg-type]
    )
    intake.offer(pb.EffectReport(effects=[effect(1), effect(2, wire_s=math.nan)]))
    task = asyncio.create_task(intake.run())
    async with asyncio.timeout(30):
        while not acked:
            await asyncio.sleep(0.001)
    assert acked == [2] and disk.batches == [(1,)]
    assert tally.labelled()["effects_store_failed", "store.disk_full"] == 3
    intake.offer(pb.EffectReport(effects=[effect(3)]))
    intake.close()
    await task
    assert acked == [2, 3]
