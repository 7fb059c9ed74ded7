"""What an agent has applied: one immutable value, exchanged whole when a snapshot was accepted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from controld.contract.configuration import Configuration
from controld.contract.decision import PREFIX_STORE, RECOMPUTE, ClassRule, DecisionTable
from controld.contract.errors import ControldError, FieldError
from controld.contract.fair_queue import Tenancy
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.checks import checked_count
from controld.contract.rpc.convert import resource_from_proto
from controld.contract.snapshot import CalibratedArtefact, ClassRules, Resource
from controld.contract.video import EngineSetting

ValidateConfiguration = Callable[[Configuration], None]
"""Raises where the data plane cannot run a configuration."""

HoldArtefact = Callable[[CalibratedArtefact], None]
"""Takes a calibrated artefact over; raises where it is of no use here. Tables that name it are checked afterwards."""

MAX_SNAPSHOT_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Applied:
    """The resources in force.

    Args:
        version: of the last accepted snapshot; 0 before the first.
        tables: by (tier, link group).
        rules: of service classes, in order.
        unlearned: classes whose transfers teach the estimators nothing.
        artefacts: by SHA-256.
        tenancy: who shares the links.
        settings: of video engines, by resource name.
    """

    version: int = 0
    policy_generation: int = 0
    resources: Mapping[str, Resource] = field(default_factory=dict)
    tables: Mapping[tuple[str, str], DecisionTable] = field(default_factory=dict)
    rules: tuple[ClassRule, ...] = ()
    unlearned: frozenset[str] = frozenset()
    artefacts: Mapping[str, CalibratedArtefact] = field(default_factory=dict)
    tenancy: Tenancy = field(default_factory=Tenancy)
    settings: Mapping[str, EngineSetting] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assembled:
    """A snapshot whose pages are all in."""

    version: int
    nonce: str
    ttl_s: float
    policy_generation: int
    resources: tuple[pb.Resource, ...]
    removed: tuple[str, ...]


class SnapshotRefusedError(ControldError):
    """A snapshot that must not be applied.

    Args:
        nonce, version: of the snapshot.
        resource: the resource at fault; empty where it is the snapshot itself.
    """

    def __init__(self, detail: str, *, nonce: str, version: int, resource: str = "", code: str) -> None:
        super().__init__(detail, code=code)
        self.nonce = nonce
        self.version = version
        self.resource = resource


class PageAssembler:
    """Collects the pages of one stream's snapshots, which come in order."""

    def __init__(self) -> None:
        self._pages: list[pb.Snapshot] = []
        self._bytes = 0
        self._refused_nonce: str | None = None

    def add(self, page: pb.Snapshot) -> Assembled | None:
        """The snapshot, once its last page is in.

        Raises:
            SnapshotRefusedError: the pages do not fit together, or are too large, once for each snapshot.
        """
        if page.nonce == self._refused_nonce:
            return None
        page_count = page.page_count or 1
        if page.page_index == 0:
            self._pages, self._bytes = [], 0
        first = self._pages[0] if self._pages else page
        problem = ""
        if page.page_index != len(self._pages) or page.page_index >= page_count:
            problem = f"page {page.page_index} of {page_count} came after {len(self._pages)} pages"
        elif (page.nonce, page.version, page.page_count) != (first.nonce, first.version, first.page_count):
            problem = "pages of different snapshots are mixed"
        self._bytes += page.ByteSize()
        if self._bytes > MAX_SNAPSHOT_BYTES:
            problem = f"is larger than {MAX_SNAPSHOT_BYTES} bytes"
        if problem:
            self._pages, self._refused_nonce = [], page.nonce
            raise SnapshotRefusedError(
                f"snapshot: {problem}", nonce=page.nonce, version=page.version, code="snapshot.pages"
            )
        self._pages.append(page)
        if len(self._pages) < page_count:
            return None
        pages, self._pages = self._pages, []
        return Assembled(
            version=first.version,
            nonce=first.nonce,
            ttl_s=first.ttl_s,
            policy_generation=first.policy_generation,
            resources=tuple(resource for each in pages for resource in each.resources),
            removed=tuple(name for each in pages for name in each.removed),
        )


def checked_ttl_s(ttl_s: float, field_name: str) -> float:
    """A lease's length. Raises: FieldError."""
    if not math.isfinite(ttl_s) or ttl_s <= 0:
        raise FieldError(field_name, f"{ttl_s} is not a positive finite time", code="lease.ttl")
    return ttl_s


def apply_snapshot(
    snapshot: Assembled,
    *,
    onto: Applied,
    validate_configuration: ValidateConfiguration,
    hold_artefact: HoldArtefact = lambda artefact: None,
    setting_name: str = "",
) -> tuple[Applied, int]:
    """The state after a snapshot: its resources replace those of the same name, what it removes goes.

    Args:
        onto: what is in force; an empty `Applied` for the first snapshot of a stream, which says everything.
        setting_name: name of the setting that is this agent's; those of others are not looked at.

    Returns:
        The new state, and how many resources were of an unknown kind (tolerated).

    Raises:
        SnapshotRefusedError: anything in it is not as it must be; nothing of it may be applied.
    """
    at = ""
    try:
        checked_count(snapshot.version, "snapshot.version")
        if snapshot.version < 1:
            raise FieldError("snapshot.version", f"{snapshot.version} is below 1")
        checked_ttl_s(snapshot.ttl_s, "snapshot.ttl_s")
        fresh: dict[str, Resource] = {}
        unknown = 0
        messages = _joined(snapshot.resources)
        # What a table names must be there before the table.
        for message in sorted(messages, key=lambda each: each.WhichOneof("payload") != "calibrated_artefact"):
            at = message.name
            resource = resource_from_proto(message, version=snapshot.version)
            if resource is None:
                unknown += 1
                continue
            if resource.name in fresh:
                raise FieldError("resource.name", f"{resource.name!r} comes twice")
            if isinstance(resource.payload, DecisionTable):
                _check_table(resource.payload, validate_configuration)
            elif isinstance(resource.payload, CalibratedArtefact):
                hold_artefact(resource.payload)
            elif isinstance(resource.payload, EngineSetting) and resource.name == setting_name:
                validate_configuration(resource.payload.configuration)
            fresh[resource.name] = resource
        at = ""
        kept = {name: old for name, old in onto.resources.items() if name not in snapshot.removed}
        return _indexed(snapshot, kept | fresh), unknown
    except ControldError as error:
        raise SnapshotRefusedError(
            str(error), nonce=snapshot.nonce, version=snapshot.version, resource=at, code=error.code
        ) from error
    except Exception as error:  # the data plane's validator is foreign code: whatever it raises refuses the snapshot
        raise SnapshotRefusedError(
            f"{type(error).__name__}: {error}",
            nonce=snapshot.nonce,
            version=snapshot.version,
            resource=at,
            code="snapshot.internal",
        ) from error


def _joined(messages: Sequence[pb.Resource]) -> list[pb.Resource]:
    """The messages with the parts of each artefact made one.

    Raises:
        FieldError: parts are missing, out of order or of different artefacts.
    """
    joined: list[pb.Resource] = []
    parts: list[pb.CalibratedArtefact] = []
    name = ""
    for message in messages:
        part = message.calibrated_artefact
        is_part = message.WhichOneof("payload") == "calibrated_artefact" and part.part_count > 1
        if parts and not is_part:
            break
        if not is_part:
            joined.append(message)
            continue
        first = parts[0] if parts else part
        name = name if parts else message.name
        same = (message.name, part.sha256, part.part_count) == (name, first.sha256, first.part_count)
        if part.part_index != len(parts) or not same:
            raise FieldError("calibrated_artefact.part_index", f"part {part.part_index} came after {len(parts)}")
        parts.append(part)
        if len(parts) == first.part_count:
            whole = pb.CalibratedArtefact(
                sha256=first.sha256,
                model_fingerprint=first.model_fingerprint,
                content=b"".join(each.content for each in parts),
            )
            joined.append(pb.Resource(name=name, calibrated_artefact=whole))
            parts = []
    if parts:
        raise FieldError("calibrated_artefact.part_count", f"{len(parts)} of {parts[0].part_count} parts came")
    return joined


def _check_table(table: DecisionTable, validate_configuration: ValidateConfiguration) -> None:
    for arm in table.arms:
        if arm.configuration is not None:
            validate_configuration(arm.configuration)
        elif arm.arm_id == RECOMPUTE and table.tier != PREFIX_STORE:
            raise FieldError("decision_table.arms", f"recompute is no arm of the tier {table.tier}")


def _indexed(snapshot: Assembled, resources: dict[str, Resource]) -> Applied:
    tables: dict[tuple[str, str], DecisionTable] = {}
    rules: list[ClassRule] = []
    weights: dict[str, float] = {}
    artefacts: dict[str, CalibratedArtefact] = {}
    settings: dict[str, EngineSetting] = {}
    for name in sorted(resources):
        payload = resources[name].payload
        if isinstance(payload, DecisionTable):
            key = (payload.tier, payload.link_group)
            if key in tables:
                raise FieldError("decision_table", f"two tables for tier {key[0]} and link group {key[1]}")
            tables[key] = payload
        elif isinstance(payload, ClassRules):
            rules.extend(payload.rules)
            weights.update({tenant.name: tenant.weight for tenant in payload.tenants})
        elif isinstance(payload, EngineSetting):
            settings[name] = payload
        else:
            artefacts[payload.sha256] = payload
    return Applied(
        version=snapshot.version,
        policy_generation=snapshot.policy_generation,
        resources=resources,
        tables=tables,
        rules=tuple(rules),
        unlearned=frozenset(rule.service_class for rule in rules if not rule.learn),
        artefacts=artefacts,
        tenancy=Tenancy(weights, {rule.service_class: rule.tenant for rule in rules if rule.tenant}),
        settings=settings,
    )
