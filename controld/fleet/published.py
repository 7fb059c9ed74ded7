"""A published version, and how it is cut into messages."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.json_format import MessageToDict

from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.convert import MAX_MESSAGE_BYTES, resource_to_proto
from controld.contract.rpc.limits import MAX_PAGE_BYTES
from controld.contract.snapshot import CalibratedArtefact, Resource, ResourceKind
from controld.fleet.errors import FleetError

_ENVELOPE_BYTES = 64 * 1024
"""Room for the snapshot's own fields around its resources."""

_PART_BYTES = 2 * 1024 * 1024
"""Of a calibrated artefact's content, in one resource."""


@dataclass(frozen=True, slots=True)
class Selector:
    """The data planes that a version is for."""

    kind: str
    deployment: str


@dataclass(frozen=True, slots=True)
class SizedResource:
    """A resource ready to send, or one part of a calibrated artefact that is too large for a message.

    Args:
        artefact_sha256: hash of a calibrated artefact's content, whose bytes are not sent twice on one stream; None for
            anything else.
    """

    name: str
    kind: str
    message: pb.Resource
    size_bytes: int
    artefact_sha256: str | None
    part_index: int = 0


@dataclass(frozen=True, slots=True)
class Published:
    """One version of the resources of a selector."""

    version: int
    policy_generation: int
    resources: tuple[SizedResource, ...]

    @property
    def names(self) -> frozenset[str]:
        """Names of all resources."""
        return frozenset(resource.name for resource in self.resources)


def sized_resources(resources: Sequence[Resource]) -> tuple[SizedResource, ...]:
    """Convert and measure.

    Raises:
        FleetError: a name comes twice, or a resource does not fit into a message.
        FieldError: a resource cannot be expressed on the wire.
    """
    result: list[SizedResource] = []
    seen: set[str] = set()
    for resource in resources:
        if resource.name in seen:
            raise FleetError(f"resource {resource.name!r} comes twice", code="fleet.duplicate_resource")
        seen.add(resource.name)
        if isinstance(resource.payload, CalibratedArtefact):
            result.extend(_artefact_parts(resource.name, resource.payload))
            continue
        message = resource_to_proto(resource)
        size_bytes = message.ByteSize()
        if size_bytes > MAX_MESSAGE_BYTES - _ENVELOPE_BYTES:
            raise FleetError(
                f"resource {resource.name!r} has {size_bytes} bytes, more than a message of {MAX_MESSAGE_BYTES} holds",
                code="fleet.resource_size",
                hint="coarser edges or fewer classes",
            )
        result.append(SizedResource(resource.name, resource.kind.value, message, size_bytes, None))
    return tuple(result)


def _artefact_parts(name: str, artefact: CalibratedArtefact) -> Iterator[SizedResource]:
    starts = range(0, max(len(artefact.content), 1), _PART_BYTES)
    for index, start in enumerate(starts):
        message = pb.Resource(
            name=name,
            calibrated_artefact=pb.CalibratedArtefact(
                sha256=artefact.sha256,
                model_fingerprint=artefact.model_fingerprint,
                content=artefact.content[start : start + _PART_BYTES],
                part_index=index,
                part_count=len(starts),
            ),
        )
        kind = ResourceKind.CALIBRATED_ARTEFACT.value
        yield SizedResource(name, kind, message, message.ByteSize(), artefact.sha256, index)


def resources_json(resources: Sequence[SizedResource]) -> str:
    """The resources for the version's record; of an artefact its hash, not its bytes."""
    documents = []
    for resource in resources:
        if resource.artefact_sha256 is not None:
            if resource.part_index == 0:
                fingerprint = resource.message.calibrated_artefact.model_fingerprint
                named = {"sha256": resource.artefact_sha256, "model_fingerprint": fingerprint}
                documents.append({"name": resource.name, "calibrated_artefact": named})
            continue
        documents.append(MessageToDict(resource.message, preserving_proto_field_name=True))
    return json.dumps(documents, separators=(",", ":"))


def snapshot_pages(
    published: Published,
    *,
    nonce: str,
    ttl_s: float,
    kinds: Collection[str],
    artefacts_held: Mapping[str, str],
    names_sent: Collection[str],
    page_bytes: int = MAX_PAGE_BYTES,
) -> tuple[pb.Snapshot, ...]:
    """The messages of a snapshot, at least one.

    Args:
        nonce: names this sending on its stream.
        kinds: kinds of resource that the agent understands; empty means all.
        artefacts_held: SHA-256 by name of the artefacts that the agent has acknowledged on this stream; left out.
        names_sent: all names ever sent on this stream; those that no longer exist are listed as removed.
        page_bytes: about how large a page may be.
    """
    wanted = [
        resource
        for resource in published.resources
        if (not kinds or resource.kind in kinds)
        and (resource.artefact_sha256 is None or artefacts_held.get(resource.name) != resource.artefact_sha256)
    ]
    removed = sorted(set(names_sent) - published.names)
    pages = list(_pages(wanted, removed, page_bytes))
    for index, page in enumerate(pages):
        page.version = published.version
        page.nonce = nonce
        page.ttl_s = ttl_s
        page.policy_generation = published.policy_generation
        page.page_index = index
        page.page_count = len(pages)
    return tuple(pages)


def _pages(resources: Sequence[SizedResource], removed: Sequence[str], page_bytes: int) -> Iterator[pb.Snapshot]:
    page, size_bytes = pb.Snapshot(), 0
    for resource in resources:
        if size_bytes and size_bytes + resource.size_bytes > page_bytes:
            yield page
            page, size_bytes = pb.Snapshot(), 0
        page.resources.append(resource.message)
        size_bytes += resource.size_bytes
    for name in removed:
        name_bytes = len(name.encode()) + 8
        if size_bytes and size_bytes + name_bytes > page_bytes:
            yield page
            page, size_bytes = pb.Snapshot(), 0
        page.removed.append(name)
        size_bytes += name_bytes
    yield page
