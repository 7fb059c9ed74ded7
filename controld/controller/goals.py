"""What decisions are made for and from: a class's goal, its candidates, and the inputs of one table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, lru_cache

import numpy as np

from controld.candidates.profile import NO_TIME, Profile, StageTime
from controld.contract.configuration import Configuration
from controld.contract.configuration_label import configuration_label
from controld.contract.decision import PREFIX_STORE, RAW, RECOMPUTE, Arm
from controld.contract.errors import FieldError
from controld.controller.guard import PinBoard
from controld.controller.knobs.base import Corrections, StageModels
from controld.controller.posterior import StageCorrection, prior_corrections

RAW_OVERHEAD = StageTime(1e-3, 0.0)
"""What raw costs beside the wire until it is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTime:
    """Seconds to compute the KV of a prefix again, by its raw bytes: `a + b V + c V^2`, as a plane measured it.

    Args:
        c_s_per_byte2: attention's part; tokens are proportional to bytes.
    """

    a_s: float
    b_s_per_byte: float
    c_s_per_byte2: float = 0.0

    def __post_init__(self) -> None:
        for name in ("a_s", "b_s_per_byte", "c_s_per_byte2"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise FieldError(f"prefill_time.{name}", f"{value} is not a finite non-negative number")
        if self.a_s == self.b_s_per_byte == self.c_s_per_byte2 == 0:
            raise FieldError("prefill_time", "is zero: nothing is computed in no time")

    def seconds(self, raw_bytes: float) -> float:
        """Seconds for a prefix of `raw_bytes`."""
        return self.a_s + raw_bytes * (self.b_s_per_byte + raw_bytes * self.c_s_per_byte2)


class Objective(StrEnum):
    """What a class wants, among the arms that meet its SLO."""

    LATENCY = "latency"
    QUALITY = "quality"
    BYTES = "bytes"
    ENERGY = "energy"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassGoal:
    """A service class as the controller sees it.

    Args:
        max_quality_loss_nats: arms whose loss's upper bound is above it are out.
        explore_share: at most this share of the transfers goes to other arms than the best.
        slo_s: seconds within which the request must be served, or None.
        slo_percentile: for which percentile of the requests the SLO holds.
        outside: seconds of the SLO that are spent outside the transfer (prefill and so on), by raw bytes.
        tenant_weight: the tenant's, as the policy gives it; only ratios matter.
        offered_share: this class's share of the offered bytes, in [0, 1]; None where unknown, and then each class is
            decided as if all load were its own.
        only_arm: the one arm this class may use (besides raw, should the arm be out); for comparisons.
    """

    name: str
    workload: str
    tenant: str = "default"
    tenant_weight: float = 1.0
    objective: Objective = Objective.LATENCY
    max_quality_loss_nats: float = 0.0
    explore_share: float = 0.02
    slo_s: float | None = None
    slo_percentile: float = 50.0
    outside: StageTime = NO_TIME
    offered_share: float | None = None
    only_arm: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_quality_loss_nats", "explore_share"):
            if not math.isfinite(getattr(self, name)) or getattr(self, name) < 0:
                raise FieldError(f"class.{self.name}.{name}", "is not a finite non-negative number")
        if self.explore_share > 0.5:
            raise FieldError(f"class.{self.name}.explore_share", "is above a half")
        if self.slo_s is not None and not (math.isfinite(self.slo_s) and self.slo_s > 0):
            raise FieldError(f"class.{self.name}.slo_s", "is not a finite positive number")
        if not 0 < self.slo_percentile < 100:
            raise FieldError(f"class.{self.name}.slo_percentile", "is not between 0 and 100")
        if not (math.isfinite(self.tenant_weight) and self.tenant_weight > 0):
            raise FieldError(f"class.{self.name}.tenant_weight", "is not a finite positive number")
        if self.offered_share is not None and not 0 <= self.offered_share <= 1:
            raise FieldError(f"class.{self.name}.offered_share", "is not in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One arm of one class with all numbers that decide about it.

    Args:
        label: short and readable.
        wire_share: wire bytes / raw bytes.
        encode, decode: seconds of a transfer; raw's own overhead is its `encode`.
        foreign: the times were measured on other hardware.
        corrections: one for each of `STAGES`, in their order.
        out_reason: why it is pinned off; empty where it is not.
        encode_c_s_per_byte2: of the recompute arm, whose `encode` is the affine part of its prefill.
    """

    arm_id: str
    label: str
    configuration: Configuration | None
    loss_mean_nats: float
    loss_upper_nats: float
    wire_share: float
    encode: StageTime
    decode: StageTime
    corrections: tuple[StageCorrection, ...]
    foreign: bool = False
    out_reason: str = ""
    encode_c_s_per_byte2: float = 0.0

    @property
    def arm(self) -> Arm:
        """As it goes into a table."""
        return Arm(self.arm_id, self.configuration)


def raw_candidate(overhead: StageTime, corrections: tuple[StageCorrection, ...] | None = None) -> Candidate:
    """The raw arm: no loss, its own measured overhead."""
    return Candidate(
        arm_id=RAW,
        label=RAW,
        configuration=None,
        loss_mean_nats=0.0,
        loss_upper_nats=0.0,
        wire_share=1.0,
        encode=overhead,
        decode=NO_TIME,
        corrections=corrections or prior_corrections(foreign=False),
    )


def recompute_candidate(
    prefill: PrefillTime, corrections: tuple[StageCorrection, ...] | None = None, out_reason: str = ""
) -> Candidate:
    """The arm that loads nothing and computes the prefix again: no loss, no bytes, the prefill's seconds."""
    return Candidate(
        arm_id=RECOMPUTE,
        label=RECOMPUTE,
        configuration=None,
        loss_mean_nats=0.0,
        loss_upper_nats=0.0,
        wire_share=0.0,
        encode=StageTime(prefill.a_s, prefill.b_s_per_byte),
        decode=NO_TIME,
        corrections=corrections or prior_corrections(foreign=False),
        out_reason=out_reason,
        encode_c_s_per_byte2=prefill.c_s_per_byte2,
    )


def profile_candidate(
    profile: Profile,
    sender_hardware: str,
    receiver_hardware: str,
    *,
    corrections: tuple[StageCorrection, ...] | None = None,
    out_reason: str = "",
) -> Candidate:
    """A profile as an arm of a plane with this hardware; without corrections, the priors'."""
    foreign = is_foreign(profile, sender_hardware, receiver_hardware)
    return Candidate(
        arm_id=profile.arm_id,
        label=_label(profile.configuration),
        configuration=profile.configuration,
        loss_mean_nats=profile.loss_mean_nats,
        loss_upper_nats=profile.loss_upper_nats,
        wire_share=profile.bytes_objective,
        encode=profile.encode,
        decode=profile.decode,
        corrections=corrections or prior_corrections(foreign=foreign),
        foreign=foreign,
        out_reason=out_reason,
    )


@lru_cache(maxsize=4096)
def _label(configuration: Configuration) -> str:
    """Labels are asked for at every plan, for the same configurations again and again."""
    return configuration_label(configuration)


@dataclass(frozen=True)
class ClassInput:
    """A class with its candidates; raw comes first."""

    goal: ClassGoal
    candidates: tuple[Candidate, ...]

    @cached_property
    def models(self) -> StageModels:
        """The candidates as coefficient arrays."""

        def column(values: Sequence[float]) -> np.ndarray:
            return np.array(values, dtype=np.float64)

        return StageModels(
            encode_a_s=column([c.encode.a_s for c in self.candidates]),
            encode_b_s_per_byte=column([c.encode.b_s_per_byte for c in self.candidates]),
            decode_a_s=column([c.decode.a_s for c in self.candidates]),
            decode_b_s_per_byte=column([c.decode.b_s_per_byte for c in self.candidates]),
            wire_share=column([c.wire_share for c in self.candidates]),
            framed=np.array([c.arm_id not in (RAW, RECOMPUTE) for c in self.candidates]),
            encode_c_s_per_byte2=column([c.encode_c_s_per_byte2 for c in self.candidates]),
        )

    @cached_property
    def corrections(self) -> Corrections:
        """The candidates' corrections as arrays [arms, stages]."""

        def matrix(name: str) -> np.ndarray:
            return np.array([[getattr(s, name) for s in c.corrections] for c in self.candidates], dtype=np.float64)

        return Corrections(
            mean_log=matrix("mean_log"),
            variance=matrix("variance"),
            noise_variance=matrix("noise_variance"),
            observations=matrix("observations"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRequest:
    """Everything that one table is decided from.

    Args:
        profiles: of this model; each class takes those of its workload.
        corrections: what was learned, by arm id (raw included); arms without an entry have none.
        raw_overhead: seconds of a raw transfer beside the wire.
        sender_hardware, receiver_hardware: of the planes; profiles from elsewhere are marked foreign.
        pins: arms that must not be used, with reasons.
        prior_bandwidth_bytes_per_s: the operator's word on the link; 0 where unknown.
        guard_sample: share of the coded transfers in which the sender checks itself.
        prefill: what computing a prefix again takes, which opens the arm that does; None where nobody measured it.

    Raises:
        FieldError: `prefill` in another tier than the prefix store: elsewhere the KV is nowhere else to be had.
    """

    tier: str
    link_group: str
    goals: tuple[ClassGoal, ...]
    profiles: tuple[Profile, ...] = ()
    corrections: Mapping[str, tuple[StageCorrection, ...]] = field(default_factory=dict)
    raw_overhead: StageTime = RAW_OVERHEAD
    sender_hardware: str = ""
    receiver_hardware: str = ""
    pins: PinBoard = field(default_factory=PinBoard)
    prior_bandwidth_bytes_per_s: float = 0.0
    guard_sample: float = 0.0
    prefill: PrefillTime | None = None

    def __post_init__(self) -> None:
        if self.prefill is not None and self.tier != PREFIX_STORE:
            raise FieldError("table_request.prefill", f"tier {self.tier} cannot compute again what it moves")

    def class_inputs(self) -> tuple[ClassInput, ...]:
        """Each class with raw and the profiles of its workload.

        Raises:
            FieldError: a workload has two profiles of one configuration.
        """
        return tuple(ClassInput(goal, self._candidates(goal)) for goal in self.goals)

    def _candidates(self, goal: ClassGoal) -> tuple[Candidate, ...]:
        candidates = [raw_candidate(self.raw_overhead, self.corrections.get(RAW))]
        if self.prefill is not None:
            out_reason = self.pins.reason(RECOMPUTE, goal.name)
            candidates.append(recompute_candidate(self.prefill, self.corrections.get(RECOMPUTE), out_reason))
        for profile in self.profiles:
            if profile.workload != goal.workload:
                continue
            if any(candidate.arm_id == profile.arm_id for candidate in candidates):
                raise FieldError("table_request.profiles", f"{profile.arm_id} comes twice for {goal.workload}")
            candidates.append(
                profile_candidate(
                    profile,
                    self.sender_hardware,
                    self.receiver_hardware,
                    corrections=self.corrections.get(profile.arm_id),
                    out_reason=self.pins.reason(profile.arm_id, goal.name),
                )
            )
        return tuple(candidates)


def is_foreign(profile: Profile, sender_hardware: str, receiver_hardware: str) -> bool:
    """Whether the profile's times were measured elsewhere; unknown hardware is elsewhere."""
    return (profile.sender_hardware, profile.receiver_hardware) != (sender_hardware, receiver_hardware)
