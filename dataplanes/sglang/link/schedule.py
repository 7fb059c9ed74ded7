"""The rates that a link goes through, as data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from controld.contract.errors import FieldError

_UNITS_BITS_PER_S = {"bit": 1, "kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(bit|kbit|Mbit|Gbit)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")
MIN_RATE_BITS_PER_S = 100_000
MAX_RATE_BITS_PER_S = 40 * 10**9


@dataclass(frozen=True, slots=True)
class LinkPhase:
    """A stretch of time or work in which the rate stays the same.

    Args:
        name: what reports call it.
        rate_bits_per_s: nominal rate of the shaper.
        duration_s: how long it lasts where time decides; None where work does.
    """

    name: str
    rate_bits_per_s: int
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if not MIN_RATE_BITS_PER_S <= self.rate_bits_per_s <= MAX_RATE_BITS_PER_S:
            raise FieldError(
                "rate_bits_per_s",
                f"{self.rate_bits_per_s} is outside {MIN_RATE_BITS_PER_S} to {MAX_RATE_BITS_PER_S}",
                code="link.bad_rate",
            )
        if self.duration_s is not None and not self.duration_s > 0:
            raise FieldError("duration_s", f"{self.duration_s} is not positive", code="link.bad_duration")


def parse_rate(text: str) -> int:
    """Bits per second of `20Mbit`, `1Gbit`, `64kbit`.

    Raises:
        FieldError: no number with one of these units.
    """
    match = _RATE.fullmatch(text)
    if match is None:
        raise FieldError("rate", f"{text!r} is no rate", hint="write 20Mbit or 1Gbit", code="link.bad_rate")
    return int(Decimal(match[1]) * _UNITS_BITS_PER_S[match[2]])


def parse_schedule(entries: Sequence[str]) -> list[LinkPhase]:
    """Phases from `NAME:RATE` or `NAME:RATE:DURATION`, such as `slow:20Mbit:30s`.

    Raises:
        FieldError: an entry has another form.
    """
    phases = []
    for position, entry in enumerate(entries):
        name, _, rest = entry.partition(":")
        rate, _, duration = rest.partition(":")
        match = _DURATION.fullmatch(duration) if duration else None
        if not name or not rate or (duration and match is None):
            raise FieldError(
                f"phases[{position}]", f"{entry!r} is no phase", hint="write slow:20Mbit:30s", code="link.bad_phase"
            )
        seconds = None if match is None else float(match[1]) * (0.001 if match[2] == "ms" else 1.0)
        phases.append(LinkPhase(name, parse_rate(rate), seconds))
    return phases
