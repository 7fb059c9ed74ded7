"""What the classes on an engine want, weighed against each other by their sessions. Pure.

Each objective says by what part a setting is worse than the best one: loss in parts of the limit, the chunk's time and
memory in parts of the least. The parts are added with each objective's share of the sessions, so that an engine with
nine sessions that want quality and one that wants speed is not turned for the one, and not for whichever class the
policy names first. With one objective that is its own order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from controld.controller.video_view import Steering, VideoGoal, VideoObjective

_LITTLE = 1e-12
"""In place of a limit, time or loss of nothing that something is divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What settings are weighed by.

    Args:
        loss: mean excess loss, at least 0; infinite where it was never measured.
        loss_se: its standard error.
        chunk_s: seconds of a chunk.
        memory_bytes: None: not known.
        name: settles what is equal in all.
    """

    loss: float
    loss_se: float
    chunk_s: float
    memory_bytes: int | None
    name: str


class Weighing:
    """The classes' objectives by their share of the sessions.

    Args:
        goals: of the classes; classes without an open session count alike where none has one.
        max_quality_loss: the strictest limit; losses count in parts of it.

    Attributes:
        shares: by objective; the sum is 1.
    """

    def __init__(self, goals: Sequence[VideoGoal], max_quality_loss: float, steering: Steering) -> None:
        total = sum(goal.sessions for goal in goals)
        shares: dict[VideoObjective, float] = {}
        for goal in goals:
            share = goal.sessions / total if total else 1 / len(goals)
            if share > 0:
                shares[goal.objective] = shares.get(goal.objective, 0.0) + share
        # Sums must not depend on the order of the classes.
        self.shares: Mapping[VideoObjective, float] = {each: shares[each] for each in VideoObjective if each in shares}
        self._limit = max_quality_loss
        self._steering = steering

    def __str__(self) -> str:
        names = sorted(self.shares, key=lambda each: (-self.shares[each], each.value))
        if len(names) == 1:
            return names[0].value
        parts = [f"{each.value} ({self.shares[each]:.0%})" for each in names]
        return f"{' and '.join(parts)} of the sessions"

    def ranks(self, worths: Iterable[Worth]) -> list[tuple[float | int | str, ...]]:
        """One for each setting, the smallest is the best; settings are compared with the best of these."""
        field = _Field(list(worths), self._limit, self._steering)
        return [self._rank(worth, field) for worth in field.worths]

    def _rank(self, worth: Worth, field: _Field) -> tuple[float | int | str, ...]:
        regret = math.fsum(share * field.regret(each, worth) for each, share in self.shares.items())
        memory = math.inf if worth.memory_bytes is None else worth.memory_bytes
        if VideoObjective.QUALITY in self.shares:
            # Losses that are not alike are in the sum.
            return regret, worth.chunk_s, memory, worth.name
        return regret, worth.loss, worth.chunk_s, memory, worth.name

    def gain(self, worth: Worth, current: Worth) -> float:
        """What is won by leaving `current`, as a part of the limit, the chunk's time or the memory; 0: little."""
        if len(self.shares) > 1:
            gain, least = self._joint_gain(worth, current), self._steering.least_gain
        else:
            (objective,) = self.shares
            gain, least = self._gain(objective, worth, current)
        return gain if gain >= least else 0.0

    def _gain(self, objective: VideoObjective, worth: Worth, current: Worth) -> tuple[float, float]:
        """Of one objective, and the least that counts."""
        least = self._steering.least_gain
        if objective is VideoObjective.BYTES:
            if current.memory_bytes is None or worth.memory_bytes is None:
                return 0.0, least
            return _saved(current.memory_bytes, worth.memory_bytes), least
        faster = _saved(current.chunk_s, worth.chunk_s)
        if objective is VideoObjective.LATENCY:
            return faster, least
        better = current.loss - worth.loss
        if better <= _uncertain(worth, current):
            return faster, self._steering.least_speed
        return better / max(self._limit, current.loss, _LITTLE), least

    def _joint_gain(self, worth: Worth, current: Worth) -> float:
        """What the two differ by in the sum, but for losses within the errors and sizes that are not both known."""
        field = _Field([worth, current], self._limit, self._steering)
        alike = set()
        if abs(current.loss - worth.loss) <= _uncertain(worth, current):
            alike.add(VideoObjective.QUALITY)
        if current.memory_bytes is None or worth.memory_bytes is None:
            alike.add(VideoObjective.BYTES)
        return math.fsum(
            share * (field.regret(each, current) - field.regret(each, worth))
            for each, share in self.shares.items()
            if each not in alike
        )


class _Field:
    """Settings that are compared with each other, and the best of each kind among them."""

    def __init__(self, worths: Sequence[Worth], limit: float, steering: Steering) -> None:
        self.worths = worths
        self._limit = max(limit, _LITTLE)
        self._steering = steering
        self._alike = min((worth.loss for worth in worths if math.isfinite(worth.loss)), default=0.0)
        self._alike += steering.tie * limit
        self._fastest_s = min((worth.chunk_s for worth in worths), default=0.0)
        sizes = [worth.memory_bytes for worth in worths if worth.memory_bytes is not None]
        self._least_bytes, self._most_bytes = min(sizes, default=0), max(sizes, default=0)

    def regret(self, objective: VideoObjective, worth: Worth) -> float:
        """By what part a setting is worse than the best in what an objective wants."""
        if objective is VideoObjective.QUALITY:
            return max(worth.loss - self._alike, 0.0) / self._limit
        if objective is VideoObjective.LATENCY:
            return max(worth.chunk_s / max(self._fastest_s * (1 + self._steering.margin), _LITTLE) - 1.0, 0.0)
        if worth.memory_bytes is None:
            # Worse than any that is known, by a whole part: the only one that is known has no regret.
            return self._most_bytes / max(self._least_bytes, 1)
        return worth.memory_bytes / max(self._least_bytes, 1) - 1.0


def _uncertain(one: Worth, other: Worth) -> float:
    return math.hypot(one.loss_se, other.loss_se)


def _saved(before: float, after: float) -> float:
    return max(1.0 - after / before, 0.0) if before > 0 else 0.0
