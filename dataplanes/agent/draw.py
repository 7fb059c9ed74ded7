"""The answer to "how shall this transfer go?"."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from controld.contract.decision import RAW, Arm, Drawn

RAW_ARM = Arm(RAW)


class RawReason(StrEnum):
    """Why a transfer goes raw without a look at the table; also the names of the counters."""

    NO_TABLE = "no_table"
    LEASE_EXPIRED = "lease_expired"
    BANDWIDTH_UNKNOWN = "bandwidth_unknown"
    INTERNAL_ERROR = "draw_error"


@dataclass(frozen=True, slots=True)
class Draw:
    """A drawn arm and what it was drawn with.

    Args:
        drawn: the arm.
        bandwidth_bytes_per_s: the estimate, or the first guess (`contract.estimators`); 0 where nothing was known.
        load: raw bytes per second offered / bandwidth.
        reason: why it is raw without a look at the table; None where the table decided.
        self_check: whether the sender decodes one frame of this transfer itself and reports its error.
    """

    drawn: Drawn
    bandwidth_bytes_per_s: float
    load: float
    reason: RawReason | None = None
    self_check: bool = False
