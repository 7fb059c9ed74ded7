"""KVServe's online rule as its authors published it (arXiv 2605.13734, `DynamicOnlineController` of the artefact).

A profile is a candidate while its quality is within the limit, it is not cooling down, and the bandwidth is below
B* = (1 - 1 / r) S (their Theorem 1). Its time is predicted as V / S + V / (B r) plus a residual, an exponentially
weighted mean of observed minus predicted seconds, kept for each profile whatever the transfer's size. The least one
is taken (or, with probability epsilon, any); where there is none, the transfer goes raw. There is no load, no raw arm
that is learned from, and no reset when something changes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controld.candidates.profile import Profile
from controld.contract.decision import RAW
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.sim.deciders.base import Menu, Situation
from controld.sim.deciders.link_view import LinkView
from controld.sim.record import Arrival, Choice, TransferRecord

_COOLDOWN_PLAYS = 10
_COOLDOWN_VIOLATIONS = 3
_COOLDOWN_DECISIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KVServeRule:
    """The rule's constants.

    Args:
        eta: weight of the newest residual.
        epsilon: share of transfers that take any candidate; 0 as in their runs, 0.05 to 0.15 as they advise.
        slo_s: candidates predicted to take longer are dropped; None: none are.
        harmonic_speed: S is the harmonic *mean* of encode and decode speed, as published, which halves the codec's
            time; False: encode and decode seconds are added, as they should be.
        observes_wait: whether what it learns from includes the wait in the queue.
    """

    eta: float = 0.3
    epsilon: float = 0.0
    slo_s: float | None = None
    harmonic_speed: bool = True
    observes_wait: bool = False


@dataclass(slots=True)
class _Player:
    """One profile's record."""

    residual_s: float = 0.0
    plays: int = 0
    violations: int = 0
    barred_until: int = 0
    predicted_s: dict[int, float] = field(default_factory=dict)


class KVServeController:
    """The rule with a bandwidth to apply it to.

    Args:
        bandwidth_bytes_per_s: what its configuration says, as in their connector; None: what our own estimator says,
            which theirs does not have.
        rtt_s: of the link, for that estimator.
    """

    def __init__(
        self,
        profiles: Sequence[Profile],
        menu: Menu,
        *,
        rule: KVServeRule | None = None,
        bandwidth_bytes_per_s: float | None = None,
        prior_bandwidth_bytes_per_s: float = 0.0,
        rtt_s: float = KvTransfer().rtt_s,
        seed: int = 0,
    ) -> None:
        self._rule = rule or KVServeRule()
        self._profiles: Mapping[str, Profile] = {profile.arm_id: profile for profile in profiles}
        self._menu = menu
        self._configured = bandwidth_bytes_per_s
        self._link = LinkView(prior_bandwidth_bytes_per_s, rtt_s)
        self._random = random.Random(seed)
        self._players = {arm_id: _Player() for arm_id in self._profiles}
        self._decisions = 0

    @property
    def name(self) -> str:
        return f"kvserve (eps {self._rule.epsilon:g})" if self._rule.epsilon else "kvserve"

    def offered(self, arrival: Arrival, now_s: float) -> None:
        """It knows no load."""

    def wire_span(self, arrival: Arrival, start_s: float, end_s: float, wire_bytes: float) -> None:
        """For the bandwidth."""
        self._link.wire_span(start_s, end_s, wire_bytes)

    def choose(self, arrival: Arrival, situation: Situation) -> Choice:
        """The candidate with the least predicted time, or raw."""
        self._decisions += 1
        bandwidth = self._configured or self._link.bandwidth_bytes_per_s(situation.now_s)
        candidates: list[tuple[float, str]] = []
        for arm_id in self._menu.of_class(arrival.service_class) if bandwidth > 0 else ():
            profile = self._profiles.get(arm_id)
            if profile is None or self._players[arm_id].barred_until >= self._decisions:
                continue
            codec_s = self._codec_s(profile, arrival.raw_bytes)
            speed = arrival.raw_bytes / codec_s if codec_s > 0 else math.inf
            if bandwidth >= (1.0 - 1.0 / profile.ratio) * speed:
                continue
            predicted_s = codec_s + arrival.raw_bytes / (bandwidth * profile.ratio)
            self._players[arm_id].predicted_s[situation.index] = predicted_s
            expected_s = predicted_s + self._players[arm_id].residual_s
            if self._rule.slo_s is None or expected_s <= self._rule.slo_s:
                candidates.append((expected_s, arm_id))
        if not candidates:
            return Choice(RAW, bandwidth_bytes_per_s=bandwidth)
        best = min(candidates)[1]
        if self._rule.epsilon > 0 and self._random.random() < self._rule.epsilon:
            chosen = self._random.choice(candidates)[1]
            return Choice(chosen, explored=chosen != best, bandwidth_bytes_per_s=bandwidth)
        return Choice(best, bandwidth_bytes_per_s=bandwidth)

    def finished(self, record: TransferRecord) -> None:
        """Move the profile's residual; bar it for a while when it broke the SLO again and again."""
        player = self._players.get(record.arm_id)
        predicted_s = player.predicted_s.get(record.index) if player else None
        for other in self._players.values():
            other.predicted_s.pop(record.index, None)
        if player is None or predicted_s is None:
            return
        observed_s = record.total_s if self._rule.observes_wait else record.service_s
        player.residual_s += self._rule.eta * (observed_s - predicted_s - player.residual_s)
        player.plays += 1
        if self._rule.slo_s is not None and observed_s > self._rule.slo_s:
            player.violations += 1
        if player.plays >= _COOLDOWN_PLAYS and player.violations >= _COOLDOWN_VIOLATIONS:
            player.barred_until = self._decisions + _COOLDOWN_DECISIONS
            player.violations = 0

    def _codec_s(self, profile: Profile, raw_bytes: float) -> float:
        both_s = profile.encode.seconds(raw_bytes) + profile.decode.seconds(raw_bytes)
        return both_s / 2 if self._rule.harmonic_speed else both_s
