"""A trial as both sides know it: what to measure, and what was measured. One lossy part with all its variants.

A KV plane's trial is measured on prompts, and its variants are coders. A video plane's is measured on clips, and its
variants are the choices of its lossless parameters (`controld.contract.variant`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from controld.contract.configuration import Configuration
from controld.contract.effect import MAX_RECONSTRUCTION_ERROR
from controld.contract.errors import FieldError
from controld.contract.video import MemorySplit

MAX_CLIP_LOSS = 1e6
LEAST_ENGINE_SECONDS = 1e-9
MAX_ENGINE_SECONDS = 86_400.0
MAX_ENGINE_BYTES = 2**53
MAX_FRAMES = 2**31 - 1
"""A stored profile of a video engine has these bounds, too (`controld.candidates.video_profile`)."""


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
        coders: every coder, or other variant, whose costs are measured with it.
        prompt_tokens: the prompt lengths; empty for a video plane.
        segments_per_length: how many segments of the corpus for each length, from `first_segment` on.
        continuation_tokens: over how many tokens the loss is meant; of prompts only.
        clip_chunks: the clips' lengths in chunks; empty for a KV plane.
        deadline_s: seconds after which the result is of no use; 0: none.
    """

    study_id: str
    trial_id: str
    workload: str
    lossy: Configuration
    coders: tuple[str, ...]
    prompt_tokens: tuple[int, ...] = ()
    segments_per_length: int
    first_segment: int = 0
    continuation_tokens: int = 128
    deadline_s: float = 0.0
    clip_chunks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("study_id", "trial_id", "workload", "coders"):
            if not getattr(self, name):
                raise FieldError(f"trial.{name}", "is empty", code="trial.empty")
        if not self.lengths:
            raise FieldError("trial.prompt_tokens", "is empty, and so is clip_chunks", code="trial.empty")
        if self.prompt_tokens and self.clip_chunks:
            raise FieldError("trial.clip_chunks", "stands beside prompt_tokens", code="trial.number")
        if "code" in self.lossy:
            raise FieldError("trial.lossy", "holds a coder", code="trial.lossy")
        if min(self.lengths) < 1 or self.segments_per_length < 1 or self.continuation_tokens < 1:
            raise FieldError(
                "trial.prompt_tokens", "lengths, segments and continuation are at least 1", code="trial.number"
            )
        if self.first_segment < 0 or not math.isfinite(self.deadline_s) or self.deadline_s < 0:
            raise FieldError(
                "trial.deadline_s", "first segment and deadline are finite and not negative", code="trial.number"
            )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the prompts, or of the clips."""
        return self.prompt_tokens or self.clip_chunks


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
class ClipLoss:
    """Quality loss of one clip.

    Args:
        chunks: the length that was asked for.
        segment: which clip of the corpus: its prompt and its noise.
        loss: error beyond that of the plane's reference setting on the same clip, in the plane's own unit (the
            reference engine's: the distance of frames to the nearest valid one, in [0, 1]); negative where it is less.
    """

    chunks: int
    segment: int
    loss: float

    def __post_init__(self) -> None:
        _require_between(self, "loss", -MAX_CLIP_LOSS, MAX_CLIP_LOSS)
        _require_between(self, "chunks", 1, MAX_FRAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMeasurement:
    """What a video engine takes under one setting.

    Args:
        variant: the lossless part.
        forward_s: seconds of one forward pass over a chunk, the least disturbed one's.
        vae_s: seconds of decoding a chunk; 0: nothing was decoded while chunks were made.
        frames_per_chunk: pixel frames.
        memory: with one session.
        session_bytes: what each further session holds beside its KV.
        reference_bytes: what the reference setting holds in all, with one session.
        drift: mean over the chunks, see `ChunkReport`; None: not measured.
        motion: mean flicker of the chunks, see `ChunkReport`; None: not measured.
    """

    variant: str
    forward_s: float
    vae_s: float
    frames_per_chunk: int
    memory: MemorySplit
    session_bytes: int
    reference_bytes: int
    drift: float | None = None
    motion: float | None = None

    def __post_init__(self) -> None:
        if not self.variant:
            raise FieldError("engine_measurement.variant", "is empty", code="trial.empty")
        _require_between(self, "forward_s", LEAST_ENGINE_SECONDS, MAX_ENGINE_SECONDS)
        _require_between(self, "vae_s", 0.0, MAX_ENGINE_SECONDS)
        _require_between(self, "frames_per_chunk", 1, MAX_FRAMES)
        _require_between(self, "session_bytes", 0, MAX_ENGINE_BYTES)
        _require_between(self, "reference_bytes", 1, MAX_ENGINE_BYTES)
        _require_between(self, "drift", 0.0, MAX_CLIP_LOSS)
        _require_between(self, "motion", 0.0, MAX_CLIP_LOSS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """What came of a trial, or how far it is (`PROGRESS`).

    Args:
        detail: why it failed or is infeasible, or what it is doing.
        seconds: wall-clock time spent.
        corpus: the texts or clips, by name and hash.
        clips, engine: a video plane's, in place of losses and coders.
    """

    study_id: str
    trial_id: str
    status: TrialStatus
    detail: str = ""
    losses: tuple[SegmentLoss, ...] = ()
    coders: tuple[CoderMeasurement, ...] = ()
    seconds: float = 0.0
    corpus: str = ""
    clips: tuple[ClipLoss, ...] = ()
    engine: tuple[EngineMeasurement, ...] = ()

    def __post_init__(self) -> None:
        if not math.isfinite(self.seconds) or self.seconds < 0:
            raise FieldError(
                "trial.seconds", f"{self.seconds} is not a finite non-negative number", code="trial.number"
            )
        if self.status is TrialStatus.MEASURED and not self.segments:
            raise FieldError("trial.losses", "is empty although the trial was measured", code="trial.empty")

    @property
    def segments(self) -> int:
        """How many segments have a loss."""
        return len(self.losses) + len(self.clips)


def _require_between(value: ClipLoss | EngineMeasurement, name: str, low: float, high: float) -> None:
    """Raises: FieldError: a number that is there is out of range; NaN is in none."""
    number = getattr(value, name)
    if number is not None and not low <= number <= high:
        where = "clip_loss" if isinstance(value, ClipLoss) else "engine_measurement"
        raise FieldError(f"{where}.{name}", f"{number} is not in [{low:g}, {high:g}]", code="trial.number")
