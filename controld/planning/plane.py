"""The planes of one deployment as planning sees them, and the requests that decisions are made from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from controld.candidates.distill import select_profiles
from controld.candidates.profile import Profile
from controld.contract.decision import RAW
from controld.contract.errors import FieldError
from controld.contract.snapshot import CalibratedArtefact, ClassRules, Resource, TenantShare
from controld.controller.goals import ClassGoal, Objective, TableRequest
from controld.controller.guard import PinBoard
from controld.controller.plan import Plan
from controld.controller.posterior import StageCorrection
from controld.fleet.identity import AgentIdentity
from controld.fleet.published import Selector
from controld.fleet.session import AgentSession
from controld.policy.model import Policy, ServiceClass, Tier

LINK_GROUP = "default"
"""The one link group there is so far."""

ARTEFACT_PARAMETERS = ("artefact", "head_profile")
"""The parameters of a configuration that name a calibrated artefact; at most one of them is active."""

SENDER_ROLE, RECEIVER_ROLE = "prefill", "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What profiles are chosen by: the model, and the hardware on both sides; empty where nobody connected yet."""

    model_fingerprint: str = ""
    sender_hardware: str = ""
    receiver_hardware: str = ""

    def to_document(self) -> dict[str, str]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Place:
        """The inverse. Raises: FieldError."""
        try:
            return cls(**document)
        except TypeError as error:
            raise FieldError("place", f"not a place: {error}") from error


def observe_place(before: Place, agents: Iterable[AgentIdentity]) -> tuple[Place, str]:
    """The place that the connected agents make up, and an alarm where they contradict each other.

    A side without an agent keeps what was last known of it. Agents that serve different models under one deployment
    leave no model at all: then everything goes raw, for quality is never inferred from another model.
    """
    serving = [agent for agent in agents if agent.role in (SENDER_ROLE, RECEIVER_ROLE)]
    fingerprints = {agent.model_fingerprint for agent in serving}
    if len(fingerprints) > 1:
        return Place(), f"agents serve {len(fingerprints)} different models under one deployment"
    senders = sorted(agent.hardware for agent in serving if agent.role == SENDER_ROLE)
    receivers = sorted(agent.hardware for agent in serving if agent.role == RECEIVER_ROLE)
    place = Place(
        model_fingerprint=next(iter(fingerprints), before.model_fingerprint),
        # Where ranks differ the slowest decides, and which one that is, effects will show.
        sender_hardware=senders[0] if senders else before.sender_hardware,
        receiver_hardware=receivers[0] if receivers else before.receiver_hardware,
    )
    return place, ""


def profiles_for(policy: Policy, place: Place, profiles: Sequence[Profile]) -> list[Profile]:
    """The profiles of this place for every workload that the policy names; one for each configuration and workload."""
    workloads = sorted({service_class.workload for service_class in policy.classes})
    return [
        profile
        for workload in workloads
        for profile in select_profiles(
            profiles,
            model_fingerprint=place.model_fingerprint,
            workload=workload,
            sender_hardware=place.sender_hardware,
            receiver_hardware=place.receiver_hardware,
        )
    ]


def unlearned_classes(policy: Policy) -> tuple[str, ...]:
    """Classes whose transfers teach nothing."""
    return tuple(c.name for c in policy.classes if not c.rule.learn)


def class_workloads(policy: Policy) -> dict[str, str]:
    """By service class: whose profiles judge its quality."""
    return {service_class.name: service_class.workload for service_class in policy.classes}


def tiers_of(policy: Policy) -> tuple[Tier, ...]:
    """The tiers of transfers that any class of the policy names, in a fixed order."""
    transfers = (tier for tier in Tier if tier is not Tier.VIDEO)
    return tuple(tier for tier in transfers if any(tier in c.tiers for c in policy.classes))


def table_requests(
    policy: Policy,
    place: Place,
    profiles: Sequence[Profile],
    learned: Mapping[tuple[str, str], tuple[Mapping[str, tuple[StageCorrection, ...]], PinBoard]],
    offered: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> list[TableRequest]:
    """One request for each tier.

    Args:
        profiles: as `profiles_for` gives them.
        learned: corrections and pins by (tier, link group); what is missing was not learned yet.
        offered: by tier, each class's part of the offered bytes; nothing where it is not known.
    """
    weights = {tenant.name: tenant.weight for tenant in policy.tenants}
    link = policy.link(LINK_GROUP)
    requests = []
    for tier in tiers_of(policy):
        corrections, pins = learned.get((tier.value, LINK_GROUP), ({}, PinBoard()))
        requests.append(
            TableRequest(
                tier=tier.value,
                link_group=LINK_GROUP,
                goals=tuple(
                    _goal(each, tier, weights.get(each.tenant, 1.0), offered.get(tier.value, {}).get(each.name))
                    for each in policy.classes
                ),
                profiles=tuple(profiles),
                corrections=corrections,
                sender_hardware=place.sender_hardware,
                receiver_hardware=place.receiver_hardware,
                pins=pins,
                prior_bandwidth_bytes_per_s=link.rate_bytes_per_s if link else 0.0,
                guard_sample=policy.guard.sample_share,
            )
        )
    return requests


def _goal(service_class: ServiceClass, tier: Tier, tenant_weight: float, offered_share: float | None) -> ClassGoal:
    slo = service_class.slo
    return ClassGoal(
        name=service_class.name,
        workload=service_class.workload,
        tenant=service_class.tenant,
        tenant_weight=tenant_weight,
        offered_share=offered_share,
        objective=Objective(service_class.objective.value),
        max_quality_loss_nats=service_class.max_quality_loss_nats,
        explore_share=service_class.explore_share,
        slo_s=(slo.ttft_s or slo.jct_s) if slo else None,
        slo_percentile=slo.percentile if slo else 50.0,
        # A class that does not name the tier stays raw there.
        only_arm=service_class.pin if tier in service_class.tiers else RAW,
    )


def resources_of(plan: Plan, policy: Policy, artefacts: Mapping[str, CalibratedArtefact]) -> list[Resource]:
    """What agents get: artefacts, a table for each tier, and the rules by which they find a request's class."""
    tables = [
        Resource(f"table/{table.tier}/{table.link_group}", table.decision_table(version=1)) for table in plan.tables
    ]
    named = [Resource(artefact_resource_name(name), artefacts[name]) for name in sorted(artefacts)]
    return [*named, *tables, Resource("class_rules", class_rules_of(policy))]


def class_rules_of(policy: Policy) -> ClassRules:
    """How requests find their class, and tenants share the links."""
    shares = sorted(policy.tenant_shares.items())
    return ClassRules(policy.rules, tuple(TenantShare(name, share) for name, share in shares))


def artefact_resource_name(artefact_id: str) -> str:
    """The name under which agents get an artefact."""
    return f"artefact/{artefact_id}"


def artefact_of(profile: Profile) -> str:
    """The artefact that a configuration names; empty where it names none."""
    return next((str(profile.configuration[name]) for name in ARTEFACT_PARAMETERS if name in profile.configuration), "")


def ready_profiles(
    profiles: Sequence[Profile], sessions: Iterable[AgentSession], offered: Mapping[str, CalibratedArtefact]
) -> tuple[list[Profile], set[str]]:
    """Profiles that a sender may use now, and the artefacts that the others wait for.

    Make before break: a configuration that names an artefact may be sent only once every connected receiver holds it,
    from its own folder (then its space names it) or from us (then it acknowledged it). Senders get it with the table.
    """
    serving = list(sessions)
    receivers = [session for session in serving if session.identity.role == RECEIVER_ROLE]
    senders = [session for session in serving if session.identity.role == SENDER_ROLE]
    waiting: set[str] = set()
    for artefact_id in {artefact_of(profile) for profile in profiles} - {""}:
        received = bool(receivers) and all(_holds(session, artefact_id, offered) for session in receivers)
        reachable = artefact_id in offered or all(_has_its_own(session, artefact_id) for session in senders)
        if not (received and reachable):
            waiting.add(artefact_id)
    return [profile for profile in profiles if artefact_of(profile) not in waiting], waiting


def _holds(session: AgentSession, artefact_id: str, offered: Mapping[str, CalibratedArtefact]) -> bool:
    acknowledged = session.artefacts_held.get(artefact_resource_name(artefact_id))
    got_ours = artefact_id in offered and acknowledged == offered[artefact_id].sha256
    return got_ours or _has_its_own(session, artefact_id)


def _has_its_own(session: AgentSession, artefact_id: str) -> bool:
    return f'"{artefact_id}"' in session.identity.space_json


def selector_of(policy: Policy) -> Selector:
    """Which planes a policy is for."""
    return Selector(policy.kind.value, policy.deployment)
