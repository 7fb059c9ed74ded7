"""What a search is told of a lossy part, and what it proposes to measure next."""

from __future__ import annotations

import math
from dataclasses import dataclass

from controld.contract.configuration import CODER_PARAMETER, Configuration
from controld.contract.errors import FieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantCost:
    """What one coder, or another variant, costs with a lossy part.

    Args:
        variant: the coder, or see `controld.contract.variant`.
        size_ratio: wire bytes / raw bytes; of a video engine, its memory / the reference setting's.
        seconds_per_unit: (encode + decode seconds at V*) / V*; of a video engine, seconds of a frame.
    """

    variant: str
    size_ratio: float
    seconds_per_unit: float

    def __post_init__(self) -> None:
        if not self.variant:
            raise FieldError("cost.variant", "is empty")
        for name in ("size_ratio", "seconds_per_unit"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise FieldError(f"cost.{name}", f"{value} is not a finite non-negative number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A lossy part with everything that was measured of it so far.

    Args:
        loss: the mean, nats per token (of a video engine in its own unit); NaN where the part turned out to be
            infeasible.
        loss_se: standard error of the mean; 0 where it is not known.
        segments: how many texts it is the mean of.
        costs: of every coder.
    """

    lossy: Configuration
    loss: float
    loss_se: float
    segments: int
    costs: tuple[VariantCost, ...]

    def __post_init__(self) -> None:
        if CODER_PARAMETER in self.lossy:
            raise FieldError("observation.lossy", f"holds the lossless parameter {CODER_PARAMETER!r}")
        if math.isinf(self.loss):
            raise FieldError("observation.loss", "is infinite")
        if not math.isfinite(self.loss_se) or self.loss_se < 0:
            raise FieldError("observation.loss_se", f"{self.loss_se} is not a finite non-negative number")
        if self.segments < 0:
            raise FieldError("observation.segments", f"{self.segments} is negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A lossy part that is worth a trial.

    Args:
        segments: on how many texts in all; those it was measured on before count.
        source: "sobol", "model" for the greatest expected gain, or "refine" for a part of the front whose loss is
            uncertain.
    """

    lossy: Configuration
    segments: int
    source: str
