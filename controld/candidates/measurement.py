"""What the trials of one lossy part measured, with where and on what: the input of distillation."""

from __future__ import annotations

from dataclasses import dataclass

from controld.contract.configuration import CODER_PARAMETER, Configuration
from controld.contract.errors import FieldError
from controld.contract.trial import CoderMeasurement, SegmentLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialMeasurement:
    """Everything that one quality measurement of a lossy part gave.

    Args:
        lossy_part: the configuration without its coder.
        losses: one for each (prompt length, segment).
        coders: one for each (coder, prompt length, segment); seconds of the whole prompt, framed as transfers are.
        sender_hardware, receiver_hardware: where encode and decode ran.
        corpus: the texts, by name and hash.

    Raises:
        FieldError: the lossy part names a coder.
    """

    lossy_part: Configuration
    workload: str
    model_fingerprint: str
    losses: tuple[SegmentLoss, ...]
    coders: tuple[CoderMeasurement, ...]
    sender_hardware: str
    receiver_hardware: str
    measured_unix_s: float
    corpus: str
    study_id: str = ""
    trial_id: str = ""

    def __post_init__(self) -> None:
        if CODER_PARAMETER in self.lossy_part:
            raise FieldError("trial.lossy_part", f"holds the lossless parameter {CODER_PARAMETER!r}")
