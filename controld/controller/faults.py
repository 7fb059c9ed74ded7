"""An arm's refusals and fall-backs, and when they take it out of use.

A receiver's refusal is about correctness: three of the last twenty coded transfers pin the arm off until a person or a
new profile lifts it. A fall-back to raw is about usefulness: five among the last ten rest the arm for a minute, each
further time for twice as long, at most an hour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from controld.contract.errors import FieldError
from controld.controller.guard import Pin

REFUSALS = 3
REFUSAL_WINDOW = 20
FALL_BACKS = 5
FALL_BACK_WINDOW = 10
REST_S = 60.0
LONGEST_REST_S = 3600.0

_FINE, _FELL_BACK, _REFUSED = "o", "f", "r"


@dataclass(frozen=True, slots=True)
class FaultLedger:
    """Immutable record of one arm.

    Args:
        outcomes: of the newest coded transfers, one letter each, oldest first: fine, fell back, refused.
        pinned_since_unix_s: when it was taken out of use; -1 where it never was.
        pinned_until_unix_s: infinite where only a person or a new profile ends it.
        rests: how often it was rested.
        reason: of the newest pin.
    """

    outcomes: str = ""
    pinned_since_unix_s: float = -1.0
    pinned_until_unix_s: float = -1.0
    rests: int = 0
    reason: str = ""

    def succeeded(self) -> FaultLedger:
        """One transfer more that was fine; a full window of them clears the history of rests."""
        outcomes = (self.outcomes + _FINE)[-REFUSAL_WINDOW:]
        return replace(self, outcomes=outcomes, rests=0 if outcomes == _FINE * REFUSAL_WINDOW else self.rests)

    def failed(self, now_unix_s: float, reason: str, *, refused: bool) -> FaultLedger:
        """One transfer more that was refused, or fell back to raw."""
        outcomes = (self.outcomes + (_REFUSED if refused else _FELL_BACK))[-REFUSAL_WINDOW:]
        refusals = outcomes.count(_REFUSED)
        if refusals >= REFUSALS:
            why = f"{refusals} of the last {len(outcomes)} transfers refused: {reason}"
            return replace(
                self, outcomes=outcomes, pinned_since_unix_s=now_unix_s, pinned_until_unix_s=math.inf, reason=why
            )
        window = outcomes[-FALL_BACK_WINDOW:]
        failures = len(window) - window.count(_FINE)
        if failures < FALL_BACKS:
            return replace(self, outcomes=outcomes)
        rest_s = min(REST_S * 2.0**self.rests, LONGEST_REST_S)
        # After the rest it is judged anew; refusals are never forgotten this way.
        return FaultLedger(
            outcomes=_REFUSED * refusals,
            pinned_since_unix_s=now_unix_s,
            pinned_until_unix_s=now_unix_s + rest_s,
            rests=self.rests + 1,
            reason=f"{failures} of the last {len(window)} transfers fell back to raw: {reason}",
        )

    def pin(self, arm_id: str) -> Pin | None:
        """The pin that stands against the arm, perhaps over by now."""
        if self.pinned_since_unix_s < 0:
            return None
        return Pin(
            arm_id=arm_id,
            reason=self.reason,
            since_unix_s=self.pinned_since_unix_s,
            until_unix_s=self.pinned_until_unix_s,
        )

    def to_document(self) -> dict[str, Any]:
        """JSON-ready; an endless pin ends at null."""
        until = self.pinned_until_unix_s
        return {
            "outcomes": self.outcomes,
            "since": self.pinned_since_unix_s,
            "until": until if math.isfinite(until) else None,
            "rests": self.rests,
            "reason": self.reason,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> FaultLedger:
        """The inverse of `to_document`. Raises: FieldError, KeyError, TypeError."""
        outcomes = str(document["outcomes"])
        if set(outcomes) - {_FINE, _FELL_BACK, _REFUSED} or len(outcomes) > REFUSAL_WINDOW:
            raise FieldError("faults.outcomes", f"{outcomes!r} is not a history")
        until = document["until"]
        return cls(
            outcomes=outcomes,
            pinned_since_unix_s=float(document["since"]),
            pinned_until_unix_s=math.inf if until is None else float(until),
            rests=int(document["rests"]),
            reason=str(document["reason"]),
        )
