"""A policy file as YAML: names, types and ranges of its keys. What needs more than one key is in `checks`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from controld.contract.decision import DEFAULT_CLASS, ClassRule
from controld.policy.model import (
    GuardPolicy,
    LinkPrior,
    Objective,
    OnBreach,
    PlaneKind,
    Policy,
    ServiceClass,
    Slo,
    Tenant,
    Tier,
    VideoTargets,
)
from controld.policy.settings import (
    PIN_PATTERN,
    DurationS,
    HalfShare,
    Name,
    PositiveShare,
    RateBytesPerS,
    Share,
    SizeBytes,
    StrictModel,
    refuse,
)

MAX_QUALITY_LOSS_NATS = 10.0
MAX_QUALITY_LOSS = 10.0
"""Of a video engine: ten times the latents' own variance is noise."""

MAX_FPS = 10_000.0
LEAST_FPS = 0.01
LEAST_MEMORY_BYTES = 1.0
MAX_DRIFT = 1000.0
MAX_CLASSES = 200
"""So many fit into one message with room to spare."""

_MIN_WEIGHT, _MAX_WEIGHT = 1e-6, 1e6
_MAX_PRIORITY = 2**31 - 1


class MetadataKeys(StrictModel):
    name: Name


class SelectKeys(StrictModel):
    kind: Annotated[PlaneKind, Field(strict=False)]
    deployment: Name


class LinkKeys(StrictModel):
    rate: RateBytesPerS


class LinksKeys(StrictModel):
    """By link group; there is one so far."""

    default: LinkKeys | None = None


class TenantKeys(StrictModel):
    name: Name
    weight: Annotated[float, Field(ge=_MIN_WEIGHT, le=_MAX_WEIGHT)]
    quota: RateBytesPerS | None = None
    share: PositiveShare | None = None

    @model_validator(mode="after")
    def _says_one_guarantee(self) -> TenantKeys:
        if self.quota is not None and self.share is not None:
            raise refuse("has both quota and share", "a rate or a part of the link, not both")
        return self

    def to_tenant(self, link_bytes_per_s: float | None) -> Tenant:
        """The same as a domain value; a quota without a link's rate was refused before."""
        of_rate = self.quota / link_bytes_per_s if self.quota and link_bytes_per_s else 0.0
        return Tenant(name=self.name, weight=self.weight, guaranteed_share=self.share or of_rate)


class MatchKeys(StrictModel):
    extra_key: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-_MAX_PRIORITY, le=_MAX_PRIORITY)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> MatchKeys:
        if self.extra_key is None and self.priority is None:
            raise refuse("matches nothing", "give extra_key, priority or both")
        return self


class SloKeys(StrictModel):
    ttft: DurationS | None = None
    jct: DurationS | None = None
    percentile: Annotated[float, Field(gt=0, lt=100)] = 90.0

    @model_validator(mode="after")
    def _names_one_latency(self) -> SloKeys:
        if (self.ttft is None) == (self.jct is None):
            raise refuse("needs exactly one of ttft and jct")
        return self


class VideoKeys(StrictModel):
    fps: Annotated[float, Field(ge=LEAST_FPS, le=MAX_FPS)] | None = None
    fps_denoise: Annotated[float, Field(ge=LEAST_FPS, le=MAX_FPS)] | None = None
    first_frame: Annotated[DurationS, Field(ge=0.001, le=86400.0)] | None = None
    memory: Annotated[SizeBytes, Field(ge=LEAST_MEMORY_BYTES)] | None = None
    percentile: Annotated[float, Field(ge=1, lt=100)] = 90.0

    @model_validator(mode="after")
    def _says_something(self) -> VideoKeys:
        if all(target is None for target in (self.fps, self.fps_denoise, self.first_frame, self.memory)):
            raise refuse("has no target", "give fps, first_frame, memory or fps_denoise")
        return self

    def to_targets(self) -> VideoTargets:
        """The same as a domain value."""
        return VideoTargets(
            fps=self.fps,
            fps_denoise=self.fps_denoise,
            first_frame_s=self.first_frame,
            memory_bytes=self.memory,
            percentile=self.percentile,
        )


class ClassKeys(StrictModel):
    name: Name
    tenant: Name = "default"
    match: MatchKeys | None = None
    workload: Name
    tiers: Annotated[list[Annotated[Tier, Field(strict=False)]], Field(min_length=1)]
    objective: Annotated[Objective, Field(strict=False)] | None = None
    slo: SloKeys | None = None
    max_quality_loss_nats: Annotated[float, Field(ge=0, le=MAX_QUALITY_LOSS_NATS)] = 0.0
    max_quality_loss: Annotated[float, Field(ge=0, le=MAX_QUALITY_LOSS)] = 0.0
    video: VideoKeys | None = None
    explore: HalfShare = 0.02
    pin: Annotated[str, Field(pattern=PIN_PATTERN)] | None = None
    learn: bool = True


class GuardKeys(StrictModel):
    sample: Share = 0.01
    on_breach: Annotated[OnBreach, Field(strict=False)] = OnBreach.PIN_OFF
    drift: Annotated[float, Field(gt=0, le=MAX_DRIFT)] | None = None
    motion: PositiveShare | None = None
    probe_every: Annotated[DurationS, Field(ge=60.0)] | None = None


def _only_default() -> list[TenantKeys]:
    return [TenantKeys(name="default", weight=1.0)]


class PolicyKeys(StrictModel):
    api_version: Annotated[Literal["controld/v1"], Field(alias="apiVersion")]
    kind: Literal["Policy"]
    metadata: MetadataKeys
    select: SelectKeys
    links: LinksKeys = LinksKeys()
    tenants: Annotated[list[TenantKeys], Field(min_length=1, default_factory=_only_default)]
    classes: Annotated[list[ClassKeys], Field(min_length=1, max_length=MAX_CLASSES)]
    guard: GuardKeys = GuardKeys()

    def to_policy(self, source_file: str) -> Policy:
        """The same as an immutable domain value."""
        link_bytes_per_s = self.links.default.rate if self.links.default else None
        return Policy(
            name=self.metadata.name,
            kind=self.select.kind,
            deployment=self.select.deployment,
            links=(LinkPrior(name="default", rate_bytes_per_s=self.links.default.rate),) if self.links.default else (),
            tenants=tuple(tenant.to_tenant(link_bytes_per_s) for tenant in self.tenants),
            classes=tuple(_service_class(keys, self.select.kind) for keys in self.classes),
            guard=GuardPolicy(
                sample_share=self.guard.sample,
                on_breach=self.guard.on_breach,
                probe_every_s=self.guard.probe_every,
                drift=self.guard.drift,
                motion=self.guard.motion,
            ),
            source_file=source_file,
        )


_USUAL_OBJECTIVE = {PlaneKind.SGLANG: Objective.LATENCY, PlaneKind.LONGLIVE: Objective.QUALITY}


def _service_class(keys: ClassKeys, kind: PlaneKind) -> ServiceClass:
    match = keys.match if keys.name != DEFAULT_CLASS else None
    slo = keys.slo
    return ServiceClass(
        name=keys.name,
        tenant=keys.tenant,
        rule=ClassRule(
            keys.name,
            extra_key=match.extra_key if match else None,
            priority=match.priority if match else None,
            learn=keys.learn,
        ),
        workload=keys.workload,
        tiers=tuple(keys.tiers),
        objective=keys.objective or _USUAL_OBJECTIVE[kind],
        slo=Slo(ttft_s=slo.ttft, jct_s=slo.jct, percentile=slo.percentile) if slo else None,
        max_quality_loss_nats=keys.max_quality_loss_nats,
        explore_share=keys.explore,
        pin=keys.pin,
        max_quality_loss=keys.max_quality_loss,
        video=keys.video.to_targets() if keys.video else None,
    )
