"""Between protobuf messages and the contract's values of trials; the rules are those of `convert`."""

from __future__ import annotations

from controld.contract.configuration import Configuration
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.checks import MAX_TEXT_CHARACTERS, checked_count, checked_enum, checked_text
from controld.contract.trial import (
    ClipLoss,
    CoderMeasurement,
    EngineMeasurement,
    SegmentLoss,
    TrialOutcome,
    TrialStatus,
    TrialTask,
)
from controld.contract.video import MemorySplit

_SIZES = ("weights_bytes", "kv_bytes", "activation_bytes", "session_bytes", "reference_bytes")


def trial_task_to_proto(task: TrialTask) -> pb.TrialRequest:
    """What a profiling worker is asked."""
    return pb.TrialRequest(
        study_id=task.study_id,
        trial_id=task.trial_id,
        workload=task.workload,
        lossy_json=task.lossy.canonical_json,
        coders=task.coders,
        prompt_tokens=task.prompt_tokens,
        segments_per_length=task.segments_per_length,
        first_segment=task.first_segment,
        continuation_tokens=task.continuation_tokens,
        deadline_s=task.deadline_s,
        clip_chunks=task.clip_chunks,
    )


def trial_task_from_proto(message: pb.TrialRequest) -> TrialTask:
    """Raises: FieldError."""
    return TrialTask(
        study_id=message.study_id,
        trial_id=message.trial_id,
        workload=message.workload,
        lossy=Configuration.from_json(message.lossy_json),
        coders=tuple(message.coders),
        prompt_tokens=tuple(message.prompt_tokens),
        segments_per_length=message.segments_per_length,
        first_segment=message.first_segment,
        continuation_tokens=message.continuation_tokens,
        deadline_s=message.deadline_s,
        clip_chunks=tuple(message.clip_chunks),
    )


def trial_outcome_to_proto(outcome: TrialOutcome) -> pb.TrialResult:
    """What came of a trial, or how far it is."""
    return pb.TrialResult(
        study_id=outcome.study_id,
        trial_id=outcome.trial_id,
        status=outcome.status.value,
        detail=outcome.detail,
        losses=[
            pb.SegmentLoss(
                prompt_tokens=loss.prompt_tokens,
                segment=loss.segment,
                loss_nats=loss.loss_nats,
                top1_agreement=loss.top1_agreement,
                answer_nats=loss.answer_nats,
                reconstruction_error=loss.reconstruction_error,
            )
            for loss in outcome.losses
        ],
        coders=[
            pb.CoderMeasurement(
                code=coder.code,
                prompt_tokens=coder.prompt_tokens,
                segment=coder.segment,
                raw_bytes=coder.raw_bytes,
                wire_bytes=coder.wire_bytes,
                encode_s=coder.encode_s,
                decode_s=coder.decode_s,
            )
            for coder in outcome.coders
        ],
        seconds=outcome.seconds,
        corpus=outcome.corpus,
        clips=[clip_loss_to_proto(clip) for clip in outcome.clips],
        engine=[engine_measurement_to_proto(measured) for measured in outcome.engine],
    )


def trial_outcome_from_proto(message: pb.TrialResult) -> TrialOutcome:
    """Raises: FieldError: a loss or time is not finite, a size absurd, or the status unknown."""
    for index, coder in enumerate(message.coders):
        checked_count(coder.raw_bytes, f"trial.coders[{index}].raw_bytes")
        checked_count(coder.wire_bytes, f"trial.coders[{index}].wire_bytes")
    return TrialOutcome(
        study_id=checked_text(message.study_id, "trial.study_id"),
        trial_id=checked_text(message.trial_id, "trial.trial_id"),
        status=checked_enum(TrialStatus, message.status, "trial.status"),
        detail=checked_text(message.detail, "trial.detail", MAX_TEXT_CHARACTERS),
        losses=tuple(
            SegmentLoss(
                prompt_tokens=loss.prompt_tokens,
                segment=loss.segment,
                loss_nats=loss.loss_nats,
                top1_agreement=loss.top1_agreement,
                answer_nats=loss.answer_nats if loss.HasField("answer_nats") else None,
                reconstruction_error=loss.reconstruction_error if loss.HasField("reconstruction_error") else None,
            )
            for loss in message.losses
        ),
        coders=tuple(
            CoderMeasurement(
                code=coder.code,
                prompt_tokens=coder.prompt_tokens,
                segment=coder.segment,
                raw_bytes=coder.raw_bytes,
                wire_bytes=coder.wire_bytes,
                encode_s=coder.encode_s,
                decode_s=coder.decode_s,
            )
            for coder in message.coders
        ),
        seconds=message.seconds,
        corpus=checked_text(message.corpus, "trial.corpus", MAX_TEXT_CHARACTERS),
        clips=tuple(clip_loss_from_proto(clip) for clip in message.clips),
        engine=tuple(
            engine_measurement_from_proto(measured, f"trial.engine[{index}]")
            for index, measured in enumerate(message.engine)
        ),
    )


def clip_loss_to_proto(clip: ClipLoss) -> pb.ClipLoss:
    """One clip's loss."""
    return pb.ClipLoss(chunks=clip.chunks, segment=clip.segment, loss=clip.loss)


def clip_loss_from_proto(message: pb.ClipLoss) -> ClipLoss:
    """Raises: FieldError."""
    return ClipLoss(chunks=message.chunks, segment=message.segment, loss=message.loss)


def engine_measurement_to_proto(measured: EngineMeasurement) -> pb.EngineMeasurement:
    """What an engine takes under one variant."""
    return pb.EngineMeasurement(
        variant=measured.variant,
        forward_s=measured.forward_s,
        vae_s=measured.vae_s,
        frames_per_chunk=measured.frames_per_chunk,
        weights_bytes=measured.memory.weights_bytes,
        kv_bytes=measured.memory.kv_bytes,
        activation_bytes=measured.memory.activation_bytes,
        session_bytes=measured.session_bytes,
        reference_bytes=measured.reference_bytes,
        drift=measured.drift,
        motion=measured.motion,
    )


def engine_measurement_from_proto(message: pb.EngineMeasurement, field: str) -> EngineMeasurement:
    """Raises: FieldError."""
    for name in _SIZES:
        checked_count(getattr(message, name), f"{field}.{name}")
    return EngineMeasurement(
        variant=checked_text(message.variant, f"{field}.variant", MAX_TEXT_CHARACTERS),
        forward_s=message.forward_s,
        vae_s=message.vae_s,
        frames_per_chunk=message.frames_per_chunk,
        memory=MemorySplit(
            weights_bytes=message.weights_bytes,
            kv_bytes=message.kv_bytes,
            activation_bytes=message.activation_bytes,
        ),
        session_bytes=message.session_bytes,
        reference_bytes=message.reference_bytes,
        drift=message.drift if message.HasField("drift") else None,
        motion=message.motion if message.HasField("motion") else None,
    )
