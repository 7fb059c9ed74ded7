"""Has an arm's quality loss grown above its class's limit? A sequential test on what probes measure again.

Each probed segment gives x, its loss in nats per token. With L the class's limit and s the spread that the profile
found between segments, one sum is kept with a floor of 0 (Page, "Continuous inspection schemes", Biometrika 41, 1954):
`S = max(0, S + (x - L) / s - 1/2)`, the likelihood ratio of "one spread above the limit" against "at the limit". It
breaks at 6. An arm whose true loss lies at the very limit breaks once in about 2,600 segments (Siegmund, Sequential
Analysis, 1985, 2.56), one that lies a spread below it once in 5e8. A single segment counts for at most two fifths of
the way, so that no fewer than three condemn an arm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LIMIT = 6.0

_REFERENCE = 0.5
_LARGEST_STEP = 0.4 * LIMIT
_LEAST_SPREAD_NATS = 1e-4
"""Below it is what rounding alone does to a loss."""

_LEAST_SPREAD_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTest:
    """The sum; every segment gives the next state.

    Args:
        samples: segments seen.
        excess: S, see the module.
        run_samples, run_nats: since S last was 0: how many, and the sum of their losses.
    """

    samples: int = 0
    excess: float = 0.0
    run_samples: int = 0
    run_nats: float = 0.0

    def observe(self, loss_nats: float, limit_nats: float, spread_nats: float) -> LossTest:
        """The state after one finite loss.

        Args:
            spread_nats: standard deviation of the loss over segments, as profiled; 0 where unknown.
        """
        spread = max(spread_nats, _LEAST_SPREAD_SHARE * limit_nats, _LEAST_SPREAD_NATS)
        step = min((loss_nats - limit_nats) / spread - _REFERENCE, _LARGEST_STEP)
        excess = max(0.0, self.excess + step)
        return LossTest(
            samples=self.samples + 1,
            excess=excess,
            run_samples=self.run_samples + 1 if excess else 0,
            run_nats=self.run_nats + loss_nats if excess else 0.0,
        )

    @property
    def suspicion(self) -> float:
        """How far the sum is on its way to its limit; above 1: broken."""
        return self.excess / LIMIT

    @property
    def mean_nats(self) -> float:
        """Mean loss since the sum last was 0; 0 where it is."""
        return self.run_nats / self.run_samples if self.run_samples else 0.0


def spread_of(loss_se_nats: float, loss_samples: int) -> float:
    """Standard deviation over segments, of a mean's standard error."""
    return loss_se_nats * math.sqrt(max(loss_samples, 0))
