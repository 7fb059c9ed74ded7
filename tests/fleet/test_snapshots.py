"""Versions, nonces, ACK and NACK over a real stream."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from controld.contract.decision import ClassRule
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.convert import resource_from_proto, resource_to_proto
from controld.contract.snapshot import CalibratedArtefact, ClassRules, Resource
from controld.fleet.errors import FleetError
from controld.store.errors import StoreError
from dataplanes.agent.applied import Applied, PageAssembler, apply_snapshot


async def test_an_agent_gets_what_was_published_before_and_after_it_came(
    server, connect, selector, resources, store
) -> None:
    fleet, _ = server
    assert await fleet.publish(selector, resources, policy_generation=4, explanations_json='{"why": 1}') == 1
    agent = await connect()
    welcome = await agent.expect("welcome")
    assert (welcome.policy_generation, welcome.effects_acked_up_to) == (4, 0)
    first = await agent.expect("snapshot")
    assert (first.version, first.page_index, first.page_count, first.ttl_s) == (1, 0, 1, 600.0)
    received = [resource_from_proto(message, version=1) for message in first.resources]
    assert received == list(resources)
    await agent.ack(first)
    assert await fleet.publish(selector, resources[:1], policy_generation=5) == 2
    second = await agent.expect("snapshot")
    assert second.version == 2 and list(second.removed) == ["classes"]
    assert second.nonce != first.nonce
    kept = await store.versions.get(1)
    assert (kept.policy_generation, kept.explanations_json) == (4, '{"why": 1}')
    assert [r["name"] for r in json.loads(kept.tables_json)] == ["pd/default", "classes"]


async def test_a_version_goes_only_to_the_planes_it_names(server, connect, selector, resources) -> None:
    fleet, _ = server
    other = await connect("v0", kind="longlive")
    agent = await connect("p0")
    await other.expect("welcome")
    await agent.expect("welcome")
    await fleet.publish(selector, resources, policy_generation=1)
    await agent.expect("snapshot")
    assert [s.desired_version for s in fleet.sessions()] == [0, 1]


async def test_four_versions_are_kept_apart(server, connect, selector, resources, eventually) -> None:
    fleet, _ = server
    await fleet.publish(selector, resources, policy_generation=1)
    agent = await connect()
    await agent.expect("welcome")
    await agent.ack(await agent.expect("snapshot"))
    await eventually(lambda: fleet.sessions()[0].acked_version == 1)
    assert fleet.sessions()[0].effective_version == 0, "an ACK says nothing of what is used"
    await fleet.publish(selector, resources, policy_generation=1)
    await agent.nack(await agent.expect("snapshot"), "unknown coder")
    await agent.telemetry(attached=True, applied_version=1)
    await eventually(lambda: fleet.sessions()[0].effective_version == 1)
    session = fleet.sessions()[0]
    assert (session.desired_version, session.acked_version, session.effective_version) == (2, 1, 1)
    assert session.degraded and session.last_failed is not None
    assert (session.last_failed.version, session.last_failed.error) == (2, "unknown coder")


async def test_a_success_after_a_refusal_keeps_the_failure_visible(
    server, connect, selector, resources, eventually
) -> None:
    fleet, _ = server
    await fleet.publish(selector, resources, policy_generation=1)
    agent = await connect()
    await agent.expect("welcome")
    await agent.nack(await agent.expect("snapshot"))
    await agent.ack(await agent.expect("snapshot"))  # the second try, about a second later
    await eventually(lambda: fleet.sessions()[0].acked_version == 1)
    session = fleet.sessions()[0]
    assert not session.degraded
    assert session.last_failed is not None and session.last_failed.attempts == 1


async def test_a_nonce_of_an_old_stream_means_nothing_on_the_new_one(
    server, connect, selector, resources, eventually
) -> None:
    fleet, _ = server
    await fleet.publish(selector, resources, policy_generation=1)
    agent = await connect()
    await agent.expect("welcome")
    old = await agent.expect("snapshot")
    await agent.close()
    again = await connect()
    await again.expect("welcome")
    new = await again.expect("snapshot")
    assert new.version == old.version and new.nonce != old.nonce
    await again.ack(old)
    await eventually(lambda: fleet.sessions()[0].counters.get("acks_ignored.late") == 1)
    assert fleet.sessions()[0].acked_version == 0
    await again.ack(new)
    await eventually(lambda: fleet.sessions()[0].acked_version == 1)


async def test_a_late_ack_of_an_older_version_is_ignored(server, connect, selector, resources, eventually) -> None:
    fleet, _ = server
    await fleet.publish(selector, resources, policy_generation=1)
    agent = await connect()
    await agent.expect("welcome")
    first = await agent.expect("snapshot")
    await fleet.publish(selector, resources, policy_generation=1)
    second = await agent.expect("snapshot")
    await agent.ack(first)
    await agent.ack(second, version=999)
    await eventually(lambda: fleet.sessions()[0].counters.get("acks_ignored.wrong_version") == 1)
    assert fleet.sessions()[0].counters["acks_ignored.late"] == 1
    assert fleet.sessions()[0].acked_version == 0
    await agent.ack(second)
    await eventually(lambda: fleet.sessions()[0].acked_version == 2)


async def test_an_agent_that_uses_a_version_nobody_published_is_shown_as_such(
    server, connect, selector, resources, eventually
) -> None:
    fleet, _ = server
    await fleet.publish(selector, resources, policy_generation=1)
    agent = await connect()
    await agent.expect("welcome")
    await agent.telemetry(attached=True, applied_version=999)
    await eventually(lambda: fleet.sessions()[0].effective_version == 999)
    session = fleet.sessions()[0]
    assert not session.effective_is_known and session.acked_version == 0 and session.desired_version == 1


async def test_a_nack_without_error_detail_is_none(server, connect, selector, resources, eventually) -> None:
    fleet, _ = server
    await fleet.publish(selector, resources, policy_generation=1)
    agent = await connect()
    await agent.expect("welcome")
    await agent.nack(await agent.expect("snapshot"), "")
    await eventually(lambda: fleet.sessions()[0].counters.get("nacks_ignored.no_error_detail") == 1)
    assert not fleet.sessions()[0].degraded and fleet.sessions()[0].last_failed is None


async def test_a_large_snapshot_comes_in_pages(start_server, connect, selector) -> None:
    fleet, address = await start_server(page_bytes=10_000)
    contents = [bytes([index]) * 4_000 for index in range(10)]
    resources = [
        Resource(f"artefact/{i}", CalibratedArtefact(hashlib.sha256(c).hexdigest(), "model", c))
        for i, c in enumerate(contents)
    ]
    await fleet.publish(selector, resources, policy_generation=1)
    agent = await connect(address=address)
    await agent.expect("welcome")
    pages = [await agent.expect("snapshot") for _ in range(5)]
    assert [(p.page_index, p.page_count) for p in pages] == [(i, 5) for i in range(5)]
    assert len({(p.nonce, p.version) for p in pages}) == 1
    assert [r.calibrated_artefact.content for p in pages for r in p.resources] == contents
    await agent.ack(pages[-1])
    # Bytes that the agent has acknowledged are not sent again.
    await fleet.publish(selector, [*resources[1:], Resource("classes", ClassRules())], policy_generation=1)
    following = await agent.expect("snapshot")
    assert [r.name for r in following.resources] == ["classes"] and list(following.removed) == ["artefact/0"]


async def test_pages_stay_below_the_message_limit_with_very_many_resources(start_server, connect, selector) -> None:
    fleet, address = await start_server()
    filler = "x" * 400
    rules = [
        Resource(f"tenant-{i}/{filler}", CalibratedArtefact(hashlib.sha256(b).hexdigest(), "m", b))
        for i in range(20_000)
        for b in [b"%d" % i]
    ]
    await fleet.publish(selector, rules, policy_generation=1)
    agent = await connect(address=address)
    await agent.expect("welcome")
    first = await agent.expect("snapshot")
    pages = [first, *[await agent.expect("snapshot") for _ in range(first.page_count - 1)]]
    assert first.page_count > 1 and max(page.ByteSize() for page in pages) < 4_194_304
    assert sum(len(page.resources) for page in pages) == 20_000
    await agent.ack(pages[-1])
    await fleet.publish(selector, [], policy_generation=1)
    first = await agent.expect("snapshot")
    pages = [first, *[await agent.expect("snapshot") for _ in range(first.page_count - 1)]]
    assert sum(len(page.removed) for page in pages) == 20_000


@pytest.mark.parametrize("beyond", [-1, 0, 1])
async def test_the_largest_resource_passes_and_a_larger_one_is_refused_before_it_is_kept(
    server, connect, selector, store, beyond
) -> None:
    fleet, _ = server
    agent = await connect()
    await agent.expect("welcome")
    allowed_bytes = 16 * 1024 * 1024 - 64 * 1024
    overhead = resource_to_proto(_rules("x" * 4_000_000)).ByteSize() - 4_000_000
    key = "x" * (allowed_bytes - overhead + beyond)
    resource = _rules(key)
    if beyond > 0:
        with pytest.raises(FleetError) as caught:
            await fleet.publish(selector, [resource], policy_generation=1)
        assert caught.value.code == "fleet.resource_size"
        assert await store.versions.last_number() == 0
    else:
        await fleet.publish(selector, [resource], policy_generation=1)
        assert (await agent.expect("snapshot")).resources[0].class_rules.rules[0].extra_key == key


def _rules(extra_key: str) -> Resource:
    return Resource("a", ClassRules((ClassRule("chat", extra_key=extra_key),)))


async def test_a_large_artefact_comes_in_parts_and_once_for_each_stream(server, connect, selector, store) -> None:
    fleet, _ = server
    agent = await connect()
    await agent.expect("welcome")
    content = bytes(range(256)) * 30_000
    artefact = Resource("artefact/a", CalibratedArtefact(hashlib.sha256(content).hexdigest(), "m", content))
    await fleet.publish(selector, [artefact], policy_generation=1)
    pages = [await agent.expect("snapshot")]
    pages += [await agent.expect("snapshot") for _ in range(pages[0].page_count - 1)]
    assembler = PageAssembler()
    assembled = [assembler.add(page) for page in pages][-1]
    assert assembled is not None
    assert len(assembled.resources) > 1
    held: list[bytes] = []
    applied, _ = apply_snapshot(
        assembled,
        onto=Applied(),
        validate_configuration=lambda configuration: None,
        hold_artefact=lambda one: held.append(one.content),
    )
    assert held == [content]
    assert applied.resources["artefact/a"] == artefact
    await agent.ack(pages[-1])
    await fleet.publish(selector, [artefact, _rules("x")], policy_generation=1)
    assert [resource.name for resource in (await agent.expect("snapshot")).resources] == ["a"]
    assert fleet.sessions()[0].artefacts_held == {"artefact/a": artefact.payload.sha256}
    record = await store.versions.latest(selector.kind, selector.deployment)
    assert len(record.tables_json) < 1000


async def test_an_agent_gets_only_kinds_that_it_understands(server, connect, selector, resources) -> None:
    fleet, _ = server
    await fleet.publish(selector, resources, policy_generation=1)
    agent = await connect(capabilities=pb.Capabilities(resource_kinds=["class_rules"]))
    await agent.expect("welcome")
    assert [r.name for r in (await agent.expect("snapshot")).resources] == ["classes"]


async def test_a_name_that_comes_twice_is_refused(server, selector, resources) -> None:
    with pytest.raises(FleetError, match="pd/default"):
        await server[0].publish(selector, [resources[0], resources[0]], policy_generation=1)


async def test_the_version_goes_on_after_a_restart(start_server, connect, selector, resources, store) -> None:
    first, _ = await start_server()
    await first.publish(selector, resources, policy_generation=1)
    await first.stop(0.1)
    second, _ = await start_server()
    assert await second.publish(selector, resources, policy_generation=1) == 2


async def test_a_lease_is_renewed_for_the_version_in_use(
    start_server, connect, selector, resources, eventually
) -> None:
    fleet, address = await start_server(lease_interval_s=0.05, lease_ttl_s=7.0)
    agent = await connect(address=address)
    await agent.expect("welcome")
    await fleet.publish(selector, resources, policy_generation=1)
    await agent.ack(await agent.expect("snapshot"))
    renewal = await agent.expect("lease_renewal")
    assert (renewal.version, renewal.ttl_s) == (1, 7.0)
    await fleet.publish(selector, resources, policy_generation=1)
    while (message := await agent.receive())[0] != "snapshot":
        assert message[0] == "lease_renewal"
    await agent.nack(message[1])
    await eventually(lambda: fleet.sessions()[0].degraded)
    renewed: list[int] = []
    while len(renewed) < 3:
        kind, message = await agent.receive()
        if kind == "snapshot":  # tried again, after about a second
            await agent.nack(message)
        else:
            renewed.append(message.version)
    assert renewed == [1] * 3, "what it kept stays good while it refuses the new"


async def test_a_stream_that_replaces_a_lingering_one_gets_everything(
    server, connect, selector, resources, eventually
) -> None:
    fleet, _ = server
    await fleet.publish(selector, resources, policy_generation=1)
    lingering = []
    for attempt in range(10):
        agent = await connect()
        await agent.expect("welcome")
        snapshot = await agent.expect("snapshot")
        assert len(snapshot.resources) == len(resources)
        if attempt % 2:
            await agent.ack(snapshot)
        lingering.append(agent)
    await eventually(lambda: fleet.sessions()[0].acked_version == 1)
    for replaced in lingering[:-1]:
        kind = ""
        while kind is not None:
            kind, _ = await replaced.receive()
            assert kind in ("drain", None), "a replaced stream gets no snapshot any more"


async def test_nothing_is_pushed_that_could_not_be_kept(server, connect, selector, resources, store) -> None:
    fleet, _ = server
    await fleet.publish(selector, resources, policy_generation=1)
    await store.close()
    with pytest.raises(StoreError):
        await fleet.publish(selector, resources, policy_generation=2)
    assert fleet.last_version == 1
    agent = await connect()
    assert (await agent.expect("welcome")).policy_generation == 1
    assert (await agent.expect("snapshot")).version == 1, "agents are served although the state cannot be read"


async def test_a_version_published_by_another_controld_is_stepped_over(server, selector, resources, store) -> None:
    fleet, _ = server
    await fleet.publish(selector, resources, policy_generation=1)
    kept = await store.versions.get(1)
    await store.versions.append(replace(kept, number=2))
    assert await fleet.publish(selector, resources, policy_generation=1) == 3
