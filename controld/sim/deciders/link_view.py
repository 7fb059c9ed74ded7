"""What a data plane's agent knows of its link, from the estimators that it runs."""

from __future__ import annotations

from controld.contract.estimators import BandwidthEstimator, LoadEstimator, first_guess_bytes_per_s

TICK_S = 1.0
"""How often an agent lets its estimates age."""


class LinkView:
    """The two numbers that a draw reads; as `dataplanes.agent.links.Link`, which nothing here may import.

    Args:
        prior_bytes_per_s: until a transfer was seen; 0: unknown.
        overhead_s: what a write costs beside its bytes, which a data plane takes off its spans, at least half of each
            left. It finds it out by itself (`dataplanes/sglang/pd/write_overhead`); here it is told.
    """

    def __init__(self, prior_bytes_per_s: float = 0.0, overhead_s: float = 0.0) -> None:
        self._bandwidth = BandwidthEstimator()
        self._load = LoadEstimator()
        self._prior = prior_bytes_per_s
        self._overhead_s = overhead_s
        self._seen = 0.0
        self._offered = 0.0
        self._offered_at_s = 0.0
        self._is_new = False

    def offered(self, now_s: float, raw_bytes: float) -> None:
        """A transfer was handed over."""
        self._load.offered(now_s, raw_bytes)
        self._offered, self._offered_at_s = self._load.estimate(now_s).mean, now_s

    def wire_span(self, start_s: float, end_s: float, wire_bytes: float) -> None:
        """Bytes were on the wire."""
        start_s += min(self._overhead_s, (end_s - start_s) / 2)
        self._bandwidth.observe(start_s, end_s, wire_bytes)
        self._is_new = True

    def bandwidth_bytes_per_s(self, now_s: float) -> float:
        """The estimate, else the first guess; 0 where nothing is known."""
        if self._is_new:
            self._is_new = False
            estimate = self._bandwidth.estimate(now_s)
            self._seen = estimate.mean if estimate is not None else self._seen
        return self._seen or first_guess_bytes_per_s(self._bandwidth.set_up_bytes_per_s, self._prior)

    def load(self, now_s: float) -> float:
        """Raw bytes offered per second over bandwidth; as old as the last arrival or tick."""
        tick_s = now_s // TICK_S * TICK_S
        if tick_s > self._offered_at_s:
            self._offered, self._offered_at_s = self._load.estimate(tick_s).mean, tick_s
        bandwidth = self.bandwidth_bytes_per_s(now_s)
        return self._offered / bandwidth if bandwidth > 0 else 0.0
