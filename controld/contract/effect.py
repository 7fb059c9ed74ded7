"""An effect: what really happened in a transfer. Learning, audit and evidence all read this one record."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from controld.contract.errors import FieldError

MAX_RECONSTRUCTION_ERROR = 1000.0
"""Relative errors are stated up to here: what is further off has nothing of the signal left anyway."""

SELF_CHECK_REASON = "self_check"
"""How the reason of a fall-back begins where a sender could not decode its own frame."""


class Half(StrEnum):
    """Who reports. The sender's half is complete; the receiver's is for audit."""

    SENDER = "sender"
    RECEIVER = "receiver"


class Path(StrEnum):
    """How the bytes went; recomputed: they did not, and `encode_s` is the prefill that stood in for them."""

    CODED = "coded"
    RAW = "raw"
    RAW_FALLBACK = "raw_fallback"
    FAILED = "failed"
    RECOMPUTED = "recomputed"


class Verdict(StrEnum):
    """What the receiver said of them."""

    VERIFIED = "verified"
    UNVERIFIED = "unverified"
    NACK = "nack"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One half of one transfer. Bytes, seconds and bytes per second; all non-negative and finite.

    Args:
        transfer_id: also the decision's id.
        encode_s, decode_s: summed over chunks; decode is verify, decode and scatter.
        wire_s: union of the wire spans, each ending at the receiver's acknowledgement.
        wait_s: in which what was handed over waited for its turn, before the first byte of work and between parts.
        total_s: from the first byte of work to the last acknowledgement.
        expected_bytes, bandwidth_bytes_per_s, load: what the arm was drawn for.
        explored: drawn with less than the largest weight of its cell.
        reason: why a fall-back happened; empty otherwise.
        reconstruction_error: of one frame that the sender decoded itself: the root of the sum of squared differences
            over the sum of squares, the worse of keys and values, at most `MAX_RECONSTRUCTION_ERROR`; 0 is exact. None:
            it did not look.
    """

    transfer_id: str
    half: Half
    arm_id: str
    table_version: int
    service_class: str
    tier: str
    link_group: str
    tokens: int
    chunks: int
    raw_bytes: int
    wire_bytes: int
    encode_s: float
    wire_s: float
    decode_s: float
    wait_s: float
    total_s: float
    path: Path
    verdict: Verdict
    reason: str = ""
    expected_bytes: float = 0.0
    bandwidth_bytes_per_s: float = 0.0
    load: float = 0.0
    explored: bool = False
    finished_unix_s: float = 0.0
    reconstruction_error: float | None = None

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise FieldError(f"effect.{name}", f"{value} is not a finite non-negative number", code="effect.number")
        error = self.reconstruction_error
        if error is not None and not 0 <= error <= MAX_RECONSTRUCTION_ERROR:
            raise FieldError(
                "effect.reconstruction_error",
                f"{error} is not in [0, {MAX_RECONSTRUCTION_ERROR:g}]",
                code="effect.number",
            )
        for name in ("transfer_id", "arm_id", "service_class", "tier", "link_group"):
            if not getattr(self, name):
                raise FieldError(f"effect.{name}", "is empty", code="effect.empty")


_NUMBERS = (
    "table_version",
    "tokens",
    "chunks",
    "raw_bytes",
    "wire_bytes",
    "encode_s",
    "wire_s",
    "decode_s",
    "wait_s",
    "total_s",
    "expected_bytes",
    "bandwidth_bytes_per_s",
    "load",
    "finished_unix_s",
)
