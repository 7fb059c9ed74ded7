"""Calibrated artefacts of a snapshot: joined from parts, held before tables are checked, refused whole."""

from __future__ import annotations

import hashlib

import pytest

from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.convert import resource_to_proto
from controld.contract.snapshot import CalibratedArtefact, Resource
from controld.fleet.published import sized_resources
from dataplanes.agent.applied import Applied, Assembled, SnapshotRefusedError, apply_snapshot

CONTENT = bytes(range(256)) * 20_000


def artefact(content: bytes = CONTENT) -> CalibratedArtefact:
    return CalibratedArtefact(hashlib.sha256(content).hexdigest(), "model", content)


def parts() -> list[pb.Resource]:
    sized = sized_resources([Resource("artefact/a", artefact())])
    assert len(sized) == 3
    return [each.message for each in sized]


def snapshot(*resources: pb.Resource) -> Assembled:
    return Assembled(1, "n", 600.0, 1, resources, ())


def apply(assembled: Assembled, **callbacks) -> Applied:
    return apply_snapshot(
        assembled, onto=Applied(), **({"validate_configuration": lambda configuration: None} | callbacks)
    )[0]


def test_parts_become_one_and_are_held_before_any_table_is_checked(make_snapshot) -> None:
    events: list[str] = []
    tables = list(make_snapshot(1).resources)
    applied = apply(
        snapshot(*tables, *parts()),
        validate_configuration=lambda configuration: events.append("table"),
        hold_artefact=lambda held: events.append(held.sha256),
    )
    assert events[0] == artefact().sha256
    assert "table" in events
    assert applied.artefacts[artefact().sha256].content == CONTENT


@pytest.mark.parametrize(
    "order", [[0, 1], [1, 0, 2], [0, 0, 1, 2], [0, 2], [1, 2]], ids=["short", "swapped", "twice", "hole", "headless"]
)
def test_parts_that_do_not_fit_together_are_refused(order: list[int]) -> None:
    with pytest.raises(SnapshotRefusedError, match="part"):
        apply(snapshot(*(parts()[index] for index in order)))


def test_a_part_of_something_else_is_refused() -> None:
    first, second, third = parts()
    second.calibrated_artefact.sha256 = "0" * 64
    with pytest.raises(SnapshotRefusedError, match="part"):
        apply(snapshot(first, second, third))
    rules = pb.Resource(name="classes", class_rules=pb.ClassRules())
    with pytest.raises(SnapshotRefusedError, match="part"):
        apply(snapshot(first, rules))


def test_a_changed_byte_is_refused() -> None:
    first, second, third = parts()
    content = bytearray(second.calibrated_artefact.content)
    content[7] ^= 1
    second.calibrated_artefact.content = bytes(content)
    with pytest.raises(SnapshotRefusedError, match="sha256"):
        apply(snapshot(first, second, third))


def test_what_the_plane_refuses_refuses_the_snapshot() -> None:
    def refuse(held: CalibratedArtefact) -> None:
        raise ValueError("another model's")

    with pytest.raises(SnapshotRefusedError, match="another model's") as caught:
        apply(snapshot(resource_to_proto(Resource("artefact/a", artefact(b"small")))), hold_artefact=refuse)
    assert caught.value.resource == "artefact/a"
