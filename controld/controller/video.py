"""The one setting that a video engine should run under, with the reasons. Pure.

Gates, in order: what the engine offers, quality, the guard, memory, frames per second, the first frame. Among the
settings that pass, the classes' objectives decide, weighed by sessions (quality first, then speed, unless a class wants
otherwise). Where none passes, quality and the guard still hold, then memory, and of what is left the least violation
wins.

A change is not free: the engine stands still, and history may be lost. A setting in force that passes is only left for
one whose gain over the horizon is more than that; one that fails is left at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from controld.candidates.video_profile import VideoProfile
from controld.contract.configuration_label import setting_label
from controld.contract.video import Transition
from controld.controller.knobs.video import VideoPrediction, predict
from controld.controller.video_plan import ArmPlan, Gate, Rejection, VideoPlan
from controld.controller.video_text import rate_text, seconds_text, size_text
from controld.controller.video_view import USUAL_SECONDS, USUAL_WINDOW_CHUNKS, EngineView, Steering, VideoGoal
from controld.controller.video_weighing import Weighing, Worth

_WORTH_SAYING = 1.005
"""A memory that is above the profile's by less is not told of."""


def decide_video(
    goals: Sequence[VideoGoal], profiles: Iterable[VideoProfile], engine: EngineView, steering: Steering | None = None
) -> VideoPlan:
    """The setting for an engine.

    Args:
        goals: of the classes with open sessions (or the one that would be served first); at least one.
        profiles: one for each setting.
        steering: as usual unless given.
    """
    steering = steering or Steering()
    wanted = _Wanted(goals, engine, steering)
    arms = [_Arm(profile, wanted, engine) for profile in profiles]
    reference = _reference(arms)
    for arm in arms:
        arm.reject(reference)
    _check_use(arms)
    current = next((arm for arm in arms if engine.in_force is not None and arm.id == engine.in_force.config_id), None)
    passing = [arm for arm in arms if not arm.rejections]
    allowed = [arm for arm in arms if not arm.has(Gate.OFFERED, Gate.QUALITY, Gate.ONLY, Gate.GUARD)]
    if passing:
        chosen, why = _among_passing(passing, current, wanted, engine, steering)
    elif allowed:
        chosen, why = _least_violation(allowed, current, engine, steering)
    else:
        chosen, why = None, _none_allowed(arms)
    return VideoPlan(
        setting=chosen.profile.configuration if chosen is not None else None,
        reason=why,
        in_force=engine.in_force.config_id if engine.in_force is not None else "",
        sessions=wanted.sessions,
        classes=tuple(goal.service_class for goal in goals),
        meets_targets=chosen is not None and not chosen.rejections,
        arms=tuple(arm.plan(chosen) for arm in _in_order(arms, wanted)),
    )


def _among_passing(
    passing: Sequence[_Arm], current: _Arm | None, wanted: _Wanted, engine: EngineView, steering: Steering
) -> tuple[_Arm, str]:
    best = _in_order(passing, wanted)[0]
    if current is None or current.rejections or best is current:
        left = f", in place of {current.label}: {current.rejections[0].text}" if current and best is not current else ""
        return best, f"the best by {wanted.weighing} of {len(passing)} that meet all targets{left}"
    # From here on the setting in force passes: leaving it must be worth it.
    sure = [arm for arm in passing if arm is current or arm.clears(wanted, steering.margin)]
    best = _in_order(sure, wanted)[0]
    if best is current:
        return current, "in force; what would be better does not clear the targets by the margin"
    if engine.in_force_s < steering.dwell_s:
        return current, f"in force for {engine.in_force_s:.1f} s only; {best.label} would be better"
    gain, cost_s = wanted.weighing.gain(best.worth, current.worth), best.switch_cost_s(current)
    text = f"{gain:.1%} over {steering.horizon_s:g} s against {cost_s:.2g} s of standstill and lost history"
    if gain == 0.0:
        return current, f"in force, and as good as {best.label} within what was measured"
    if gain * steering.horizon_s <= cost_s:
        return current, f"in force; {best.label} would gain {text}"
    return best, f"better by {wanted.weighing} than {current.label}: {text}"


def _least_violation(
    allowed: Sequence[_Arm], current: _Arm | None, engine: EngineView, steering: Steering
) -> tuple[_Arm, str]:
    best = min(allowed, key=_Arm.violation_order)
    if current in allowed and current is not None:
        same_gates = current.has(Gate.MEMORY) == best.has(Gate.MEMORY)
        is_young = engine.in_force_s < steering.dwell_s
        if same_gates and (is_young or current.violation() <= best.violation() + steering.least_relief):
            best = current
    missed = "; ".join(rejection.text for rejection in best.rejections)
    return best, f"no setting meets all targets; this one misses least: {missed}"


def _none_allowed(arms: Sequence[_Arm]) -> str:
    """Why nothing may be chosen whatever it costs: how many arms each of the gates that always hold keeps out."""
    kept_out = [
        (gate, sum(arm.has(gate) for arm in arms)) for gate in (Gate.OFFERED, Gate.QUALITY, Gate.ONLY, Gate.GUARD)
    ]
    counts = ", ".join(f"{gate.value} {count}" for gate, count in kept_out if count)
    return f"none of {len(arms)} settings may be used (out by gate: {counts}): the engine keeps what it has"


class _Wanted:
    """The goals of all classes as one: the strictest of each limit, and all objectives weighed."""

    def __init__(self, goals: Sequence[VideoGoal], engine: EngineView, steering: Steering) -> None:
        self.sessions = max(sum(goal.sessions for goal in goals), 1)
        self.max_quality_loss = min(goal.max_quality_loss for goal in goals)
        self.weighing = Weighing(goals, self.max_quality_loss, steering)
        self.percentile = max(goal.percentile for goal in goals)
        self.fps = max(_given(goal.fps for goal in goals), default=None)
        self.fps_denoise = max(_given(goal.fps_denoise for goal in goals), default=None)
        self.first_frame_s = min(_given(goal.first_frame_s for goal in goals), default=None)
        limits = (*(goal.memory_bytes for goal in goals), float(engine.memory_limit_bytes) or None)
        self.memory_bytes = min(_given(limits), default=None)
        self.only = frozenset(goal.only_setting for goal in goals if goal.only_setting is not None)


def _given(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


class _Arm:
    """A setting with what it would do here."""

    def __init__(self, profile: VideoProfile, wanted: _Wanted, engine: EngineView) -> None:
        self.profile = profile
        self.id = profile.setting_id
        self.label = setting_label(profile.configuration)
        self._wanted = wanted
        self._engine = engine
        self.rejections: list[Rejection] = []
        self.predicted: VideoPrediction = predict(
            profile,
            sessions=wanted.sessions,
            percentile=wanted.percentile,
            corrections=engine.corrections.get(self.id),
            memory_factor=engine.memory_factors.get(self.id, 1.0),
        )
        facts = engine.facts
        if engine.in_force is None:
            self.transition = Transition.NONE
        elif facts is None:
            self.transition = Transition.NONE if engine.in_force.config_id == self.id else Transition.RELOAD
        else:
            self.transition = facts.reach(engine.in_force, profile.configuration)
        self.switch_s = engine.switch_seconds.get(self.transition, USUAL_SECONDS[self.transition])
        self.keeps_kv = engine.keeps_kv.get(self.transition, self.transition <= Transition.NEXT_CALL)

    def has(self, *gates: Gate) -> bool:
        """Whether it is rejected by one of these."""
        return any(rejection.gate in gates for rejection in self.rejections)

    def reject(self, reference: _Arm | None) -> None:
        """Note every gate that it does not pass.

        Args:
            reference: what loses least; its motion is what there is to keep.
        """
        wanted, engine, seen = self._wanted, self._engine, self.predicted
        if engine.offered is not None and self.id not in engine.offered:
            self._out(Gate.OFFERED, None, None, self._left_out())
        reason = engine.pins.reason(self.id, "")
        if reason:
            self._out(Gate.GUARD, None, None, f"out of use: {reason}")
        if wanted.only and self.id not in wanted.only:
            self._out(Gate.ONLY, None, None, "a class is pinned to another setting")
        self._check_quality(reference)
        limit = wanted.memory_bytes
        if limit is not None and seen.memory_bytes is None:
            self._out(Gate.MEMORY, None, limit, "its memory is not known, and there is a limit")
        elif limit is not None and seen.memory_bytes is not None and seen.memory_bytes > limit:
            factor = engine.memory_factors.get(self.id, 1.0)
            shown = f" (chunks showed {factor:.0%} of its profile's)" if factor > _WORTH_SAYING else ""
            text = f"needs {size_text(seen.memory_bytes)} of {size_text(limit)}{shown}"
            self._out(Gate.MEMORY, seen.memory_bytes, limit, text)
        for gate, value, target, what in (
            (Gate.FPS, seen.fps_end_to_end, wanted.fps, "FPS end to end"),
            (Gate.FPS_DENOISE, seen.fps_denoise, wanted.fps_denoise, "FPS of denoising"),
        ):
            if target is not None and value < target:
                self._out(gate, value, target, f"{rate_text(value)} of {rate_text(target)} {what}")
        first = wanted.first_frame_s
        if first is not None and seen.first_frame_s > first:
            at_end = math.isinf(seen.first_frame_s)
            text = (
                "the first frame comes with the last" if at_end else f"first after {seconds_text(seen.first_frame_s)}"
            )
            self._out(Gate.FIRST_FRAME, seen.first_frame_s, first, f"{text}, not {seconds_text(first)}")

    def missed(self) -> frozenset[Gate]:
        """The gates that it does not pass, but for that of being of use."""
        return frozenset(rejection.gate for rejection in self.rejections) - {Gate.NO_USE}

    def _out(self, gate: Gate, value: float | None, limit: float | None, text: str) -> None:
        finite = value if value is None or math.isfinite(value) else None
        self.rejections.append(Rejection(gate=gate, value=finite, limit=limit, text=text))

    def _left_out(self) -> str:
        facts = self._engine.facts
        reasons = facts.left_out if facts is not None else {}
        found = [
            f"{name}={value}: {reasons[f'{name}={value}']}"
            for name, value in self.profile.configuration.items()
            if f"{name}={value}" in reasons
        ]
        return f"not offered by this engine: {'; '.join(found)}" if found else "not offered by this engine"

    def _check_quality(self, reference: _Arm | None) -> None:
        limit, loss = self._wanted.max_quality_loss, self.profile.loss_upper
        if self.profile.loss_mean is None:
            self._out(Gate.QUALITY, None, limit, "its loss was never measured")
        elif loss > limit:
            self._out(Gate.QUALITY, loss, limit, f"loss up to {loss:.3g}, above {limit:.3g}")
        if self._engine.motion is None or self.profile.motion is None:
            return
        if reference is None or not reference.profile.motion:
            return
        kept = self.profile.motion / reference.profile.motion
        if kept < self._engine.motion:
            text = f"keeps {kept:.0%} of the motion of {reference.label}, not {self._engine.motion:.0%}"
            self._out(Gate.QUALITY, kept, self._engine.motion, text)

    def check_use(self, others: Iterable[_Arm]) -> None:
        """A setting that is slower than another one and in nothing better is of no use, whatever is wanted.

        Args:
            others: those that pass every gate that this one passes, the fastest first.
        """
        if self._engine.in_force is not None and self._engine.in_force.config_id == self.id:
            return
        other = next((arm for arm in others if arm._is_faster(self) and arm.is_no_worse(self)), None)
        if other is None:
            return
        text = (
            f"slower than {other.label} ({rate_text(self.predicted.fps_denoise)} against"
            f" {rate_text(other.predicted.fps_denoise)} FPS of denoising, {rate_text(self.predicted.fps_end_to_end)}"
            f" against {rate_text(other.predicted.fps_end_to_end)} end to end), and neither smaller nor better"
        )
        self._out(Gate.NO_USE, self.predicted.chunk_s, other.predicted.chunk_s, text)

    def _is_faster(self, other: _Arm) -> bool:
        mine, theirs = self.predicted, other.predicted
        return mine.chunk_s < 0.98 * theirs.chunk_s and mine.dit_s <= theirs.dit_s * 1.001

    def is_no_worse(self, other: _Arm) -> bool:
        """Neither larger than the other one nor of more loss; never where that is not known."""
        if self.profile.loss_mean is None:
            return False
        mine, theirs = self.predicted.memory_bytes, other.predicted.memory_bytes
        smaller = (mine is None and theirs is None) or (mine is not None and theirs is not None and mine <= theirs)
        loss = other.profile.loss_mean
        return smaller and (loss is None or self.profile.loss_mean <= loss)

    def violation(self) -> float:
        """By how much, of the target, the worst missed target is missed."""
        return max((rejection.violation() for rejection in self.rejections), default=0.0)

    def violation_order(self) -> tuple[object, ...]:
        """Memory before all: an engine that runs out of it serves nobody."""
        memory = next((r.violation() for r in self.rejections if r.gate is Gate.MEMORY), 0.0)
        return memory, self.has(Gate.NO_USE), self.violation(), self.profile.loss_upper, self.predicted.chunk_s, self.id

    @property
    def worth(self) -> Worth:
        """What it is weighed by."""
        return Worth(
            loss=_loss(self),
            loss_se=self.profile.loss_se,
            chunk_s=self.predicted.chunk_s,
            memory_bytes=self.predicted.memory_bytes,
            name=self.id,
        )

    def clears(self, wanted: _Wanted, margin: float) -> bool:
        """Whether it passes by a margin, so that a change is not undone by the next chunk."""
        seen = self.predicted
        return (
            (wanted.fps is None or seen.fps_end_to_end >= wanted.fps * (1 + margin))
            and (wanted.fps_denoise is None or seen.fps_denoise >= wanted.fps_denoise * (1 + margin))
            and (wanted.first_frame_s is None or seen.first_frame_s <= wanted.first_frame_s * (1 - margin))
        )

    def switch_cost_s(self, current: _Arm) -> float:
        """Seconds of standstill; lost history counts as the time in which it was made."""
        if self.keeps_kv:
            return self.switch_s
        facts, window = self._engine.facts, current.profile.configuration.get("window")
        chunks = window / facts.chunk_latents if facts and isinstance(window, int) else USUAL_WINDOW_CHUNKS
        return self.switch_s + max(chunks, 1) * self.predicted.chunk_s

    def plan(self, chosen: _Arm | None) -> ArmPlan:
        """As it is kept and shown."""
        seen = self.predicted
        return ArmPlan(
            setting_id=self.id,
            label=self.label,
            configuration=self.profile.configuration,
            source=self.profile.source.value,
            loss_mean=self.profile.loss_mean,
            loss_upper=self.profile.loss_upper if math.isfinite(self.profile.loss_upper) else None,
            fps_denoise=seen.fps_denoise,
            fps_end_to_end=seen.fps_end_to_end,
            chunk_s=seen.chunk_s,
            first_frame_s=seen.first_frame_s if math.isfinite(seen.first_frame_s) else None,
            memory_bytes=seen.memory_bytes,
            transition=self.transition.name.lower(),
            switch_s=self.switch_s,
            keeps_kv=self.keeps_kv,
            chosen=self is chosen,
            rejections=tuple(self.rejections),
        )


def _in_order(arms: Sequence[_Arm], wanted: _Wanted) -> list[_Arm]:
    """What passes first, the best of it on top."""
    passing = [arm for arm in arms if not arm.rejections]
    failing = [arm for arm in arms if arm.rejections]
    return [
        arm
        for group in (passing, failing)
        for _, arm in sorted(
            zip(wanted.weighing.ranks(arm.worth for arm in group), group, strict=True), key=lambda pair: pair[0]
        )
    ]


def _check_use(arms: Sequence[_Arm]) -> None:
    """Compare each with the front of what passes the same gates or more, not with every other one.

    Where one is of no use because of another that is not on the front, the one on the front that is better than that
    other in every respect says so as well.
    """
    missed = {arm.id: arm.missed() for arm in arms}
    groups: dict[frozenset[Gate], list[_Arm]] = {}
    for arm in arms:
        groups.setdefault(missed[arm.id], []).append(arm)
    fronts = {gates: _front(group) for gates, group in groups.items()}
    met: dict[frozenset[Gate], list[_Arm]] = {}
    for gates in groups:
        rivals = (arm for other, front in fronts.items() if other <= gates for arm in front)
        met[gates] = sorted(rivals, key=lambda arm: arm.predicted.chunk_s)
    for arm in arms:
        arm.check_use(met[missed[arm.id]])


def _front(arms: Sequence[_Arm]) -> list[_Arm]:
    """Those of known loss than which no other is as fast or faster in both parts, as small and of as little loss."""
    front: list[_Arm] = []
    known = (arm for arm in arms if arm.profile.loss_mean is not None)
    for arm in sorted(known, key=lambda arm: (arm.predicted.chunk_s, arm.predicted.dit_s, arm.profile.loss_mean)):
        if not any(one.predicted.dit_s <= arm.predicted.dit_s and one.is_no_worse(arm) for one in front):
            front.append(arm)
    return front


def _reference(arms: Sequence[_Arm]) -> _Arm | None:
    """The setting that loses nothing, or least."""
    known = [arm for arm in arms if arm.profile.loss_mean is not None]
    return min(known, key=lambda arm: (_loss(arm), arm.profile.loss_se, -(arm.profile.motion or 0.0)), default=None)


def _loss(arm: _Arm) -> float:
    return math.inf if arm.profile.loss_mean is None else max(arm.profile.loss_mean, 0.0)
