"""Trial outcomes as JSON documents, for the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from controld.contract.errors import FieldError
from controld.contract.trial import (
    ClipLoss,
    CoderMeasurement,
    EngineMeasurement,
    SegmentLoss,
    TrialOutcome,
    TrialStatus,
)
from controld.contract.video import MemorySplit


def outcome_to_document(outcome: TrialOutcome) -> dict[str, Any]:
    """A JSON-ready mapping."""
    return {**asdict(outcome), "status": outcome.status.value}


def outcome_from_document(document: Mapping[str, Any]) -> TrialOutcome:
    """What `outcome_to_document` wrote.

    Raises:
        FieldError: it is not an outcome.
    """
    try:
        values = dict(document)
        return TrialOutcome(
            **{
                **values,
                "status": TrialStatus(values["status"]),
                "losses": tuple(SegmentLoss(**loss) for loss in values["losses"]),
                "coders": tuple(CoderMeasurement(**coder) for coder in values["coders"]),
                # What was stored before there were video trials has neither.
                "clips": tuple(ClipLoss(**clip) for clip in values.get("clips", ())),
                "engine": tuple(_measurement(measured) for measured in values.get("engine", ())),
            }
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FieldError("outcome", f"not a trial outcome: {error!r}") from error


def _measurement(document: Mapping[str, Any]) -> EngineMeasurement:
    return EngineMeasurement(**{**document, "memory": MemorySplit(**document["memory"])})
