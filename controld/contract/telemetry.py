"""What an agent says every few seconds: whether it is attached, what it applied, what it sees of its links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from controld.contract.errors import FieldError
from controld.contract.video import EngineState


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEstimate:
    """One link group as an agent sees it. Bytes and seconds; a bandwidth of 0 means: nothing was seen yet.

    Args:
        bandwidth_age_s: since the last transfer that went into the estimate.
        offered_bytes_per_s: raw bytes offered to the queue, per second.
        backlog_bytes: raw bytes that wait in the queue now.
        transfers: how many wire spans went into the estimate, in total.
        offered_by_class_bytes_per_s: `offered_bytes_per_s` by service class; empty where the agent does not tell.
    """

    link_group: str
    tier: str
    bandwidth_bytes_per_s: float = 0.0
    bandwidth_sd_bytes_per_s: float = 0.0
    bandwidth_age_s: float = 0.0
    offered_bytes_per_s: float = 0.0
    offered_sd_bytes_per_s: float = 0.0
    backlog_bytes: int = 0
    transfers: int = 0
    offered_by_class_bytes_per_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("link_group", "tier"):
            if not getattr(self, name):
                raise FieldError(f"link_estimate.{name}", "is empty", code="telemetry.empty")
        for name in _NUMBERS:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise FieldError(
                    f"link_estimate.{name}", f"{value} is not a finite non-negative number", code="telemetry.number"
                )
        for service_class, value in self.offered_by_class_bytes_per_s.items():
            if not math.isfinite(value) or value < 0:
                raise FieldError(
                    f"link_estimate.offered_by_class_bytes_per_s[{service_class!r}]",
                    f"{value} is not a finite non-negative number",
                    code="telemetry.number",
                )


_NUMBERS = (
    "bandwidth_bytes_per_s", "bandwidth_sd_bytes_per_s", "bandwidth_age_s", "offered_bytes_per_s",
    "offered_sd_bytes_per_s", "backlog_bytes", "transfers",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """An agent's report.

    Args:
        attached: said from inside the hooked class of the data plane.
        attach_reason: why it is not attached; empty where it is.
        applied_version: the snapshot that draws are made from; 0 where there is none (or its lease is over).
        links: one for each tier and link group.
        counters: by bounded names, each ever rising within one instance.
        lease_left_s: seconds until the applied snapshot must not be used any more.
        engine: a video engine's state; None of any other plane.
    """

    attached: bool
    attach_reason: str = ""
    applied_version: int = 0
    links: tuple[LinkEstimate, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    lease_left_s: float = 0.0
    engine: EngineState | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.lease_left_s):
            raise FieldError("telemetry.lease_left_s", f"{self.lease_left_s} is not finite", code="telemetry.number")
        keys = [(link.tier, link.link_group) for link in self.links]
        if len(set(keys)) != len(keys):
            raise FieldError("telemetry.links", "a tier and link group come twice", code="telemetry.duplicate")
