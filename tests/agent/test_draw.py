"""Draws: what the table says for this class, size, bandwidth and load, or raw with its reason."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from controld.contract.clock import ManualClock
from controld.contract.decision import RAW, ClassRule
from controld.contract.estimators import SET_UP_MARGIN
from controld.contract.snapshot import TenantShare
from dataplanes.agent import RawReason

TRANSFER = {"service_class": "chat", "raw_bytes": 14_000_000, "tier": "pd"}


@pytest.fixture
def clock():
    return ManualClock(100.0)


@pytest.fixture
def served(daemon, make_agent, make_snapshot, clock):
    """An agent that has applied version 1, and its stream."""
    agent = make_agent(daemon.address, clock=clock)
    agent.start()
    stream = daemon.stream()
    stream.send(snapshot=make_snapshot(1, ttl_s=600.0))
    stream.wait_for("ack")
    return agent, stream


def test_without_a_table_a_transfer_goes_raw_and_says_why(make_agent):
    agent = make_agent("unix:///nobody/listens/here.sock")
    draw = agent.draw(transfer_id="t", **TRANSFER)
    assert (draw.drawn.arm.arm_id, draw.reason) == (RAW, RawReason.NO_TABLE)
    assert (draw.drawn.cell, draw.drawn.table_version) == (-1, 0)
    assert agent.snapshot().counters["no_table"] == 1


def test_a_tier_without_a_table_goes_raw(served):
    agent, _ = served
    assert agent.draw(transfer_id="t", **{**TRANSFER, "tier": "prefix_store"}).reason is RawReason.NO_TABLE
    assert agent.draw(transfer_id="t", link_group="far", **TRANSFER).reason is RawReason.NO_TABLE


def test_before_any_transfer_the_operators_rate_decides(served, make_table):
    agent, _ = served
    draw = agent.draw(transfer_id="t", **TRANSFER)
    assert draw.reason is None
    assert draw.bandwidth_bytes_per_s == make_table().prior_bandwidth_bytes_per_s
    assert draw.drawn == make_table().draw("t", "chat", 14e6, 1e7, 0.0)
    assert draw.drawn.arm.configuration is not None


def test_observed_spans_replace_the_operators_rate(served):
    agent, _ = served
    agent.observe_wire(tier="pd", start_s=99.0, end_s=99.9, wire_bytes=1_000)  # connection set-up, not used
    assert agent.draw(transfer_id="t", **TRANSFER).bandwidth_bytes_per_s == 1e7
    agent.observe_wire(tier="pd", start_s=100.0, end_s=101.0, wire_bytes=2_500_000)
    draw = agent.draw(transfer_id="t", **TRANSFER)
    assert draw.bandwidth_bytes_per_s == pytest.approx(2.5e6)
    assert draw.drawn.cell != agent.snapshot().applied.tables["pd", "default"].cell_index("chat", 14e6, 1e7, 0.0)


def test_unknown_bandwidth_goes_raw(served, make_table, make_snapshot):
    agent, stream = served
    stream.send(snapshot=make_snapshot(2, table=make_table(version=2, prior=0.0)))
    stream.wait_for("ack", 2)
    draw = agent.draw(transfer_id="t", **TRANSFER)
    assert (draw.drawn.arm.arm_id, draw.reason) == (RAW, RawReason.BANDWIDTH_UNKNOWN)
    assert draw.drawn.table_version == 2
    assert agent.snapshot().counters["bandwidth_unknown"] == 1


def test_without_the_operators_word_the_set_ups_rate_is_the_first_guess(served, make_table, make_snapshot):
    agent, stream = served
    stream.send(snapshot=make_snapshot(2, table=make_table(version=2, prior=0.0)))
    stream.wait_for("ack", 2)
    agent.observe_wire(tier="pd", start_s=98.0, end_s=99.0, wire_bytes=2_000_000)
    draw = agent.draw(transfer_id="t", **TRANSFER)
    assert draw.reason is None
    assert draw.bandwidth_bytes_per_s == pytest.approx(SET_UP_MARGIN * 2e6)
    agent.observe_wire(tier="pd", start_s=100.0, end_s=101.0, wire_bytes=2_500_000)
    assert agent.draw(transfer_id="t", **TRANSFER).bandwidth_bytes_per_s == pytest.approx(2.5e6)


def test_load_is_offered_bytes_over_bandwidth(served, clock):
    agent, _ = served
    for _ in range(200):
        clock.advance(1.0)
        agent.offered(tier="pd", raw_bytes=2_000_000)
    draw = agent.draw(transfer_id="t", **TRANSFER)
    assert draw.load == pytest.approx(0.2, rel=0.06)


def test_the_lease_ends_on_the_agents_clock_and_a_renewal_brings_the_table_back(served, clock, until):
    agent, stream = served
    clock.advance(599.9)
    assert agent.draw(transfer_id="t", **TRANSFER).reason is None
    clock.advance(0.1)
    draw = agent.draw(transfer_id="t", **TRANSFER)
    assert (draw.drawn.arm.arm_id, draw.reason) == (RAW, RawReason.LEASE_EXPIRED)
    assert agent.snapshot().counters["lease_expired"] == 1
    assert agent.snapshot().lease_left_s == 0.0
    until(lambda: stream.of_kind("telemetry")[-1].applied_version == 0, "telemetry says that nothing is in force")
    stream.send(lease_renewal={"version": 1, "ttl_s": 30.0})
    until(lambda: agent.snapshot().lease_left_s > 0, "the lease is renewed")
    assert agent.draw(transfer_id="t", **TRANSFER).drawn.table_version == 1
    clock.advance(30.0)
    assert agent.draw(transfer_id="t", **TRANSFER).reason is RawReason.LEASE_EXPIRED


@pytest.mark.parametrize(
    "renewal", [{"version": 2, "ttl_s": 600.0}, {"version": 1, "ttl_s": float("nan")}, {"version": 1, "ttl_s": -1.0}]
)
def test_a_renewal_of_another_version_or_of_no_time_is_refused(served, clock, until, renewal):
    agent, stream = served
    clock.advance(100.0)
    stream.send(lease_renewal=renewal)
    until(lambda: agent.snapshot().counters.get("lease_renewal_refused") == 1, "the refusal is counted")
    assert agent.snapshot().lease_left_s == pytest.approx(500.0)


def test_a_class_is_found_by_its_rule_and_otherwise_is_default_and_counted(served):
    agent, _ = served
    assert agent.classify(extra_key="class=chat", priority=None) == "chat"
    assert agent.classify(extra_key="class=other", priority=3) == "default"
    assert agent.classify(extra_key=None, priority=None) == "default"
    assert agent.snapshot().counters["class_unmapped"] == 2


def test_a_class_that_teaches_nothing_leaves_estimates_alone(served, make_snapshot, make_effect):
    agent, stream = served
    pinned = ClassRule("pinned", extra_key="class=pinned", learn=False)
    stream.send(snapshot=make_snapshot(2, rules=(pinned,)))
    stream.wait_for("ack", 2)
    for at_s in (100.0, 101.0, 102.0):
        agent.offered(tier="pd", raw_bytes=1_000_000, service_class="pinned")
        agent.observe_wire(tier="pd", start_s=at_s, end_s=at_s + 1, wire_bytes=1_000_000, service_class="pinned")
    agent.report(make_effect(service_class="pinned"))
    assert agent.snapshot().links == ()
    assert agent.draw(transfer_id="t", **TRANSFER).bandwidth_bytes_per_s == 1e7
    assert agent.classify(extra_key="class=pinned", priority=None) == "pinned"


def test_the_load_is_told_by_class_and_forgotten_with_time(served, clock):
    agent, _ = served
    for _ in range(3):
        agent.offered(tier="pd", raw_bytes=2_000_000, service_class="chat")
    agent.offered(tier="pd", raw_bytes=2_000_000)
    (link,) = agent.snapshot().links
    offered = link.offered_by_class_bytes_per_s
    assert offered["chat"] == pytest.approx(3 * offered["default"])
    assert sum(offered.values()) == pytest.approx(link.offered_bytes_per_s)
    clock.advance(1000.0)
    assert agent.snapshot().links[0].offered_by_class_bytes_per_s == {}


def test_tenants_and_their_weights_come_with_the_snapshot(served, make_snapshot):
    agent, stream = served
    assert agent.tenancy().tenant("chat") == ""
    rules = (ClassRule("chat", extra_key="class=chat", tenant="acme"), ClassRule("default", tenant="rest"))
    shares = (TenantShare("acme", 3.0), TenantShare("rest", 1.0))
    stream.send(snapshot=make_snapshot(2, rules=rules, tenants=shares))
    stream.wait_for("ack", 2)
    tenancy = agent.tenancy()
    assert tenancy.weights == {"acme": 3.0, "rest": 1.0}
    assert [tenancy.tenant(name) for name in ("chat", "default", "unheard of")] == ["acme", "rest", ""]
    assert agent.tenancy() is tenancy
    # A controld that sends no weights has everybody served in the order of arrival.
    stream.send(snapshot=make_snapshot(3, rules=rules))
    stream.wait_for("ack", 3)
    assert agent.tenancy().tenant("chat") == ""


def test_backlog_is_what_was_offered_and_not_yet_reported(served, make_effect):
    agent, _ = served
    for _ in range(3):
        agent.offered(tier="pd", raw_bytes=10)
    assert agent.snapshot().links[0].backlog_bytes == 30
    agent.report(make_effect(raw_bytes=10))
    agent.withdrawn(tier="pd", raw_bytes=10)
    assert agent.snapshot().links[0].backlog_bytes == 10
    agent.report(make_effect(raw_bytes=7))  # sent fewer bytes than were offered
    assert agent.snapshot().links[0].backlog_bytes == 0


def test_draws_during_swaps_are_of_one_version_each(served, make_table, make_snapshot):
    """Version v holds arm 1 + v mod 3 in every cell: an arm of one version under the number of another would show."""
    agent, stream = served
    stop = threading.Event()
    arm_ids = [arm.arm_id for arm in make_table().arms]
    wrong: list[object] = []
    versions: set[int] = set()

    def draw_all_the_time() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            draw = agent.draw(transfer_id=f"t{number}", **TRANSFER)
            version = draw.drawn.table_version
            if draw.reason is not None or draw.drawn.arm.arm_id != arm_ids[1 + version % 3]:
                wrong.append(draw)
            versions.add(version)
            if number % 100 == 0:
                stop.wait(0.001)  # leaves the interpreter to the agent's thread

    stream.send(snapshot=make_snapshot(2, table=make_table(version=2, arm=3)))
    stream.wait_for("ack", 2)
    threads = [threading.Thread(target=draw_all_the_time) for _ in range(8)]
    for thread in threads:
        thread.start()
    for version in range(3, 23):
        stream.send(snapshot=make_snapshot(version, table=make_table(version=version, arm=1 + version % 3)))
    stream.wait_for("ack", 22)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(versions) > 3
    assert [ack.version for ack in stream.of_kind("ack")] == list(range(1, 23))


def test_a_mixture_is_drawn_by_transfer_and_version_alone(served, make_table, make_snapshot):
    agent, stream = served
    table = make_table(version=7, mixed=True)
    stream.send(snapshot=make_snapshot(7, table=table))
    stream.wait_for("ack", 2)
    draws = [agent.draw(transfer_id=f"t{n}", **TRANSFER).drawn for n in range(400)]
    assert draws == [table.draw(f"t{n}", "chat", 14e6, 1e7, 0.0) for n in range(400)]
    assert 60 < sum(drawn.explored for drawn in draws) < 140


def test_a_share_of_the_coded_transfers_is_to_check_itself(served, make_table, make_snapshot):
    agent, stream = served
    assert not any(agent.draw(transfer_id=f"t{n}", **TRANSFER).self_check for n in range(500)), "nobody asked for it"
    for version, arm in ((2, 1), (3, 0)):
        table = dataclasses.replace(make_table(version=version, arm=arm), guard_sample=0.2)
        stream.send(snapshot=make_snapshot(version, table=table))
        stream.wait_for("ack", version)
        draws = [agent.draw(transfer_id=f"t{n}", **TRANSFER) for n in range(500)]
        assert {draw.drawn.table_version for draw in draws} == {version}
        share = sum(draw.self_check for draw in draws) / len(draws)
        assert share == (pytest.approx(0.2, abs=0.06) if arm else 0), "raw has nothing to decode"
