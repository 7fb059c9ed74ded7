"""A trial as both sides know it: what to measure, and what was measured. One lossy part with all its coders."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from controld.contract.configuration import Configuration
from controld.contract.effect import MAX_RECONSTRUCTION_ERROR
from controld.contract.errors import FieldError


class TrialStatus(StrEnum):
    """How a trial stands. `INFEASIBLE` is a result (this model cannot do that); `FAILED` is not."""

    PROGRESS = "progress"
    MEASURED = "measured"
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTask:
    """What a profiling worker is asked to measure.

    Args:
        lossy: the lossy part of a configuration (without its coder).
        coders: every coder whose bytes and seconds are measured with it.
        prompt_tokens: the prompt lengths.
        segments_per_length: how many segments of the corpus for each length, from `first_segment` on.
        continuation_tokens: over how many tokens the loss is meant.
        deadline_s: seconds after which the result is of no use; 0: none.
    """

    study_id: str
    trial_id: str
    workload: str
    lossy: Configuration
    coders: tuple[str, ...]
    prompt_tokens: tuple[int, ...]
    segments_per_length: int
    first_segment: int = 0
    continuation_tokens: int = 128
    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("study_id", "trial_id", "workload", "coders", "prompt_tokens"):
            if not getattr(self, name):
                raise FieldError(f"trial.{name}", "is empty", code="trial.empty")
        if "code" in self.lossy:
            raise FieldError("trial.lossy", "holds a coder", code="trial.lossy")
        if min(self.prompt_tokens) < 1 or self.segments_per_length < 1 or self.continuation_tokens < 1:
            raise FieldError(
                "trial.prompt_tokens", "lengths, segments and continuation are at least 1", code="trial.number"
            )
        if self.first_segment < 0 or not math.isfinite(self.deadline_s) or self.deadline_s < 0:
            raise FieldError(
                "trial.deadline_s", "first segment and deadline are finite and not negative", code="trial.number"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLoss:
    """Quality loss of one segment.

    Args:
        prompt_tokens: the length that was asked for.
        loss_nats: mean KL(raw || coded) in nats per token; may be slightly below zero by rounding.
        top1_agreement: share of positions where both name the same most likely token.
        answer_nats: by how much the mean log-likelihood of the true tokens falls when the prompt's KV is coded, in nats
            per token; may be negative by chance. None: not measured.
        reconstruction_error: of one frame of the segment, defined as an effect's; None: not measured.
    """

    prompt_tokens: int
    segment: int
    loss_nats: float
    top1_agreement: float
    answer_nats: float | None = None
    reconstruction_error: float | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.loss_nats):
            raise FieldError("segment_loss.loss_nats", f"{self.loss_nats} is not finite", code="trial.number")
        if not 0 <= self.top1_agreement <= 1:
            raise FieldError(
                "segment_loss.top1_agreement", f"{self.top1_agreement} is not in [0, 1]", code="trial.number"
            )
        if self.answer_nats is not None and not math.isfinite(self.answer_nats):
            raise FieldError("segment_loss.answer_nats", f"{self.answer_nats} is not finite", code="trial.number")
        error = self.reconstruction_error
        if error is not None and not 0 <= error <= MAX_RECONSTRUCTION_ERROR:
            raise FieldError(
                "segment_loss.reconstruction_error",
                f"{error} is not in [0, {MAX_RECONSTRUCTION_ERROR:g}]",
                code="trial.number",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoderMeasurement:
    """Bytes and seconds of one coder on one segment."""

    code: str
    prompt_tokens: int
    segment: int
    raw_bytes: int
    wire_bytes: int
    encode_s: float
    decode_s: float

    def __post_init__(self) -> None:
        if not self.code:
            raise FieldError("coder_measurement.code", "is empty", code="trial.empty")
        for name in ("raw_bytes", "wire_bytes", "encode_s", "decode_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise FieldError(
                    f"coder_measurement.{name}", f"{value} is not a finite non-negative number", code="trial.number"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """What came of a trial, or how far it is (`PROGRESS`).

    Args:
        detail: why it failed or is infeasible, or what it is doing.
        seconds: wall-clock time spent.
        corpus: the texts, by name and hash.
    """

    study_id: str
    trial_id: str
    status: TrialStatus
    detail: str = ""
    losses: tuple[SegmentLoss, ...] = ()
    coders: tuple[CoderMeasurement, ...] = ()
    seconds: float = 0.0
    corpus: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.seconds) or self.seconds < 0:
            raise FieldError(
                "trial.seconds", f"{self.seconds} is not a finite non-negative number", code="trial.number"
            )
        if self.status is TrialStatus.MEASURED and not self.losses:
            raise FieldError("trial.losses", "is empty although the trial was measured", code="trial.empty")
