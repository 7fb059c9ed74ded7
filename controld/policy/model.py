"""The policy set that the daemon works with: immutable, in SI units, already valid."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from controld.contract.decision import ClassRule
from controld.contract.fair_queue import guaranteed_shares


class PlaneKind(StrEnum):
    """Kinds of data planes that a policy can be for."""

    SGLANG = "sglang"
    LONGLIVE = "longlive"


class Tier(StrEnum):
    """Where inference state moves."""

    PD = "pd"
    PREFIX_STORE = "prefix_store"
    VIDEO = "video"


TIERS_BY_KIND: dict[PlaneKind, tuple[Tier, ...]] = {
    PlaneKind.SGLANG: (Tier.PD, Tier.PREFIX_STORE),
    PlaneKind.LONGLIVE: (Tier.VIDEO,),
}


class Objective(StrEnum):
    """What a class wants least of, among the arms that meet its SLO."""

    LATENCY = "latency"
    QUALITY = "quality"
    BYTES = "bytes"
    ENERGY = "energy"


class OnBreach(StrEnum):
    """What the quality guard does with an arm that broke a limit."""

    PIN_OFF = "pin_off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """A promise about one latency; exactly one of the two is set.

    Args:
        ttft_s: time to first token, seconds.
        jct_s: job completion time, seconds.
        percentile: of the requests that keep it, in (0, 100).
    """

    ttft_s: float | None = None
    jct_s: float | None = None
    percentile: float = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoTargets:
    """What a video engine's sessions of a class are owed; None: no such target.

    Args:
        fps: frames per second that come out, decoding included, for each session.
        fps_denoise: frames per second of the denoising loop alone, of the whole engine. Published frame rates are of
            this kind; nobody watches them.
        first_frame_s: from opening a session to its first frame, seconds.
        memory_bytes: of the device, for the engine with all its sessions.
        percentile: of the chunks that keep the rates and the delay, in (0, 100).
    """

    fps: float | None = None
    fps_denoise: float | None = None
    first_frame_s: float | None = None
    memory_bytes: float | None = None
    percentile: float = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """A kind of request and what it is owed.

    Args:
        name: unique in its policy.
        tenant: whose share of the link it uses.
        rule: which requests belong to it; `default` has a rule that matches nothing and takes the rest.
        workload: whose profiles it uses.
        tiers: where it may be compressed.
        max_quality_loss_nats: limit on the mean KL per token; 0 means lossless only.
        explore_share: share of its transfers that may go to arms that are not the best known.
        pin: the one arm that it takes (`raw` or a configuration's id), within its quality limit; else None.
        max_quality_loss: of a video engine's class: by how much the error may rise against the reference setting, in
            the unit of its profiles (the reference engine's: the complement of Dice's coefficient); 0: no loss at all.
        video: targets of a video engine's class; None in any other.
    """

    name: str
    tenant: str
    rule: ClassRule
    workload: str
    tiers: tuple[Tier, ...]
    objective: Objective
    slo: Slo | None
    max_quality_loss_nats: float
    explore_share: float
    pin: str | None = None
    max_quality_loss: float = 0.0
    video: VideoTargets | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who shares the links, and in which proportion.

    Args:
        weight: only its ratio to the other tenants' matters.
        guaranteed_share: part of the link that it has at least while everybody wants some, in [0, 1].
    """

    name: str
    weight: float
    guaranteed_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPrior:
    """What the operator knows of a link group before anything was measured."""

    name: str
    rate_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardPolicy:
    """How closely quality is watched while serving.

    Args:
        sample_share: share of the transfers whose frames the sender decodes itself.
        on_breach: what happens to an arm that broke the limit.
        drift: of a video engine: most that latents may drift from the sink's, in the sink's deviations; None: any.
        motion: of a video engine: least part of the reference setting's motion that a setting must keep; None: any.
        probe_every_s: how often an idle profiling worker measures an arm in use again; None: never.
    """

    sample_share: float
    on_breach: OnBreach
    drift: float | None = None
    motion: float | None = None
    probe_every_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything the operator wants of the planes of one deployment. Classes are in the order of matching."""

    name: str
    kind: PlaneKind
    deployment: str
    links: tuple[LinkPrior, ...]
    tenants: tuple[Tenant, ...]
    classes: tuple[ServiceClass, ...]
    guard: GuardPolicy
    source_file: str

    @property
    def rules(self) -> tuple[ClassRule, ...]:
        """The rules of its classes, top to bottom, with whose share each uses."""
        return tuple(replace(service_class.rule, tenant=service_class.tenant) for service_class in self.classes)

    @property
    def tenant_shares(self) -> dict[str, float]:
        """What each tenant gets of a link while all want more: by weight, nobody below its guarantee; they sum to 1."""
        return guaranteed_shares(
            {tenant.name: tenant.weight for tenant in self.tenants},
            {tenant.name: tenant.guaranteed_share for tenant in self.tenants},
        )

    def service_class(self, name: str) -> ServiceClass | None:
        """The class of that name."""
        return next((c for c in self.classes if c.name == name), None)

    def link(self, name: str) -> LinkPrior | None:
        """What is known of that link group."""
        return next((link for link in self.links if link.name == name), None)


@dataclass(frozen=True)
class PolicySet:
    """All policies of the daemon at one generation.

    Args:
        generation: rises by one with every change of meaning; at least 1.
        content_hash: of the meaning; order of keys, comments and file names do not touch it.
        policies: in the order of their names.
    """

    generation: int
    content_hash: str
    policies: tuple[Policy, ...]

    @cached_property
    def _by_plane(self) -> dict[tuple[str, str], Policy]:
        return {(policy.kind, policy.deployment): policy for policy in self.policies}

    def for_plane(self, kind: str, deployment: str) -> Policy | None:
        """The policy that selects these planes, or None: they stay raw."""
        return self._by_plane.get((kind, deployment))


def content_hash(policies: Iterable[Policy]) -> str:
    """SHA-256 over what the policies mean, in hexadecimal.

    The order of classes counts, for they match top to bottom; that of policies, tenants, links and tiers does not.
    """
    canonical = []
    for policy in policies:
        data = asdict(policy)
        del data["source_file"]
        # What a policy does not say is left out: its hash outlives the release that made it.
        if data["guard"]["probe_every_s"] is None:
            _forget(data["guard"], "probe_every_s")
        if policy.kind is not PlaneKind.LONGLIVE:
            _forget(data["guard"], "drift", "motion")
            for service_class in data["classes"]:
                _forget(service_class, "video", "max_quality_loss")
        data["links"] = sorted(data["links"], key=lambda link: link["name"])
        data["tenants"] = sorted(data["tenants"], key=lambda tenant: tenant["name"])
        for service_class in data["classes"]:
            service_class["tiers"] = sorted(service_class["tiers"])
        canonical.append(data)
    canonical.sort(key=lambda data: data["name"])
    return hashlib.sha256(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _forget(data: dict[str, Any], *names: str) -> None:
    for name in names:
        del data[name]
