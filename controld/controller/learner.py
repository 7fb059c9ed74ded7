"""Learning from effects: posteriors by arm and stage, and what of the feedback is believed.

Only the sender's half of a verified transfer, or of a raw one, teaches. Everything else changes nothing and is counted
by reason. Refusals and fall-backs teach no times; repeated, they take the arm out of use.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from controld.candidates.profile import Profile, StageTime
from controld.contract.decision import DEFAULT_CLASS, RAW, RECOMPUTE
from controld.contract.effect import MAX_RECONSTRUCTION_ERROR, SELF_CHECK_REASON, Effect, Half, Path, Verdict
from controld.contract.errors import FieldError
from controld.controller.faults import FaultLedger
from controld.controller.goals import (
    RAW_OVERHEAD,
    Candidate,
    ClassGoal,
    ClassInput,
    PrefillTime,
    profile_candidate,
    raw_candidate,
    recompute_candidate,
)
from controld.controller.guard import PinBoard
from controld.controller.knobs.base import STAGES, Knob, Stage
from controld.controller.posterior import (
    FOREIGN_PRIORS,
    LOCAL_PRIORS,
    LogRatioPosterior,
    StageCorrection,
    StagePrior,
)
from controld.controller.quality_guard import Expectation, QualityGuard

_FORMAT = 2
_FORMAT_WITHOUT_QUALITY = 1
_REMEMBERED_TRANSFERS = 512
_LATE_S = 600.0
_AHEAD_S = 60.0
_LARGEST_LOG = math.log(1000.0)
_WIRE_DOUBT_LOG = math.log(2.0)
"""A wire so much slower or quicker than the estimate says is first of all a link that has changed, or was not known:
the estimator follows within two transfers, and nothing of it was about the arm."""
_POOL_DOUBT = 2.0
"""Of an arm that was observed so often, half is believed in what it says of the others."""
_POOL_SILENCE = 1.0
"""So many arms speak for nothing having changed."""

_EVERY_CODED = "coded"
"""Under this name stands what all coded arms share: bytes take the time that the link takes, whoever coded them."""


NO_WORKLOADS: Mapping[str, str] = MappingProxyType({})
_UNCODED = {RAW: Path.RAW, RECOMPUTE: Path.RECOMPUTED}
"""Arms without a codec, and the one path that each can take."""


class Feedback(StrEnum):
    """What was made of an effect."""

    LEARNED = "learned"
    FAULT = "fault"
    RECEIVER_HALF = "receiver_half"
    NOT_VERIFIED = "not_verified"
    UNLEARNED_CLASS = "unlearned_class"
    FELL_BACK = "fell_back"
    EMPTY = "empty"
    MALFORMED = "malformed"
    IMPLAUSIBLE = "implausible"
    LATE = "late"
    DUPLICATE = "duplicate"
    ORPHAN = "orphan"


_DISBELIEVED = (Feedback.IMPLAUSIBLE, Feedback.NOT_VERIFIED)
"""What leaves no trace but its count: the transfer's true effect may still come."""

_BELIEVED_WHOLE = (Feedback.LEARNED, Feedback.UNLEARNED_CLASS)
"""What shows how well a codec reconstructs, too."""


@dataclass(frozen=True, slots=True)
class _KnownArm:
    """What predictions are made from, and where its posteriors start."""

    basis: str
    foreign: bool
    item: ClassInput
    row: int


@dataclass(slots=True)
class _ArmState:
    basis: str
    stages: dict[Stage, LogRatioPosterior] = field(default_factory=dict)
    faults: FaultLedger = field(default_factory=FaultLedger)
    checks: FaultLedger = field(default_factory=FaultLedger)
    """Of the transfers alone in which the sender checked itself: the others would dilute a window of outcomes."""


class Learner:
    """What is learned of one table's arms. Not thread-safe; the caller passes time in and stores `to_json`.

    Args:
        tier, link_group: of the table; effects of another one are orphans.
        knob: the cost model that effects are compared with.
    """

    def __init__(self, tier: str, link_group: str, knob: Knob) -> None:
        self.tier = tier
        self.link_group = link_group
        self._knob = knob
        self._known: dict[str, _KnownArm] = {}
        self._unlearned_classes: frozenset[str] = frozenset()
        self._arms: dict[str, _ArmState] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        self.quality = QualityGuard()
        self.counters: dict[Feedback, int] = dict.fromkeys(Feedback, 0)
        self.evidence = 0
        self.moved_log = 0.0
        """How far what was learned since has moved any stage of an arm from what `corrections` said last."""
        self._used: dict[tuple[str, Stage], float] = {}

    def set_candidates(
        self,
        profiles: Iterable[Profile],
        *,
        raw_overhead: StageTime = RAW_OVERHEAD,
        prefill: PrefillTime | None = None,
        sender_hardware: str = "",
        receiver_hardware: str = "",
        unlearned_classes: Iterable[str] = (),
        workloads: Mapping[str, str] = NO_WORKLOADS,
    ) -> None:
        """Name the arms that there are. An arm whose profile is another one than before starts fresh.

        A configuration that several workloads share is one arm here: its times and ratio come from the newest profile.

        Args:
            prefill: what computing a prefix again is predicted to take; None where nobody can.
            unlearned_classes: classes whose transfers teach no times; their refusals, fall-backs and errors of
                reconstruction count all the same.
            workloads: by service class; a class's errors are compared with its workload's profiles.
        """
        self._unlearned_classes = frozenset(unlearned_classes)
        known = list(profiles)
        self._expect(known, workloads)
        newest: dict[str, Profile] = {}
        for profile in sorted(known, key=lambda p: (p.measured_unix_s, p.workload)):
            newest[profile.arm_id] = profile
        goal = ClassGoal(name=DEFAULT_CLASS, workload="")
        coded = [
            profile_candidate(profile, sender_hardware, receiver_hardware) for _, profile in sorted(newest.items())
        ]
        recompute = [] if prefill is None else [recompute_candidate(prefill)]
        item = ClassInput(goal, (raw_candidate(raw_overhead), *recompute, *coded))
        self._known = {
            candidate.arm_id: _KnownArm(
                basis=_basis(candidate),
                foreign=candidate.foreign,
                item=item,
                row=row,
            )
            for row, candidate in enumerate(item.candidates)
        }
        self._drop_other_bases()

    def _expect(self, profiles: Sequence[Profile], workloads: Mapping[str, str]) -> None:
        models = {profile.model_fingerprint for profile in profiles}
        if len(models) != 1:
            # Nothing is known of what is served, so nothing is compared; what broke is kept.
            self.quality.expect("", {})
            return
        expected = {
            (name, profile.arm_id): Expectation.of(profile)
            for name, workload in workloads.items()
            for profile in profiles
            if profile.workload == workload
        }
        self.quality.expect(models.pop(), expected)

    def observe(self, effect: Effect, now_unix_s: float) -> Feedback:
        """Learn from one effect, or say why not."""
        feedback = self._observe(effect, now_unix_s)
        self.counters[feedback] += 1
        return feedback

    def corrections(self, now_unix_s: float) -> dict[str, tuple[StageCorrection, ...]]:
        """Each known arm's corrections, in the order of `STAGES`: as `TableRequest.corrections` wants them."""
        pooled = {stage: 0.0 if stage is Stage.WIRE else self._pooled(stage, now_unix_s) for stage in STAGES}
        corrections = {
            arm_id: tuple(
                self._posterior(arm_id, stage).correction(now_unix_s, 0.0 if arm_id in _UNCODED else pooled[stage])
                for stage in STAGES
            )
            for arm_id in self._known
        }
        self._used = {
            (arm_id, stage): correction.mean_log
            for arm_id, each in corrections.items()
            for stage, correction in zip(STAGES, each, strict=True)
        }
        self.moved_log = 0.0
        return corrections

    def pins(self, now_unix_s: float) -> PinBoard:
        """Arms out of use: refused or falling back again and again, or, for a class, worse than they were profiled."""
        known = [(arm_id, state) for arm_id, state in sorted(self._arms.items()) if arm_id in self._known]
        faults = (ledger.pin(arm_id) for arm_id, state in known for ledger in (state.faults, state.checks))
        broken = (pin for pin in self.quality.pins() if pin.arm_id in self._known)
        return PinBoard((*(pin for pin in faults if pin is not None), *broken)).at(now_unix_s)

    def unpin(self, arm_id: str) -> bool:
        """Forget an arm's faults and quality breaches; whether there were any."""
        was_broken = self.quality.release(arm_id)
        state = self._arms.get(arm_id)
        if state is None or (state.faults == FaultLedger() and state.checks == FaultLedger()):
            return was_broken
        state.faults = state.checks = FaultLedger()
        return True

    def _observe(self, effect: Effect, now_unix_s: float) -> Feedback:
        numbers = (effect.raw_bytes, effect.wire_bytes, effect.encode_s, effect.wire_s, effect.decode_s)
        times = (effect.bandwidth_bytes_per_s, effect.finished_unix_s, now_unix_s)
        if not all(math.isfinite(x) and x >= 0 for x in (*numbers, *times)):
            return Feedback.MALFORMED
        error = effect.reconstruction_error
        if error is not None and not 0 <= error <= MAX_RECONSTRUCTION_ERROR:
            return Feedback.MALFORMED
        if effect.half is not Half.SENDER:
            return Feedback.RECEIVER_HALF
        known = self._known.get(effect.arm_id)
        if known is None or (effect.tier, effect.link_group) != (self.tier, self.link_group):
            return Feedback.ORPHAN
        age_s = now_unix_s - effect.finished_unix_s
        if age_s > _LATE_S or age_s < -_AHEAD_S:
            return Feedback.LATE
        if effect.transfer_id in self._seen:
            return Feedback.DUPLICATE
        if effect.raw_bytes == 0:
            return Feedback.EMPTY
        feedback = self._fault_or_times(effect, known, now_unix_s)
        if feedback in _DISBELIEVED:
            return feedback
        self._remember(effect.transfer_id)
        if error is not None and feedback in _BELIEVED_WHOLE:
            self.quality.observe(effect, now_unix_s)
            if (state := self._arms.get(effect.arm_id)) is not None:
                state.checks = state.checks.succeeded()
        return feedback

    def _fault_or_times(self, effect: Effect, known: _KnownArm, now_unix_s: float) -> Feedback:
        coded = effect.arm_id not in _UNCODED
        if coded and effect.verdict is Verdict.NACK:
            self._fault(effect.arm_id, now_unix_s, effect.reason or "refused by the receiver", refused=True)
            return Feedback.FAULT
        if coded and effect.path is Path.RAW_FALLBACK:
            # A sender that cannot decode its own frame says the same as a receiver that refuses it.
            if effect.reason.startswith(SELF_CHECK_REASON):
                state = self._state(effect.arm_id)
                state.checks = state.checks.failed(now_unix_s, effect.reason, refused=True)
                self.evidence += 1
                return Feedback.FAULT
            self._fault(effect.arm_id, now_unix_s, effect.reason or "fell back to raw", refused=False)
            return Feedback.FELL_BACK
        # Nobody answers for raw bytes, so what a data plane may say of them is that they were sent.
        believed = (Verdict.VERIFIED,) if coded else (Verdict.VERIFIED, Verdict.UNVERIFIED)
        if effect.verdict not in believed or effect.path not in (Path.CODED, Path.RAW, Path.RECOMPUTED):
            return Feedback.NOT_VERIFIED
        if coded and (effect.path is not Path.CODED or effect.wire_bytes == 0):
            # A success that moved nothing is a lie, and a codec that lies is not used again.
            self._fault(effect.arm_id, now_unix_s, "reported success without coded bytes", refused=True)
            return Feedback.FAULT
        if not coded and effect.path is not _UNCODED[effect.arm_id]:
            return Feedback.IMPLAUSIBLE
        if effect.path is Path.RECOMPUTED and effect.wire_bytes:
            return Feedback.IMPLAUSIBLE
        if effect.service_class in self._unlearned_classes:
            return Feedback.UNLEARNED_CLASS
        ratios = self._log_ratios(effect, known)
        if any(abs(ratio) > _LARGEST_LOG for ratio in ratios.values()):
            return Feedback.IMPLAUSIBLE
        state = self._state(effect.arm_id)
        state.faults = state.faults.succeeded()
        for stage, ratio in ratios.items():
            keeper = self._keeper(effect.arm_id, stage)
            pooled = self._pooled(stage, now_unix_s, without=effect.arm_id) if keeper is state and coded else 0.0
            doubt_log = _WIRE_DOUBT_LOG if stage is Stage.WIRE else math.inf
            posterior = self._posterior(effect.arm_id, stage).observe(ratio, now_unix_s, pooled, doubt_log=doubt_log)
            keeper.stages[stage] = posterior
            moved = abs(posterior.correction(now_unix_s, pooled).mean_log - self._used.get((effect.arm_id, stage), 0.0))
            self.moved_log = max(self.moved_log, moved)
        self.evidence += 1
        return Feedback.LEARNED

    def _log_ratios(self, effect: Effect, known: _KnownArm) -> dict[Stage, float]:
        predicted = self._knob.stage_seconds(
            known.item.models,
            known.row,
            raw_bytes=effect.raw_bytes,
            wire_bytes=effect.wire_bytes,
            bandwidth=effect.bandwidth_bytes_per_s,
        )
        observed: Mapping[Stage, float] = {
            Stage.ENCODE: effect.encode_s,
            Stage.BYTES: float(effect.wire_bytes),
            # Raw has no codec: whatever it took beside the wire is its overhead.
            Stage.WIRE: effect.wire_s if effect.arm_id != RAW else effect.encode_s + effect.wire_s + effect.decode_s,
            Stage.DECODE: effect.decode_s,
        }
        return {
            stage: math.log(observed[stage] / value)
            for stage, value in predicted.items()
            if value > 0 and observed[stage] > 0
        }

    def _pooled(self, stage: Stage, now_unix_s: float, without: str = "") -> float:
        """What the other arms suggest for a stage: a busy machine slows every codec down, not just the one in use.

        A shrunken mean over the arms in which none counts for more than one voice, and nobody's silence for another:
        one arm gone bad does not condemn all.
        """
        total, voices = 0.0, _POOL_SILENCE
        for arm_id, state in self._arms.items():
            posterior = state.stages.get(stage)
            if posterior is None or arm_id in _UNCODED or arm_id == without or arm_id not in self._known:
                continue
            evidence = posterior.faded_weight(now_unix_s)
            voice = evidence / (evidence + _POOL_DOUBT)
            total += voice * posterior.mean
            voices += voice
        return total / voices

    def _posterior(self, arm_id: str, stage: Stage) -> LogRatioPosterior:
        state = self._arms.get(_EVERY_CODED if stage is Stage.WIRE and arm_id not in _UNCODED else arm_id)
        if state is not None and stage in state.stages:
            return state.stages[stage]
        return LogRatioPosterior.fresh(self._prior(arm_id, stage))

    def _prior(self, arm_id: str, stage: Stage) -> StagePrior:
        return (FOREIGN_PRIORS if self._known[arm_id].foreign else LOCAL_PRIORS)[stage]

    def _keeper(self, arm_id: str, stage: Stage) -> _ArmState:
        """Where a stage's posterior of an arm is kept."""
        if stage is Stage.WIRE and arm_id not in _UNCODED:
            return self._arms.setdefault(_EVERY_CODED, _ArmState(basis=""))
        return self._state(arm_id)

    def _state(self, arm_id: str) -> _ArmState:
        return self._arms.setdefault(arm_id, _ArmState(basis=self._known[arm_id].basis))

    def _fault(self, arm_id: str, now_unix_s: float, reason: str, *, refused: bool) -> None:
        state = self._state(arm_id)
        state.faults = state.faults.failed(now_unix_s, reason, refused=refused)
        self.evidence += 1

    def _remember(self, transfer_id: str) -> None:
        self._seen[transfer_id] = None
        if len(self._seen) > _REMEMBERED_TRANSFERS:
            self._seen.popitem(last=False)

    def to_json(self) -> str:
        """Everything learned; equal states give equal text."""
        document = {
            "format": _FORMAT,
            "tier": self.tier,
            "link_group": self.link_group,
            "evidence": self.evidence,
            "seen": list(self._seen),
            "arms": {
                arm_id: {
                    "basis": state.basis,
                    "stages": {stage.value: posterior.to_list() for stage, posterior in state.stages.items()},
                    "faults": state.faults.to_document(),
                    "checks": state.checks.to_document(),
                }
                for arm_id, state in self._arms.items()
            },
            "quality": self.quality.to_document(),
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def restore(self, text: str) -> None:
        """Take over what `to_json` wrote, whole or not at all.

        Raises:
            FieldError: another format or table, or numbers that no learner has.
        """
        try:
            document = json.loads(text)
            if document["format"] not in (_FORMAT, _FORMAT_WITHOUT_QUALITY):
                raise FieldError("posteriors.format", f"{document['format']} is not {_FORMAT}")
            if (document["tier"], document["link_group"]) != (self.tier, self.link_group):
                raise FieldError("posteriors.tier", "belongs to another table")
            arms = {str(arm_id): _arm_from_document(item) for arm_id, item in sorted(document["arms"].items())}
            seen = OrderedDict.fromkeys(str(transfer_id) for transfer_id in document["seen"])
            evidence = int(document["evidence"])
            # The last thing that can fail: what it restores is not undone.
            self.quality.restore([] if document["format"] == _FORMAT_WITHOUT_QUALITY else document["quality"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FieldError("posteriors", f"not a learner's state: {error}", code="posteriors.malformed") from error
        self._arms, self._seen, self.evidence = arms, seen, evidence
        self._drop_other_bases()

    def _drop_other_bases(self) -> None:
        """Drop what belongs to arms whose profile is another one by now."""
        for arm_id, known in self._known.items():
            if arm_id in self._arms and self._arms[arm_id].basis != known.basis:
                del self._arms[arm_id]


def _arm_from_document(document: Mapping[str, Any]) -> _ArmState:
    return _ArmState(
        basis=str(document["basis"]),
        stages={
            stage: LogRatioPosterior.from_list(document["stages"][stage.value])
            for stage in STAGES
            if stage.value in document["stages"]
        },
        faults=FaultLedger.from_document(document["faults"]),
        checks=FaultLedger.from_document(document["checks"]) if "checks" in document else FaultLedger(),
    )


def _basis(candidate: Candidate) -> str:
    """Which predictions what is learned of an arm corrects."""
    times = f"{_numbers(candidate.encode)}/{_numbers(candidate.decode)}/{candidate.wire_share!r}"
    return times if not candidate.encode_c_s_per_byte2 else f"{times}/{candidate.encode_c_s_per_byte2!r}"


def _numbers(time: StageTime) -> str:
    return f"{time.a_s!r},{time.b_s_per_byte!r}"
