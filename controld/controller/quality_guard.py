"""The quality guard of one table: compares what senders and probes measure with what was profiled.

For each (model, service class, arm) one sequential test of the errors of reconstruction and one of the quality loss. A
breach is final: only a person, or a profile measured after it, ends it. What cannot be understood changes nothing and
is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from controld.candidates.profile import Profile
from controld.contract.decision import RAW
from controld.contract.effect import MAX_RECONSTRUCTION_ERROR, Effect, Path, Verdict
from controld.contract.errors import FieldError
from controld.contract.trial import SegmentLoss
from controld.controller.error_test import ErrorNorm, ErrorTest, NormLearner, from_document, to_document
from controld.controller.guard import Pin
from controld.controller.loss_test import LossTest, spread_of


class Look(StrEnum):
    """What was made of a measured error."""

    COMPARED = "compared"
    LEARNED = "learned"
    BREACH = "breach"
    PINNED_ALREADY = "pinned_already"
    UNCODED = "uncoded"
    IMPLAUSIBLE = "implausible"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a profile says of an arm's errors.

    Args:
        basis: changes with the measurement.
        norm: None where the profile has no figure.
        measured_unix_s: when.
        loss_spread_nats: standard deviation of the quality loss over segments; 0 where unknown.
    """

    basis: str
    norm: ErrorNorm | None
    measured_unix_s: float
    loss_spread_nats: float = 0.0

    @classmethod
    def of(cls, profile: Profile) -> Expectation:
        """What this profile says."""
        norm = None
        if profile.error_samples:
            norm = ErrorNorm(mean=profile.error_mean, log_sd=profile.error_log_sd, samples=profile.error_samples)
        numbers = (profile.error_mean, profile.error_log_sd, profile.error_samples, profile.measured_unix_s)
        return cls(
            basis="/".join((profile.workload, *(repr(number) for number in numbers))),
            norm=norm,
            measured_unix_s=profile.measured_unix_s,
            loss_spread_nats=spread_of(profile.loss_se_nats, profile.loss_samples),
        )


WatchKey = tuple[str, str, str]
"""Model fingerprint, service class, arm id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """One sequential test with what it compares to.

    Args:
        basis: of the expectation that it was begun with.
        learner: what is known of the normal error where the profile is silent.
        pinned_since_unix_s: -1 where it never broke.
        reason: why it broke.
        last_error: the newest error that was taken.
        loss: what probes found.
    """

    basis: str
    test: ErrorTest = field(default_factory=ErrorTest)
    learner: NormLearner = field(default_factory=NormLearner)
    pinned_since_unix_s: float = -1.0
    reason: str = ""
    last_error: float = 0.0
    loss: LossTest = field(default_factory=LossTest)

    @property
    def is_pinned(self) -> bool:
        """Whether it broke."""
        return self.pinned_since_unix_s >= 0

    def to_document(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "basis": self.basis,
            "test": to_document(self.test),
            "learner": to_document(self.learner),
            "since": self.pinned_since_unix_s,
            "reason": self.reason,
            "last_error": self.last_error,
            # What nobody probed is written as it was before there were probes.
            **({"loss": asdict(self.loss)} if self.loss.samples else {}),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Watch:
        """The inverse. Raises: FieldError, KeyError, TypeError, ValueError."""
        since, last_error = float(document["since"]), float(document["last_error"])
        if not -1.0 <= since < float("inf") or not 0 <= last_error <= MAX_RECONSTRUCTION_ERROR:
            raise FieldError("quality.watch", "holds a number that no watch has")
        return cls(
            basis=str(document["basis"]),
            test=from_document(ErrorTest, document["test"]),
            learner=from_document(NormLearner, document["learner"]),
            pinned_since_unix_s=since,
            reason=str(document["reason"]),
            last_error=last_error,
            loss=from_document(LossTest, document["loss"]) if "loss" in document else LossTest(),
        )


class QualityGuard:
    """All tests of one table. Not thread-safe; the caller passes time in and stores `to_document`."""

    def __init__(self) -> None:
        self._model = ""
        self._expected: dict[tuple[str, str], Expectation] = {}
        self._watches: dict[WatchKey, Watch] = {}
        self.looks: dict[Look, int] = dict.fromkeys(Look, 0)

    def expect(self, model_fingerprint: str, expected: Mapping[tuple[str, str], Expectation]) -> None:
        """Compare with these from now on, by (service class, arm).

        A test whose expectation is another one than before starts fresh; one that broke, only if the profile was
        measured after that.
        """
        self._model, self._expected = model_fingerprint, dict(expected)
        self._drop_other_bases()

    def observe(self, effect: Effect, now_unix_s: float) -> Look:
        """Take the measured error of an effect, or say why not."""
        look = self._observe(effect, now_unix_s)
        self.looks[look] += 1
        return look

    def observe_probe(
        self, service_class: str, arm_id: str, losses: Iterable[SegmentLoss], limit_nats: float, now_unix_s: float
    ) -> Look:
        """Take what a probe measured of an arm, each segment's loss and error; the last look at it.

        Args:
            losses: of the length at which the profile found the loss largest.
            limit_nats: the class's `max_quality_loss_nats`.
        """
        look = Look.UNKNOWN
        for one in losses:
            look = self._take(service_class, arm_id, one.reconstruction_error, now_unix_s, (one.loss_nats, limit_nats))
            self.looks[look] += 1
            if look is Look.BREACH:
                break
        return look

    def _observe(self, effect: Effect, now_unix_s: float) -> Look:
        error = effect.reconstruction_error
        if error is None or effect.arm_id == RAW:
            return Look.UNCODED
        if effect.path is not Path.CODED or effect.verdict is not Verdict.VERIFIED:
            return Look.UNCODED
        return self._take(effect.service_class, effect.arm_id, error, now_unix_s)

    def _take(
        self, service_class: str, arm_id: str, error: float | None, now_unix_s: float,
        loss_and_limit: tuple[float, float] | None = None,
    ) -> Look:  # fmt: skip
        if error is not None and not 0 <= error <= MAX_RECONSTRUCTION_ERROR:
            return Look.IMPLAUSIBLE
        if loss_and_limit is not None and not math.isfinite(loss_and_limit[0]):
            return Look.IMPLAUSIBLE
        expected = self._expected.get((service_class, arm_id))
        if expected is None:
            return Look.UNKNOWN
        key = (self._model, service_class, arm_id)
        watch = self._watches.get(key) or Watch(basis=expected.basis)
        if watch.is_pinned:
            return Look.PINNED_ALREADY
        reason = ""
        if loss_and_limit is not None:
            loss, limit = loss_and_limit
            watch = replace(watch, loss=watch.loss.observe(loss, limit, expected.loss_spread_nats))
            reason = _loss_reason(watch, limit) if watch.loss.suspicion > 1 else ""
        norm = expected.norm or watch.learner.norm()
        if error is not None and norm is None:
            watch = replace(watch, learner=watch.learner.observe(error), last_error=error)
        elif error is not None and norm is not None:
            watch = replace(watch, test=watch.test.observe(error, norm), last_error=error)
            reason = _reason(watch, norm) if watch.test.suspicion(norm) > 1 else reason
        self._watches[key] = watch
        if reason:
            self._watches[key] = replace(watch, pinned_since_unix_s=now_unix_s, reason=reason)
            return Look.BREACH
        return Look.LEARNED if norm is None and loss_and_limit is None else Look.COMPARED

    def probed_segments(self, arm_id: str) -> int:
        """How many segments the tests of an arm's loss have seen, the one that has seen most."""
        return max((watch.loss.samples for (_, _, arm), watch in self._watches.items() if arm == arm_id), default=0)

    def pins(self) -> tuple[Pin, ...]:
        """The arms that broke, of the model that is served."""
        return tuple(
            Pin(arm_id=arm_id, reason=watch.reason, since_unix_s=watch.pinned_since_unix_s, service_class=name)
            for (model, name, arm_id), watch in sorted(self._watches.items())
            if model == self._model and watch.is_pinned
        )

    def release(self, arm_id: str) -> bool:
        """Begin anew with an arm that broke, in every class and for every model; whether there was any."""
        broken = [key for key, watch in self._watches.items() if key[2] == arm_id and watch.is_pinned]
        for key in broken:
            # What was learned as normal stays: a person's word does not make today's errors normal.
            self._watches[key] = Watch(basis=self._watches[key].basis, learner=self._watches[key].learner)
        # While it was pinned its expectation may have become another one.
        self._drop_other_bases()
        return bool(broken)

    def rows(self) -> list[dict[str, Any]]:
        """For people: every test of the model that is served."""
        rows = []
        for (model, name, arm_id), watch in sorted(self._watches.items()):
            expected = self._expected.get((name, arm_id))
            if model != self._model or expected is None:
                continue
            norm = expected.norm or watch.learner.norm()
            rows.append(
                {
                    "service_class": name,
                    "arm_id": arm_id,
                    "state": "pinned_off" if watch.is_pinned else "watched" if norm else "learning",
                    "samples": watch.test.samples + (0 if expected.norm else watch.learner.samples),
                    "normal_error": norm.mean if norm else None,
                    "normal_from": "profile" if expected.norm else "first samples",
                    "last_error": watch.last_error,
                    "ratio": watch.test.ratio(),
                    "suspicion": max(watch.test.suspicion(norm) if norm else 0.0, watch.loss.suspicion),
                    "probed_segments": watch.loss.samples,
                    "reason": watch.reason,
                }
            )
        return rows

    def to_document(self) -> list[dict[str, Any]]:
        """Everything that was seen, JSON-ready; equal states give equal documents."""
        return [
            {"model": model, "service_class": name, "arm_id": arm_id, **watch.to_document()}
            for (model, name, arm_id), watch in sorted(self._watches.items())
        ]

    def restore(self, documents: Any) -> None:
        """Take over what `to_document` gave, whole or not at all.

        Raises:
            FieldError, KeyError, TypeError, ValueError: it is not that.
        """
        if not isinstance(documents, list):
            raise FieldError("quality", "is not a list")
        self._watches = {
            (str(item["model"]), str(item["service_class"]), str(item["arm_id"])): Watch.from_document(item)
            for item in documents
        }
        self._drop_other_bases()

    def _drop_other_bases(self) -> None:
        for (name, arm_id), expected in self._expected.items():
            key = (self._model, name, arm_id)
            watch = self._watches.get(key)
            if watch is None or watch.basis == expected.basis:
                continue
            if not watch.is_pinned or expected.measured_unix_s > watch.pinned_since_unix_s:
                del self._watches[key]


def _loss_reason(watch: Watch, limit_nats: float) -> str:
    return (
        f"probed again, it lost {watch.loss.mean_nats:.3g} nats per token over {watch.loss.run_samples} segments, "
        f"above the limit of {limit_nats:g}"
    )


def _reason(watch: Watch, norm: ErrorNorm) -> str:
    if norm.is_exact:
        return f"it should be exact, but changed values in several of {watch.test.samples} checked frames"
    test, origin = watch.test, "learned" if norm.learned else "profiled"
    if test.growth <= norm.growth_limit:
        return (
            f"again and again frames with an error far above the {origin} {norm.mean:.3g}, the last one "
            f"{watch.last_error:.3g}"
        )
    return (
        f"reconstruction error {test.ratio():.2g} times the {origin} {norm.mean:.3g} over {test.run_samples} "
        f"checked frames, the last one {watch.last_error:.3g}"
    )
