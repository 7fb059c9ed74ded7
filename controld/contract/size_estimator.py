"""How large transfers are, by service class: a quantile sketch on a logarithmic scale whose memory fades.

Pure: times are passed in, seconds on one monotonic clock. A quantile is right within `RELATIVE_ERROR` of a size that
was seen; what is older counts less, by half after each half-life.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from controld.contract.errors import FieldError

RELATIVE_ERROR = 0.02
MAX_SIZE_BYTES = 2.0**53
OTHER_CLASSES = "other"

_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA = math.log(_GAMMA)
_RESCALE_AT = 2.0**40
_FORGOTTEN = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeEstimate:
    """Sizes of one class, raw bytes.

    Args:
        mean_bytes, median_bytes, p90_bytes, p99_bytes: of the faded distribution.
        weight: transfers in it, faded.
        count: transfers ever.
        age_s: seconds since the newest.
    """

    mean_bytes: float
    median_bytes: float
    p90_bytes: float
    p99_bytes: float
    weight: float
    count: int
    age_s: float


@dataclass(slots=True)
class _Sketch:
    """Weights by bucket k, which holds sizes in (gamma^(k-1), gamma^k]; all in units of a transfer at `origin_s`.

    Weights grow with time instead of fading: adding is then one addition, and shares are the same.
    """

    origin_s: float
    weights: dict[int, float] = field(default_factory=dict)
    total: float = 0.0
    weighted_bytes: float = 0.0
    newest_s: float = -math.inf
    count: int = 0

    def add(self, now_s: float, raw_bytes: float, half_life_s: float) -> None:
        weight = self._growth(now_s, half_life_s)
        if weight > _RESCALE_AT:
            self._rescale(now_s, weight)
            weight = 1.0
        bucket = math.ceil(math.log(raw_bytes) / _LOG_GAMMA)
        self.weights[bucket] = self.weights.get(bucket, 0.0) + weight
        self.total += weight
        self.weighted_bytes += weight * raw_bytes
        self.newest_s = max(self.newest_s, now_s)
        self.count += 1

    def quantile(self, share: float) -> float:
        """The size below which that share of the weight lies."""
        wanted, below = share * self.total, 0.0
        buckets = sorted(self.weights)
        for bucket in buckets:
            below += self.weights[bucket]
            if below >= wanted:
                return _middle(bucket)
        return _middle(buckets[-1])

    def faded_weight(self, now_s: float, half_life_s: float) -> float:
        return self.total / self._growth(max(now_s, self.newest_s), half_life_s)

    def _growth(self, now_s: float, half_life_s: float) -> float:
        # A report that is late counts as old as it is; one from before the beginning as if from then.
        return math.exp2(min(max(0.0, now_s - self.origin_s) / half_life_s, 1000.0))

    def _rescale(self, now_s: float, growth: float) -> None:
        self.origin_s = now_s
        self.total /= growth
        self.weighted_bytes /= growth
        self.weights = {
            bucket: w / growth for bucket, w in self.weights.items() if w / growth > _FORGOTTEN * self.total
        }


def _middle(bucket: int) -> float:
    """The size whose relative distance to both ends of its bucket is the same."""
    return 2.0 * _GAMMA**bucket / (1.0 + _GAMMA)


class SizeEstimator:
    """Size distributions by service class. Not thread-safe.

    Args:
        half_life_s: after so long a transfer counts half.
        max_classes: classes beyond these are taken together, under `OTHER_CLASSES`.
    """

    def __init__(self, half_life_s: float = 600.0, max_classes: int = 64) -> None:
        if not math.isfinite(half_life_s) or half_life_s <= 0:
            raise FieldError("sizes.half_life_s", f"{half_life_s} is not a positive time", code="estimate.window")
        self._half_life_s = half_life_s
        self._max_classes = max_classes
        self._sketches: dict[str, _Sketch] = {}

    def observe(self, now_s: float, service_class: str, raw_bytes: float) -> None:
        """A transfer of a class; one of no bytes says nothing.

        Raises:
            FieldError: the time is not finite, or the size is not in [0, 2^53].
        """
        if not math.isfinite(now_s) or not 0 <= raw_bytes <= MAX_SIZE_BYTES:
            raise FieldError("size", f"{raw_bytes} bytes at {now_s} s", code="estimate.size")
        if raw_bytes < 1:
            return
        if service_class not in self._sketches and len(self._sketches) >= self._max_classes:
            service_class = OTHER_CLASSES
        sketch = self._sketches.setdefault(service_class, _Sketch(now_s))
        sketch.add(now_s, raw_bytes, self._half_life_s)

    def estimate(self, now_s: float, service_class: str) -> SizeEstimate | None:
        """What is known of a class at `now_s`; None before its first transfer."""
        sketch = self._sketches.get(service_class)
        if sketch is None:
            return None
        return SizeEstimate(
            mean_bytes=sketch.weighted_bytes / sketch.total,
            median_bytes=sketch.quantile(0.5),
            p90_bytes=sketch.quantile(0.9),
            p99_bytes=sketch.quantile(0.99),
            weight=sketch.faded_weight(now_s, self._half_life_s),
            count=sketch.count,
            age_s=max(0.0, now_s - sketch.newest_s),
        )

    def estimates(self, now_s: float) -> dict[str, SizeEstimate]:
        """All classes that were seen."""
        found = {name: self.estimate(now_s, name) for name in sorted(self._sketches)}
        return {name: estimate for name, estimate in found.items() if estimate is not None}
