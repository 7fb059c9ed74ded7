"""Has a codec's reconstruction error grown? A sequential test that a daemon can run for months.

Each sampled transfer gives x, the relative RMS error of one frame. With m the geometric mean that is normal for the arm
and s the spread of log x around log m, two sums are kept, each with a floor of 0 (Page, "Continuous inspection
schemes", Biometrika 41, 1954):

- growth: `G = max(0, G + (log(x / m) - K) / s)`, K half of log 1.25 (so that G is the likelihood ratio of "1.25 times
  normal" against "normal") and one and a half standard errors of log m, for a profile knows m from a few segments only.
  A lasting bias of up to 12 % between the profiled texts and the served ones does not add up. The limit comes from
  Siegmund's approximation of the mean time between false alarms (Sequential Analysis, 1985, 2.56), and a single sample
  counts for at most two fifths of it.
- gross: a sample counts as gross where x is above twice normal and above 3.1 s, of which a healthy arm gives less than
  one in a hundred; `H` sums the log likelihood ratio of "one in ten" against "one in a hundred". It sees what comes and
  goes. Where normal is exact, every error is gross.

So no fewer than three samples ever condemn an arm. Simulated (normal scatter, `benchmarks/guard.py`): with twelve
segments profiled, at most one false alarm in 1,000 samples for spreads up to 0.4, far fewer for narrow ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from controld.contract.effect import MAX_RECONSTRUCTION_ERROR
from controld.contract.errors import FieldError

SMALLEST_GROWTH = 1.25
"""The growth that the test is made for; larger ones are found sooner."""

SAMPLES_TO_FALSE_ALARM = 100_000
"""On the mean, of an arm whose log errors scatter normally; at a share of 1 % ten million transfers."""

SAMPLES_TO_LEARN = 20
"""How many samples say what is normal where the profile does not."""

_STANDARD_ERRORS = 1.5
_LARGEST_STEP_SHARE = 0.4
_OVERSHOOT = 1.166

_GROSS_LOG = math.log(2.0)
_GROSS_SPREADS = 3.1
_GROSS_STEP = math.log(0.1 / 0.01)
_FINE_STEP = math.log(0.9 / 0.99)
_GROSS_LIMIT = 6.0

_LEAST_SPREAD = 0.05
_PRIOR_SPREAD = 0.2
_PRIOR_WEIGHT = 4.0

_State = TypeVar("_State")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorNorm:
    """The error that is normal for an arm.

    Args:
        mean: geometric mean of the relative errors; 0: every one was exact.
        log_sd: standard deviation of their natural logarithms.
        samples: how many, at least 1.
        learned: from the first sampled transfers, not from a profile.
    """

    mean: float
    log_sd: float
    samples: int
    learned: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.mean <= MAX_RECONSTRUCTION_ERROR:
            raise FieldError("error_norm.mean", f"{self.mean} is not in [0, {MAX_RECONSTRUCTION_ERROR:g}]")
        if not 0 <= self.log_sd < math.inf:
            raise FieldError("error_norm.log_sd", f"{self.log_sd} is not a finite non-negative number")
        if self.samples < 1:
            raise FieldError("error_norm.samples", f"{self.samples} is below 1")

    @property
    def is_exact(self) -> bool:
        """Whether any error at all is too much."""
        return self.mean == 0

    @property
    def spread(self) -> float:
        """s: few samples are pulled towards a prior."""
        evidence = self.samples - 1
        variance = (_PRIOR_WEIGHT * _PRIOR_SPREAD**2 + evidence * self.log_sd**2) / (_PRIOR_WEIGHT + evidence)
        return max(_LEAST_SPREAD, math.sqrt(variance))

    @property
    def slack_log(self) -> float:
        """K: what an error may lie above normal without counting."""
        return math.log(SMALLEST_GROWTH) / 2 + _STANDARD_ERRORS * self.spread / math.sqrt(self.samples)

    @property
    def growth_limit(self) -> float:
        """The limit of the sum of growth, in units of the spread."""
        drift = self.slack_log / self.spread
        bound = 1.0
        # (exp(2kb) - 2kb - 1) / 2k^2 = samples, solved for b: a contraction.
        for _ in range(30):
            bound = math.log(1 + 2 * drift * bound + 2 * drift**2 * SAMPLES_TO_FALSE_ALARM) / (2 * drift)
        return bound - _OVERSHOOT


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorTest:
    """The two sums; every sample gives the next state.

    Args:
        samples: how many were seen.
        growth, gross: see the module.
        run_samples, run_log: since `growth` last was 0: how many, and the sum of log(x / m).
    """

    samples: int = 0
    growth: float = 0.0
    gross: float = 0.0
    run_samples: int = 0
    run_log: float = 0.0

    def observe(self, error: float, norm: ErrorNorm) -> ErrorTest:
        """The state after one error in [0, `MAX_RECONSTRUCTION_ERROR`]."""
        if norm.is_exact:
            return replace(
                self, samples=self.samples + 1, gross=max(0.0, self.gross + (_GROSS_STEP if error else _FINE_STEP))
            )
        if error == 0:
            # A chunk that was stored raw inside its frame says nothing about the codec.
            return replace(self, samples=self.samples + 1)
        log_ratio, spread = math.log(error / norm.mean), norm.spread
        is_gross = log_ratio > max(_GROSS_LOG, _GROSS_SPREADS * spread)
        largest = _LARGEST_STEP_SHARE * norm.growth_limit
        growth = max(0.0, self.growth + max(min((log_ratio - norm.slack_log) / spread, largest), -largest))
        return ErrorTest(
            samples=self.samples + 1,
            growth=growth,
            gross=max(0.0, self.gross + (_GROSS_STEP if is_gross else _FINE_STEP)),
            run_samples=self.run_samples + 1 if growth else 0,
            run_log=self.run_log + log_ratio if growth else 0.0,
        )

    def suspicion(self, norm: ErrorNorm) -> float:
        """How far the worse of the two sums is on its way to its limit; above 1: broken."""
        gross = self.gross / _GROSS_LIMIT
        return gross if norm.is_exact else max(gross, self.growth / norm.growth_limit)

    def ratio(self) -> float:
        """Geometric mean of error / normal since the sum of growth last was 0; 1 where it is."""
        return math.exp(self.run_log / self.run_samples) if self.run_samples else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NormLearner:
    """Finds out what is normal where no profile says so (Welford's sums over log errors).

    Args:
        exact: samples without any error.
        count, mean_log, squares: of the others.
    """

    exact: int = 0
    count: int = 0
    mean_log: float = 0.0
    squares: float = 0.0

    def observe(self, error: float) -> NormLearner:
        """One error more."""
        if error == 0:
            return replace(self, exact=self.exact + 1)
        count = self.count + 1
        away = math.log(error) - self.mean_log
        mean = self.mean_log + away / count
        return replace(self, count=count, mean_log=mean, squares=self.squares + away * (math.log(error) - mean))

    @property
    def samples(self) -> int:
        """How many there were."""
        return self.exact + self.count

    def norm(self) -> ErrorNorm | None:
        """What is normal; None while there are too few samples."""
        if self.samples < SAMPLES_TO_LEARN:
            return None
        if not self.count:
            return ErrorNorm(mean=0.0, log_sd=0.0, samples=self.exact, learned=True)
        log_sd = math.sqrt(max(self.squares, 0.0) / (self.count - 1)) if self.count > 1 else 0.0
        mean = min(math.exp(self.mean_log), MAX_RECONSTRUCTION_ERROR)
        return ErrorNorm(mean=mean, log_sd=log_sd, samples=self.count, learned=True)


def to_document(state: ErrorTest | NormLearner) -> dict[str, Any]:
    """JSON-ready."""
    return asdict(state)


def from_document(kind: type[_State], document: Mapping[str, Any]) -> _State:
    """What `to_document` wrote.

    Raises:
        FieldError: a number is missing, unknown, not finite, or negative where none can be.
    """
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(document, Mapping) or set(document) != set(names):
        raise FieldError("error_test", f"needs exactly {', '.join(names)}")
    for name, value in document.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise FieldError(f"error_test.{name}", f"{value!r} is not a finite number")
        if value < 0 and not name.endswith("log"):
            raise FieldError(f"error_test.{name}", f"{value} is negative")
    return kind(**document)
