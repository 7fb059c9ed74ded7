"""Snapshots: whole or not at all, the last known good kept, answers by nonce."""

from __future__ import annotations

import hashlib

import pytest

from controld.contract.errors import FieldError
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.convert import resource_to_proto
from controld.contract.snapshot import CalibratedArtefact, Resource

TRANSFER = {"transfer_id": "t", "service_class": "chat", "raw_bytes": 14_000_000, "tier": "pd"}


@pytest.fixture
def served(daemon, make_agent, make_snapshot):
    agent = make_agent(daemon.address)
    agent.start()
    stream = daemon.stream()
    stream.send(snapshot=make_snapshot(1))
    stream.wait_for("ack")
    return agent, stream


def refused(agent, stream, snapshot):
    """Send a snapshot that must be refused; the NACK, after checking that version 1 is still drawn from."""
    before = len(stream.of_kind("nack"))
    stream.send(snapshot=snapshot)
    nack = stream.wait_for("nack", before + 1)[-1]
    assert (nack.nonce, nack.version) == (snapshot.nonce, snapshot.version)
    assert nack.error_detail
    draw = agent.draw(**TRANSFER)
    assert (draw.reason, draw.drawn.table_version) == (None, 1)
    assert agent.snapshot().applied.version == 1
    return nack


def broken(make_snapshot, change):
    snapshot = make_snapshot(2)
    change(snapshot)
    return snapshot


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda s: s.resources[0].decision_table.cells.pop(), "decision_table.cells"),
        (lambda s: s.resources[0].decision_table.cells.__setitem__(0, 9), "decision_table.cells"),
        (lambda s: s.resources[0].decision_table.size_edges_bytes.append(float("nan")), "size_edges_bytes"),
        (lambda s: s.resources[0].decision_table.load_edges.extend([0.4]), "load_edges"),
        (lambda s: s.resources[0].decision_table.mixtures[0].weights.__setitem__(0, 0.5), "mixture.weights"),
        (lambda s: s.resources[0].decision_table.mixtures[0].weights.__setitem__(0, float("inf")), "mixture.weights"),
        (lambda s: setattr(s.resources[0].decision_table.arms[1], "arm_id", "0" * 16), "its configuration has the id"),
        (lambda s: setattr(s.resources[0].decision_table.arms[1], "configuration_json", "[1]"), "configuration"),
        (lambda s: s.resources[0].decision_table.arms.add(arm_id="recompute"), "recompute"),
        (lambda s: setattr(s.resources[0].decision_table, "prior_bandwidth_bytes_per_s", float("nan")), "prior"),
        (lambda s: setattr(s.resources[0].decision_table, "tier", ""), "tier"),
        (lambda s: s.resources[1].class_rules.rules.add(), "class_rules.rules[1].service_class"),
        (lambda s: s.resources.append(s.resources[0]), "twice"),
        (lambda s: s.resources.add(name="again").decision_table.CopyFrom(s.resources[0].decision_table), "two tables"),
        (
            lambda s: s.resources.add(name="a").calibrated_artefact.MergeFrom(pb.CalibratedArtefact(sha256="0")),
            "sha256",
        ),
        (lambda s: setattr(s, "ttl_s", float("nan")), "snapshot.ttl_s"),
        (lambda s: setattr(s, "ttl_s", 0.0), "snapshot.ttl_s"),
        (lambda s: setattr(s, "version", 0), "snapshot.version"),
        (lambda s: setattr(s, "version", 2**63), "snapshot.version"),
        (lambda s: setattr(s, "page_index", 1), "page 1 of 1"),
    ],
)
def test_a_snapshot_with_any_fault_is_refused_by_name_and_nothing_of_it_applies(served, make_snapshot, change, field):
    nack = refused(*served, broken(make_snapshot, change))
    assert field in nack.error_detail


def test_a_refusal_names_the_resource_and_good_snapshots_still_apply_afterwards(served, make_snapshot):
    agent, stream = served
    nack = refused(agent, stream, broken(make_snapshot, lambda s: s.resources[0].decision_table.cells.pop()))
    assert nack.resource == "pd/default"
    stream.send(snapshot=make_snapshot(3))
    stream.wait_for("ack", 2)
    assert agent.draw(**TRANSFER).drawn.table_version == 3
    assert agent.snapshot().counters["snapshots_refused"] == 1


def test_a_refused_snapshot_does_not_lengthen_the_lease(daemon, make_agent, make_snapshot):
    from controld.contract.clock import ManualClock

    clock = ManualClock()
    agent = make_agent(daemon.address, clock=clock)
    agent.start()
    stream = daemon.stream()
    stream.send(snapshot=make_snapshot(1, ttl_s=100.0))
    stream.wait_for("ack")
    clock.advance(60.0)
    refused(agent, stream, broken(make_snapshot, lambda s: s.resources[0].decision_table.cells.pop()))
    assert agent.snapshot().lease_left_s == pytest.approx(40.0)


@pytest.mark.parametrize("error", [FieldError("configuration.key_levels", "4 is not supported here"), KeyError("boom")])
def test_a_configuration_that_the_data_plane_cannot_run_refuses_the_snapshot(
    daemon, make_agent, make_snapshot, make_table, error
):
    def validate(configuration):
        if configuration["key_levels"] == 4:
            raise error

    agent = make_agent(daemon.address, validate_configuration=validate)
    agent.start()
    stream = daemon.stream()
    stream.send(snapshot=make_snapshot(1))
    nack = stream.wait_for("nack")[0]
    assert ("not supported here" in nack.error_detail) or ("boom" in nack.error_detail)
    assert nack.resource == "pd/default"
    assert agent.draw(**TRANSFER).reason == "no_table"


def test_pages_apply_when_the_last_one_is_in(served, make_snapshot):
    agent, stream = served
    whole = make_snapshot(2)
    for index, resource in enumerate(whole.resources):
        stream.send(
            snapshot=pb.Snapshot(
                version=2, nonce="paged", ttl_s=600.0, resources=[resource], page_index=index, page_count=2
            )
        )
        if index == 0:
            stream.send(lease_renewal={"version": 1, "ttl_s": 600.0})
    assert stream.wait_for("ack", 2)[-1].nonce == "paged"
    assert agent.draw(**TRANSFER).drawn.table_version == 2
    assert "lease_renewal_refused" not in agent.snapshot().counters  # version 1 was in force between the pages


def test_a_lost_page_refuses_the_snapshot_once_and_a_newer_one_replaces_an_unfinished_one(served, make_snapshot):
    _, stream = served
    page = pb.Snapshot(version=2, nonce="lossy", ttl_s=600.0, page_count=4)
    stream.send(snapshot=page)
    for index in (2, 3):
        page.page_index = index
        stream.send(snapshot=page)
    nack = stream.wait_for("nack")[0]
    assert "page 2 of 4 came after 1 pages" in nack.error_detail
    unfinished = pb.Snapshot(version=3, nonce="unfinished", ttl_s=600.0, page_count=2)
    stream.send(snapshot=unfinished)
    stream.send(snapshot=make_snapshot(4))
    assert stream.wait_for("ack", 2)[-1].version == 4
    assert len(stream.of_kind("nack")) == 1


def test_unknown_kinds_and_fields_are_tolerated(served, make_snapshot):
    agent, stream = served
    snapshot = make_snapshot(2)
    newer = pb.Resource(name="from the future")
    newer.MergeFromString(bytes([0xFA, 0x01, 0x03]) + b"abc")  # field 31, length-delimited
    snapshot.resources.append(newer)
    snapshot.MergeFromString(bytes([0xF8, 0x01, 0x07]))  # field 31, varint
    stream.send(snapshot=snapshot)
    stream.wait_for("ack", 2)
    assert agent.snapshot().counters["resource_kind_unknown"] == 1
    assert agent.draw(**TRANSFER).drawn.table_version == 2


def test_a_later_snapshot_changes_what_it_names_and_removes_what_it_says(served, make_snapshot):
    agent, stream = served
    content = b"basis"
    artefact = CalibratedArtefact(hashlib.sha256(content).hexdigest(), "model", content)
    stream.send(
        snapshot=pb.Snapshot(
            version=2,
            nonce="n2",
            ttl_s=600.0,
            resources=[resource_to_proto(Resource("artefact", artefact))],
            removed=["classes", "never there"],
            page_count=1,
        )
    )
    stream.wait_for("ack", 2)
    applied = agent.snapshot().applied
    assert set(applied.resources) == {"pd/default", "artefact"}
    assert applied.artefacts[artefact.sha256].content == content
    assert applied.rules == ()
    assert agent.draw(**TRANSFER).drawn.table_version == 1  # the table of version 1 is still the one in force


def test_the_first_snapshot_of_a_stream_says_everything(served, daemon, make_snapshot):
    agent, _ = served
    daemon.stop()
    daemon.start()
    stream = daemon.stream(1)
    only_rules = make_snapshot(1)
    del only_rules.resources[0]
    stream.send(snapshot=only_rules)
    stream.wait_for("ack")
    assert agent.draw(**TRANSFER).reason == "no_table"


def test_a_daemon_that_lost_its_count_may_send_a_lower_version(served, daemon, make_snapshot):
    agent, stream = served
    stream.send(snapshot=make_snapshot(999))
    stream.wait_for("ack", 2)
    daemon.stop()
    assert agent.draw(**TRANSFER).drawn.table_version == 999
    daemon.start()
    restarted = daemon.stream(1)
    restarted.send(snapshot=make_snapshot(1, nonce="n1"))
    assert restarted.wait_for("ack")[0].nonce == "n1"
    assert agent.draw(**TRANSFER).drawn.table_version == 1
