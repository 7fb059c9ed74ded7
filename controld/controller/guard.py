"""The seam of the quality guard: what is pinned off, and why.

Whoever gathers evidence (the sender's own reconstruction error, probes, repeated refusals by receivers) puts a pin on
the board; deciding reads it. A pinned arm is out for every use, exploration included: the guard fails closed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from controld.contract.decision import RAW
from controld.contract.errors import FieldError

EVERY_CLASS = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """An arm that must not be used.

    Args:
        service_class: for which class; `*` for all.
        until_unix_s: when it ends by itself; infinite where only a person or a new profile ends it.
    """

    arm_id: str
    reason: str
    since_unix_s: float
    service_class: str = EVERY_CLASS
    until_unix_s: float = math.inf

    def __post_init__(self) -> None:
        if self.arm_id == RAW:
            raise FieldError("pin.arm_id", "raw cannot be pinned off")
        if not self.reason:
            raise FieldError("pin.reason", "is empty")


@dataclass(frozen=True, slots=True)
class PinBoard:
    """All pins; immutable."""

    pins: tuple[Pin, ...] = ()

    def with_pin(self, pin: Pin) -> PinBoard:
        """The board with one pin more; an older pin of the same arm and class is replaced."""
        kept = (p for p in self.pins if (p.arm_id, p.service_class) != (pin.arm_id, pin.service_class))
        return PinBoard((*kept, pin))

    def without(self, arm_ids: Iterable[str]) -> PinBoard:
        """The board without any pin of these arms."""
        gone = set(arm_ids)
        return PinBoard(tuple(pin for pin in self.pins if pin.arm_id not in gone))

    def at(self, now_unix_s: float) -> PinBoard:
        """The board without the pins that are over."""
        return PinBoard(tuple(pin for pin in self.pins if pin.until_unix_s > now_unix_s))

    def merged(self, other: PinBoard) -> PinBoard:
        """Both boards' pins; the other's replace this one's."""
        board = self
        for pin in other.pins:
            board = board.with_pin(pin)
        return board

    def reason(self, arm_id: str, service_class: str) -> str:
        """Why the arm is out for this class; empty where it is not."""
        for pin in self.pins:
            if pin.arm_id == arm_id and pin.service_class in (EVERY_CLASS, service_class):
                return pin.reason
        return ""

    def to_json(self) -> str:
        """JSON; an endless pin has no end."""
        documents = [
            {k: v for k, v in asdict(pin).items() if k != "until_unix_s" or math.isfinite(v)} for pin in self.pins
        ]
        return json.dumps(documents, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> PinBoard:
        """Parse what `to_json` wrote. Raises: FieldError."""
        try:
            return cls(tuple(Pin(**document) for document in json.loads(text)))
        except (ValueError, TypeError) as error:
            raise FieldError("pins", f"not a board of pins: {error}") from error
