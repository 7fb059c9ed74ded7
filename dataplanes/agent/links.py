"""The links that an agent sees: estimators behind a lock, their newest values readable without one."""

from __future__ import annotations

import math
import threading

from controld.contract.backlog import Backlog
from controld.contract.decision import DEFAULT_CLASS
from controld.contract.estimators import BandwidthEstimator, LoadEstimator
from controld.contract.telemetry import LinkEstimate

LinkKey = tuple[str, str]
"""(tier, link group)."""


class Link:
    """One link group of one tier.

    `bandwidth_bytes_per_s` (0: not known yet), `set_up_bytes_per_s` (a lower bound of it; 0: nothing seen yet) and
    `offered_bytes_per_s` are plain attributes that a draw reads without a lock; they change with each observation and
    each `refresh`.
    """

    MAX_CLASSES = 256
    FORGOTTEN_BYTES_PER_S = 1.0
    """A class that offers less is not told of any more."""

    __slots__ = (
        "_backlog",
        "_bandwidth",
        "_by_class",
        "_key",
        "_load",
        "_lock",
        "bandwidth_bytes_per_s",
        "offered_bytes_per_s",
        "set_up_bytes_per_s",
    )

    def __init__(self, key: LinkKey) -> None:
        self._key = key
        self._lock = threading.Lock()
        self._bandwidth = BandwidthEstimator()
        self._load = LoadEstimator()
        self._by_class: dict[str, LoadEstimator] = {}
        self._backlog = Backlog()
        self.bandwidth_bytes_per_s = 0.0
        self.set_up_bytes_per_s = 0.0
        self.offered_bytes_per_s = 0.0

    def observe_wire(self, start_s: float, end_s: float, wire_bytes: int) -> None:
        """Take in a wire span. Raises: FieldError."""
        with self._lock:
            self._bandwidth.observe(start_s, end_s, wire_bytes)
            self._refresh_bandwidth(end_s)

    def offered(self, now_s: float, raw_bytes: int, service_class: str = DEFAULT_CLASS) -> None:
        """A transfer arrived at the queue. Raises: FieldError."""
        with self._lock:
            self._load.offered(now_s, raw_bytes)
            if service_class in self._by_class or len(self._by_class) < self.MAX_CLASSES:
                self._by_class.setdefault(service_class, LoadEstimator()).offered(now_s, raw_bytes)
            self._backlog.offered(raw_bytes)
            self.offered_bytes_per_s = self._load.estimate(now_s).mean

    def left(self, raw_bytes: int) -> None:
        """A transfer left the queue, done or given up."""
        with self._lock:
            self._backlog.left(raw_bytes)

    def refresh(self, now_s: float) -> None:
        """Let the values that a draw reads age."""
        with self._lock:
            self._refresh_bandwidth(now_s)
            self.offered_bytes_per_s = self._load.estimate(now_s).mean

    def report(self, now_s: float) -> LinkEstimate:
        """What telemetry says of this link."""
        tier, link_group = self._key
        with self._lock:
            bandwidth = self._bandwidth.estimate(now_s)
            load = self._load.estimate(now_s)
            by_class = {name: estimator.estimate(now_s).mean for name, estimator in self._by_class.items()}
            for name in [name for name, rate in by_class.items() if rate < self.FORGOTTEN_BYTES_PER_S]:
                del self._by_class[name], by_class[name]
            return LinkEstimate(
                tier=tier,
                link_group=link_group,
                bandwidth_bytes_per_s=bandwidth.mean if bandwidth else 0.0,
                bandwidth_sd_bytes_per_s=bandwidth.sd if bandwidth else 0.0,
                bandwidth_age_s=bandwidth.age_s if bandwidth else 0.0,
                offered_bytes_per_s=load.mean,
                offered_sd_bytes_per_s=load.sd,
                backlog_bytes=self._backlog.bytes,
                transfers=bandwidth.count if bandwidth else 0,
                offered_by_class_bytes_per_s=by_class,
            )

    def _refresh_bandwidth(self, now_s: float) -> None:
        self.set_up_bytes_per_s = self._bandwidth.set_up_bytes_per_s
        estimate = self._bandwidth.estimate(now_s)
        if estimate is not None and math.isfinite(estimate.mean):
            self.bandwidth_bytes_per_s = estimate.mean


class Links:
    """All links by key; looked up without a lock."""

    MAX_LINKS = 1024

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: dict[LinkKey, Link] = {}
        self.get = self._links.get

    def of(self, key: LinkKey) -> Link:
        """The link, made at first sight. The last place is shared by all that come after it."""
        link = self._links.get(key)
        if link is None:
            with self._lock:
                if key not in self._links and len(self._links) >= self.MAX_LINKS:
                    key = ("other", "other")
                link = self._links.setdefault(key, Link(key))
        return link

    def refresh(self, now_s: float) -> None:
        """Let every link age."""
        for link in list(self._links.values()):
            link.refresh(now_s)

    def report(self, now_s: float) -> tuple[LinkEstimate, ...]:
        """All links for telemetry."""
        return tuple(link.report(now_s) for link in list(self._links.values()))
