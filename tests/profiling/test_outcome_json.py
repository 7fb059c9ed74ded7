"""Outcomes survive the store, and those that were stored before a field existed are still read."""

from __future__ import annotations

import json

import pytest

from controld.contract.errors import FieldError
from controld.contract.trial import ClipLoss, EngineMeasurement, SegmentLoss, TrialOutcome, TrialStatus
from controld.contract.video import MemorySplit
from controld.profiling.outcome_json import outcome_from_document, outcome_to_document

OUTCOME = TrialOutcome(
    study_id="s",
    trial_id="t",
    status=TrialStatus.MEASURED,
    losses=(
        SegmentLoss(prompt_tokens=256, segment=0, loss_nats=0.01, top1_agreement=0.9, answer_nats=-0.002),
        SegmentLoss(prompt_tokens=256, segment=1, loss_nats=0.02, top1_agreement=0.8),
    ),
)


OF_CLIPS = TrialOutcome(
    study_id="s",
    trial_id="t",
    status=TrialStatus.MEASURED,
    clips=(ClipLoss(chunks=3, segment=0, loss=-0.01),),
    engine=(
        EngineMeasurement(
            variant="v",
            forward_s=0.1,
            vae_s=0.2,
            frames_per_chunk=12,
            memory=MemorySplit(weights_bytes=1, kv_bytes=2, activation_bytes=3),
            session_bytes=4,
            reference_bytes=5,
        ),
    ),
)


@pytest.mark.parametrize("outcome", [OUTCOME, OF_CLIPS])
def test_an_outcome_survives_the_store(outcome: TrialOutcome) -> None:
    assert outcome_from_document(json.loads(json.dumps(outcome_to_document(outcome)))) == outcome


def test_an_outcome_from_before_there_were_clips_is_read_without_them() -> None:
    document = outcome_to_document(OUTCOME)
    del document["clips"], document["engine"]
    assert outcome_from_document(document) == OUTCOME


def test_an_outcome_from_before_answers_were_measured_is_read_without_them() -> None:
    document = outcome_to_document(OUTCOME)
    for loss in document["losses"]:
        del loss["answer_nats"]
    read = outcome_from_document(document)
    assert [loss.answer_nats for loss in read.losses] == [None, None]
    assert [loss.loss_nats for loss in read.losses] == [0.01, 0.02]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_answer_loss_that_is_no_number_is_refused_by_name(value: float) -> None:
    document = outcome_to_document(OUTCOME)
    document["losses"][0]["answer_nats"] = value
    with pytest.raises(FieldError, match="answer_nats"):
        outcome_from_document(document)
