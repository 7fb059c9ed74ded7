"""What is known of one arm's stage: a discounted Gaussian posterior of log(observed / predicted)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from controld.contract.errors import FieldError
from controld.controller.knobs.base import STAGES, Stage

DISCOUNT = 0.97
"""Weight that older evidence keeps at every new observation: about the last 33 count."""

HALF_LIFE_S = 3600.0
"""Evidence that nothing refreshes fades, so an arm that was bad once is tried again."""

_CUSUM_SLACK = 0.5
_CUSUM_LIMIT = 6.0
_RESIDUAL_CAP = 3.6
"""One outlier is no change, two in a row are: no residual counts for the whole limit, two of these do."""
_DOUBTED_CAP = 3.0
"""Where something else may be the cause for a transfer or two, it takes three."""
_RESET_VARIANCE = 1.0
_NOISE_PRIOR_WEIGHT = 6.0
_EXPLAINED_SDS = 2.0


@dataclass(frozen=True, slots=True)
class StagePrior:
    """Before any evidence: the log ratio is around zero with this variance, single observations scatter with that."""

    variance: float
    noise_variance: float


LOCAL_PRIORS = {
    Stage.ENCODE: StagePrior(0.20**2, 0.25**2),
    Stage.BYTES: StagePrior(0.02**2, 0.05**2),
    Stage.WIRE: StagePrior(0.20**2, 0.25**2),
    Stage.DECODE: StagePrior(0.20**2, 0.25**2),
}
"""Times measured on this hardware, in an idle process: a machine that serves is a fifth slower or quicker."""

FOREIGN_PRIORS = {
    **LOCAL_PRIORS,
    Stage.ENCODE: StagePrior(0.5**2, 0.25**2),
    Stage.DECODE: StagePrior(0.5**2, 0.25**2),
}
"""Times measured on other hardware: right within a factor of 1.6, two times in three."""


@dataclass(frozen=True, slots=True)
class StageCorrection:
    """A stage's learned multiplier: posterior of log(observed / predicted), noise, and evidence after discounting."""

    mean_log: float
    variance: float
    noise_variance: float
    observations: float

    @property
    def factor(self) -> float:
        """The posterior-mean multiplier."""
        return math.exp(self.mean_log + self.variance / 2)


def prior_corrections(*, foreign: bool) -> tuple[StageCorrection, ...]:
    """Corrections before any evidence, one for each of `STAGES`."""
    priors = FOREIGN_PRIORS if foreign else LOCAL_PRIORS
    return tuple(StageCorrection(0.0, priors[s].variance, priors[s].noise_variance, 0.0) for s in STAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRatioPosterior:
    """Immutable: every observation gives the next one.

    Args:
        prior_variance, prior_noise_variance: before any evidence; widened by a change point.
        weight: observations, discounted.
        mean: their discounted mean.
        squares: discounted sum of squared deviations from the posterior mean at the time.
        cusum_up, cusum_down: two-sided CUSUM of standardised residuals.
        updated_unix_s: time of the newest observation.
        total: observations ever; resets: change points ever.
    """

    prior_variance: float
    prior_noise_variance: float
    weight: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    cusum_up: float = 0.0
    cusum_down: float = 0.0
    updated_unix_s: float = 0.0
    total: int = 0
    resets: int = 0

    @classmethod
    def fresh(cls, prior: StagePrior) -> LogRatioPosterior:
        """Nothing observed."""
        return cls(prior_variance=prior.variance, prior_noise_variance=prior.noise_variance)

    @property
    def noise_variance(self) -> float:
        """Variance of single observations: the prior's, pulled by the evidence."""
        return (_NOISE_PRIOR_WEIGHT * self.prior_noise_variance + self.squares) / (_NOISE_PRIOR_WEIGHT + self.weight)

    def faded_weight(self, now_unix_s: float) -> float:
        """The weight of the evidence after the time in which none came."""
        age_s = max(now_unix_s - self.updated_unix_s, 0.0)
        return self.weight * 0.5 ** (age_s / HALF_LIFE_S) if self.weight else 0.0

    def correction(self, now_unix_s: float, pooled_log: float = 0.0) -> StageCorrection:
        """The posterior at a time, around a prior mean that the other arms suggest."""
        noise = self.noise_variance
        weight = self.faded_weight(now_unix_s)
        prior_variance = self.prior_variance + self._contradiction(weight, noise, pooled_log)
        precision = 1.0 / prior_variance + weight / noise
        mean = (pooled_log / prior_variance + weight * self.mean / noise) / precision
        return StageCorrection(mean, 1.0 / precision, noise, weight)

    def _contradiction(self, weight: float, noise_variance: float, pooled_log: float) -> float:
        """By how much the prior's variance was too small, judged by evidence that it cannot explain.

        One observation so far off may be an outlier (the first transfer of an arm often is slow); from the second on it
        is the profile that is wrong, and then it must not hold up what is observed.
        """
        if weight <= 1.0:
            return 0.0
        explained = _EXPLAINED_SDS**2 * (self.prior_variance + noise_variance / weight)
        return max(0.0, (self.mean - pooled_log) ** 2 - explained) * (1.0 - 1.0 / weight)

    def observe(
        self, log_ratio: float, now_unix_s: float, pooled_log: float = 0.0, *, doubt_log: float = math.inf
    ) -> LogRatioPosterior:
        """The posterior after one finite observation; a change point drops all evidence before it.

        Args:
            doubt_log: a residual larger than this moves the mean only once it has lasted long enough to be a change.
        """
        expected = self.correction(now_unix_s, pooled_log)
        residual = log_ratio - expected.mean_log
        standardised = residual / math.sqrt(expected.variance + expected.noise_variance)
        doubted = abs(residual) > doubt_log
        cap = _DOUBTED_CAP if doubted else _RESIDUAL_CAP
        standardised = min(max(standardised, -cap), cap)
        up = max(0.0, self.cusum_up + standardised - _CUSUM_SLACK)
        down = max(0.0, self.cusum_down - standardised - _CUSUM_SLACK)
        changed = up > _CUSUM_LIMIT or down > _CUSUM_LIMIT
        if changed:
            # The level is unknown again, the scatter is not: it keeps the prior's.
            fresh = LogRatioPosterior(
                prior_variance=max(_RESET_VARIANCE, self.prior_variance),
                prior_noise_variance=self.prior_noise_variance,
            )
            return replace(
                fresh,
                weight=1.0,
                mean=log_ratio,
                updated_unix_s=now_unix_s,
                total=self.total + 1,
                resets=self.resets + 1,
            )
        if doubted:
            return replace(self, cusum_up=up, cusum_down=down, total=self.total + 1)
        kept = DISCOUNT * expected.observations
        fading = kept / self.weight if self.weight else 0.0
        weight = kept + 1.0
        # The part of a residual that the posterior's own uncertainty explains is not noise.
        excess = residual**2 * expected.noise_variance / (expected.variance + expected.noise_variance)
        return replace(
            self,
            weight=weight,
            mean=(kept * self.mean + log_ratio) / weight,
            squares=fading * self.squares + min(excess, 9.0 * expected.noise_variance),
            cusum_up=up,
            cusum_down=down,
            updated_unix_s=max(now_unix_s, self.updated_unix_s),
            total=self.total + 1,
        )

    def to_list(self) -> list[float]:
        """All fields, in order."""
        return [getattr(self, name) for name in _FIELDS]

    @classmethod
    def from_list(cls, values: list[Any]) -> LogRatioPosterior:
        """The inverse of `to_list`.

        Raises:
            FieldError: wrong length, or a number that no posterior has.
        """
        if len(values) != len(_FIELDS):
            raise FieldError("posterior", f"{len(values)} numbers, not {len(_FIELDS)}")
        named = dict(zip(_FIELDS, values, strict=True))
        for name, value in named.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise FieldError(f"posterior.{name}", f"{value!r} is not a finite number")
            if name != "mean" and value < 0:
                raise FieldError(f"posterior.{name}", f"{value} is negative")
        if named["prior_variance"] <= 0 or named["prior_noise_variance"] <= 0:
            raise FieldError("posterior.prior_variance", "is not positive")
        return cls(**named)


_FIELDS = (
    "prior_variance", "prior_noise_variance", "weight", "mean", "squares", "cusum_up", "cusum_down",
    "updated_unix_s", "total", "resets",
)  # fmt: skip
