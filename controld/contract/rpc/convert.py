"""Between protobuf messages and the contract's values, for both sides of the stream.

Every `..._from_proto` validates and raises `FieldError` with the path of the field; unknown fields are tolerated by
protobuf itself, an unknown kind of resource by `resource_from_proto`. Integers above 2^53 are refused: no count or
size is that large, so such a number is a negative one that wrapped, or garbage.
"""

from __future__ import annotations

from controld.contract.configuration import Configuration
from controld.contract.decision import Arm, ClassRule, DecisionTable, Mixture
from controld.contract.effect import Effect, Half, Path, Verdict
from controld.contract.errors import FieldError
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.checks import (
    MAX_TEXT_CHARACTERS,
    checked_count,
    checked_enum,
    checked_text,
)
from controld.contract.rpc.convert_video import (
    engine_setting_from_proto,
    engine_setting_to_proto,
    engine_state_from_proto,
    engine_state_to_proto,
)
from controld.contract.snapshot import CalibratedArtefact, ClassRules, Resource, TenantShare
from controld.contract.telemetry import LinkEstimate, Telemetry
from controld.contract.video import EngineSetting

PROTOCOL_VERSION = 1

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Limit of one gRPC message, set on both ends."""

# ------------------------------------------------------------------------------------------- decision table


def decision_table_to_proto(table: DecisionTable) -> pb.DecisionTable:
    """The table without its version, which is the snapshot's."""
    return pb.DecisionTable(
        tier=table.tier,
        link_group=table.link_group,
        classes=table.classes,
        size_edges_bytes=table.size_edges_bytes,
        bandwidth_edges_bytes_per_s=table.bandwidth_edges_bytes_per_s,
        load_edges=table.load_edges,
        arms=[
            pb.Arm(
                arm_id=arm.arm_id,
                configuration_json="" if arm.configuration is None else arm.configuration.canonical_json,
            )
            for arm in table.arms
        ],
        mixtures=[
            pb.Mixture(
                arms=mixture.arms,
                weights=mixture.weights,
                raw_below_s=mixture.raw_below_s,
                raw_below_s_per_byte=mixture.raw_below_s_per_byte,
            )
            for mixture in table.mixtures
        ],
        cells=table.cells,
        prior_bandwidth_bytes_per_s=table.prior_bandwidth_bytes_per_s,
        guard_sample=table.guard_sample,
    )


def decision_table_from_proto(message: pb.DecisionTable, *, version: int) -> DecisionTable:
    """The table of a snapshot of this version.

    Raises:
        FieldError: the first field that is not as it must be.
    """
    for name in ("tier", "link_group"):
        if not checked_text(getattr(message, name), f"decision_table.{name}"):
            raise FieldError(f"decision_table.{name}", "is empty", code="rpc.empty")
    return DecisionTable(
        tier=message.tier,
        link_group=message.link_group,
        version=version,
        classes=tuple(message.classes),
        size_edges_bytes=tuple(message.size_edges_bytes),
        bandwidth_edges_bytes_per_s=tuple(message.bandwidth_edges_bytes_per_s),
        load_edges=tuple(message.load_edges),
        arms=tuple(
            Arm(arm.arm_id, Configuration.from_json(arm.configuration_json) if arm.configuration_json else None)
            for arm in message.arms
        ),
        mixtures=tuple(
            Mixture(tuple(m.arms), tuple(m.weights), m.raw_below_s, m.raw_below_s_per_byte) for m in message.mixtures
        ),
        cells=tuple(message.cells),
        prior_bandwidth_bytes_per_s=message.prior_bandwidth_bytes_per_s,
        guard_sample=message.guard_sample,
    )


# ------------------------------------------------------------------------------------------- other resources


def class_rules_to_proto(rules: ClassRules) -> pb.ClassRules:
    """Rules in their order.

    Raises:
        FieldError: an `extra_key` is the empty string, which on the wire means "any".
    """
    messages = []
    for index, rule in enumerate(rules.rules):
        if rule.extra_key == "":
            raise FieldError(f"class_rules.rules[{index}].extra_key", "is empty", code="rpc.empty")
        if rule.priority is not None and not -(2**63) <= rule.priority < 2**63:
            raise FieldError(f"class_rules.rules[{index}].priority", "does not fit into 64 bits", code="rpc.number")
        messages.append(
            pb.ClassRule(
                service_class=rule.service_class,
                extra_key=rule.extra_key or "",
                priority=rule.priority,
                unlearned=not rule.learn,
                tenant=rule.tenant,
            )
        )
    tenants = [pb.TenantShare(name=tenant.name, weight=tenant.weight) for tenant in rules.tenants]
    return pb.ClassRules(rules=messages, tenants=tenants)


def class_rules_from_proto(message: pb.ClassRules) -> ClassRules:
    """Raises: FieldError: a rule names no class, or a tenant has no name or no weight or comes twice."""
    rules = []
    for index, rule in enumerate(message.rules):
        if not rule.service_class:
            raise FieldError(f"class_rules.rules[{index}].service_class", "is empty", code="rpc.empty")
        rules.append(
            ClassRule(
                rule.service_class,
                extra_key=rule.extra_key or None,
                priority=rule.priority if rule.HasField("priority") else None,
                learn=not rule.unlearned,
                tenant=rule.tenant,
            )
        )
    return ClassRules(tuple(rules), tuple(TenantShare(tenant.name, tenant.weight) for tenant in message.tenants))


def resource_to_proto(resource: Resource) -> pb.Resource:
    """A named resource of any kind. Raises: FieldError."""
    payload = resource.payload
    if isinstance(payload, DecisionTable):
        return pb.Resource(name=resource.name, decision_table=decision_table_to_proto(payload))
    if isinstance(payload, ClassRules):
        return pb.Resource(name=resource.name, class_rules=class_rules_to_proto(payload))
    if isinstance(payload, EngineSetting):
        return pb.Resource(name=resource.name, engine_setting=engine_setting_to_proto(payload))
    return pb.Resource(
        name=resource.name,
        calibrated_artefact=pb.CalibratedArtefact(
            sha256=payload.sha256, model_fingerprint=payload.model_fingerprint, content=payload.content
        ),
    )


def resource_from_proto(message: pb.Resource, *, version: int) -> Resource | None:
    """The resource, or None where its kind is newer than this code.

    Raises:
        FieldError: a field of a known kind is not as it must be.
    """
    kind = message.WhichOneof("payload")
    if kind is None:
        return None
    if kind == "decision_table":
        return Resource(message.name, decision_table_from_proto(message.decision_table, version=version))
    if kind == "class_rules":
        return Resource(message.name, class_rules_from_proto(message.class_rules))
    if kind == "engine_setting":
        return Resource(message.name, engine_setting_from_proto(message.engine_setting))
    artefact = message.calibrated_artefact
    return Resource(message.name, CalibratedArtefact(artefact.sha256, artefact.model_fingerprint, artefact.content))


# ------------------------------------------------------------------------------------------- effects


def effect_to_proto(effect: Effect, *, seq: int) -> pb.Effect:
    """The effect under its sequence number, which counts from 1."""
    return pb.Effect(
        seq=seq,
        transfer_id=effect.transfer_id,
        half=effect.half.value,
        arm_id=effect.arm_id,
        table_version=effect.table_version,
        service_class=effect.service_class,
        tier=effect.tier,
        link_group=effect.link_group,
        tokens=effect.tokens,
        chunks=effect.chunks,
        raw_bytes=effect.raw_bytes,
        wire_bytes=effect.wire_bytes,
        encode_s=effect.encode_s,
        wire_s=effect.wire_s,
        decode_s=effect.decode_s,
        wait_s=effect.wait_s,
        total_s=effect.total_s,
        path=effect.path.value,
        verdict=effect.verdict.value,
        reason=effect.reason,
        expected_bytes=effect.expected_bytes,
        bandwidth_bytes_per_s=effect.bandwidth_bytes_per_s,
        load=effect.load,
        explored=effect.explored,
        finished_unix_s=effect.finished_unix_s,
        reconstruction_error=effect.reconstruction_error,
    )


def effect_from_proto(message: pb.Effect) -> Effect:
    """The effect; its sequence number stays in the message.

    Raises:
        FieldError: a number is not finite, negative or absurd, a name is empty or too long, or an enumeration's value
            is unknown.
    """
    for name in ("table_version", "tokens", "chunks", "raw_bytes", "wire_bytes"):
        checked_count(getattr(message, name), f"effect.{name}")
    for name in ("transfer_id", "arm_id", "service_class", "tier", "link_group"):
        checked_text(getattr(message, name), f"effect.{name}")
    return Effect(
        transfer_id=message.transfer_id,
        half=checked_enum(Half, message.half, "effect.half"),
        arm_id=message.arm_id,
        table_version=message.table_version,
        service_class=message.service_class,
        tier=message.tier,
        link_group=message.link_group,
        tokens=message.tokens,
        chunks=message.chunks,
        raw_bytes=message.raw_bytes,
        wire_bytes=message.wire_bytes,
        encode_s=message.encode_s,
        wire_s=message.wire_s,
        decode_s=message.decode_s,
        wait_s=message.wait_s,
        total_s=message.total_s,
        path=checked_enum(Path, message.path, "effect.path"),
        verdict=checked_enum(Verdict, message.verdict, "effect.verdict"),
        reason=checked_text(message.reason, "effect.reason", MAX_TEXT_CHARACTERS),
        expected_bytes=message.expected_bytes,
        bandwidth_bytes_per_s=message.bandwidth_bytes_per_s,
        load=message.load,
        explored=message.explored,
        finished_unix_s=message.finished_unix_s,
        reconstruction_error=message.reconstruction_error if message.HasField("reconstruction_error") else None,
    )


# ------------------------------------------------------------------------------------------- telemetry


def telemetry_to_proto(telemetry: Telemetry) -> pb.Telemetry:
    """An agent's report."""
    return pb.Telemetry(
        attached=telemetry.attached,
        attach_reason=telemetry.attach_reason,
        applied_version=telemetry.applied_version,
        links=[
            pb.LinkEstimate(
                link_group=link.link_group,
                tier=link.tier,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
                bandwidth_sd_bytes_per_s=link.bandwidth_sd_bytes_per_s,
                bandwidth_age_s=link.bandwidth_age_s,
                offered_bytes_per_s=link.offered_bytes_per_s,
                offered_sd_bytes_per_s=link.offered_sd_bytes_per_s,
                backlog_bytes=link.backlog_bytes,
                transfers=link.transfers,
                offered_by_class_bytes_per_s=link.offered_by_class_bytes_per_s,
            )
            for link in telemetry.links
        ],
        counters=telemetry.counters,
        lease_left_s=telemetry.lease_left_s,
        engine=None if telemetry.engine is None else engine_state_to_proto(telemetry.engine),
    )


def telemetry_from_proto(message: pb.Telemetry) -> Telemetry:
    """Raises: FieldError: a number is not finite, negative or absurd, or a link group comes twice."""
    for index, link in enumerate(message.links):
        checked_count(link.backlog_bytes, f"telemetry.links[{index}].backlog_bytes")
        checked_count(link.transfers, f"telemetry.links[{index}].transfers")
    return Telemetry(
        attached=message.attached,
        attach_reason=checked_text(message.attach_reason, "telemetry.attach_reason", MAX_TEXT_CHARACTERS),
        applied_version=checked_count(message.applied_version, "telemetry.applied_version"),
        links=tuple(
            LinkEstimate(
                link_group=link.link_group,
                tier=link.tier,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
                bandwidth_sd_bytes_per_s=link.bandwidth_sd_bytes_per_s,
                bandwidth_age_s=link.bandwidth_age_s,
                offered_bytes_per_s=link.offered_bytes_per_s,
                offered_sd_bytes_per_s=link.offered_sd_bytes_per_s,
                backlog_bytes=link.backlog_bytes,
                transfers=link.transfers,
                offered_by_class_bytes_per_s={
                    checked_text(name, f"telemetry.links[{index}].offered_by_class_bytes_per_s"): value
                    for name, value in link.offered_by_class_bytes_per_s.items()
                },
            )
            for index, link in enumerate(message.links)
        ),
        counters={
            checked_text(name, "telemetry.counters"): checked_count(value, f"telemetry.counters[{name!r}]")
            for name, value in message.counters.items()
        },
        lease_left_s=message.lease_left_s,
        engine=engine_state_from_proto(message.engine) if message.HasField("engine") else None,
    )
