"""Streams that end badly leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging

import grpc
import grpc.aio
import psutil
import pytest

from controld.contract.rpc import fleet_pb2 as pb

CYCLES = 250
MOST_BYTES_A_STREAM = 67_000


@pytest.mark.parametrize("greeted", [True, False], ids=["after hello", "before hello"])
async def test_connecting_and_cancelling_leaks_no_task(server, connect, eventually, greeted) -> None:
    fleet, address = server
    channel = grpc.aio.insecure_channel(address)
    hello = (await connect()).hello
    attach = channel.stream_stream(
        "/controld.v1.Fleet/Attach",
        request_serializer=pb.AgentMessage.SerializeToString,
        response_deserializer=pb.ControlMessage.FromString,
    )

    async def cycle(number: int) -> None:
        call = attach()
        try:
            if greeted:
                await call.write(hello(f"a{number % 7}", "i"))
            if number % 3:
                await call.read() if greeted else await call.wait_for_connection()
        finally:
            call.cancel()

    before = 0
    memory_before = 0
    warm_up = 50
    for number in range(CYCLES):
        await cycle(number)
        if number == warm_up:
            await eventually(lambda: len(fleet.sessions()) <= 1)
            before = len(asyncio.all_tasks())
            memory_before = psutil.Process().memory_info().rss
    await eventually(lambda: len(fleet.sessions()) <= 1)
    await eventually(lambda: len(asyncio.all_tasks()) <= before + 3)
    gc.collect()
    grown = psutil.Process().memory_info().rss - memory_before
    counted = CYCLES - warm_up
    assert grown < MOST_BYTES_A_STREAM * counted, f"{grown / 1e6:.1f} MB more after {counted} streams"
    await channel.close()


async def test_garbage_bytes_end_only_their_stream(server, connect, eventually, caplog) -> None:
    fleet, address = server
    caplog.set_level(logging.CRITICAL, logger="grpc")
    good = await connect("good")
    await good.expect("welcome")
    async with grpc.aio.insecure_channel(address) as channel:
        attach = channel.stream_stream("/controld.v1.Fleet/Attach")
        at_once = attach()
        await at_once.write(b"\xff\xff\xff")
        assert pb.ControlMessage.FromString(await at_once.read()).reject.code == "hello.missing"
        later = attach()
        await later.write(good.hello("bad").SerializeToString())
        assert pb.ControlMessage.FromString(await later.read()).HasField("welcome")
        await later.write(b"\x0a\xff\xff\xff\xff")
        async with asyncio.timeout(30):
            assert await later.read() is grpc.aio.EOF
    assert fleet.tally.labelled()["messages_malformed", ""] == 1
    await eventually(lambda: [s.agent_id for s in fleet.sessions()] == ["good"])
    await good.telemetry(attached=True)
    await eventually(lambda: fleet.sessions()[0].attached)


async def test_a_message_above_the_limit_ends_only_its_stream(server, connect, eventually) -> None:
    fleet, address = server
    good = await connect("good")
    await good.expect("welcome")
    huge = pb.AgentMessage(nack=pb.Nack(nonce="n", error_detail="x" * (17 * 1024 * 1024))).SerializeToString()
    # This client has no limit of its own.
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        call = channel.stream_stream("/controld.v1.Fleet/Attach")()
        await call.write(good.hello("bad").SerializeToString())
        assert pb.ControlMessage.FromString(await call.read()).HasField("welcome")
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.write(huge)
        async with asyncio.timeout(30):
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await eventually(lambda: [s.agent_id for s in fleet.sessions()] == ["good"])
    await good.telemetry(attached=True)
    await eventually(lambda: fleet.sessions()[0].attached)


async def test_an_idle_stream_lives(start_server, connect, eventually) -> None:
    fleet, address = await start_server()
    agent = await connect(address=address)
    await agent.expect("welcome")
    await asyncio.sleep(1.0)
    await agent.telemetry(attached=True)
    await eventually(lambda: fleet.sessions()[0].attached)


async def test_stopping_with_streams_in_every_state_ends_in_time(start_server, connect, selector, resources) -> None:
    fleet, address = await start_server()
    silent = await connect(raw=True, address=address)
    greeted = await connect("a", address=address)
    await greeted.expect("welcome")
    await fleet.publish(selector, resources, policy_generation=1)
    async with asyncio.timeout(30):
        await fleet.stop(0.5)
    assert fleet.sessions() == ()
    assert silent.call is not None
