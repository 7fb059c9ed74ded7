"""What one video engine taught: its times by setting, what changes took, and which settings are out of use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from controld.candidates.video_profile import Source, VideoProfile
from controld.contract.errors import FieldError
from controld.contract.video import Applied, ChunkReport, Transition
from controld.controller.guard import Pin, PinBoard
from controld.controller.knobs.video import (
    FOREIGN_PRIORS,
    LOCAL_PRIORS,
    Corrections,
    VideoStage,
    log_ratios,
)
from controld.controller.posterior import LogRatioPosterior, StagePrior
from controld.controller.video_guard import PINNED_S, SettingEvidence, breach
from controld.controller.video_memory import MemoryExcess, memory_factor, observe_memory

MAX_SETTINGS = 4096
_SWITCH_WEIGHT = 0.3
_MACHINE_WEIGHT = 0.5
"""Of the newest chunk in the machine's level: it follows within two or three chunks, faster than a setting's own."""
_SUDDEN_LOG = 0.4
"""A chunk that is half as slow again as expected, or that much quicker. One is a stall, two in a row are a change."""
_SETTLING_CHUNKS = 8
"""What is sudden in the first chunks under a setting may be the setting; later it is the machine: the setting was there
before."""


_Stages = dict[VideoStage, LogRatioPosterior]


class EngineLessons:
    """Of one engine; changed by its reports and answers, kept as JSON.

    Attributes:
        switch_seconds, keeps_kv: what changes took, by how far they reached.
        pins: settings out of use.
        chunks: reports that taught something.
    """

    def __init__(self) -> None:
        self._stages: dict[str, _Stages] = {}
        self._evidence: dict[str, SettingEvidence] = {}
        self._machine: dict[VideoStage, float] = {}
        self._seen: dict[VideoStage, int] = {}
        self._sudden: dict[VideoStage, float] = {}
        self._running = ("", 0)
        self._memory: dict[str, MemoryExcess] = {}
        self.switch_seconds: dict[Transition, float] = {}
        self.keeps_kv: dict[Transition, bool] = {}
        self.pins = PinBoard()
        self.chunks = 0

    def observe(
        self,
        report: ChunkReport,
        profile: VideoProfile | None,
        *,
        hardware: str,
        now_unix_s: float,
        drift: float | None,
        motion: float | None,
    ) -> Pin | None:
        """Learn from a chunk.

        Args:
            profile: of the setting that it ran under; None: nothing is known of it, and only the guard learns.
            hardware: the engine's.
            drift, motion: the guard's limits; None: any.

        Returns:
            The pin, where the chunk took its setting out of use.
        """
        setting_id = report.setting_id
        if setting_id not in self._evidence and len(self._evidence) >= MAX_SETTINGS:
            return None
        self.chunks += 1
        evidence = self._evidence.get(setting_id, SettingEvidence()).observe(report)
        self._evidence[setting_id] = evidence
        if profile is not None and not report.has_nan:
            self._learn_times(report, profile, hardware, now_unix_s)
            excess = observe_memory(self._memory.get(setting_id), profile, report, now_unix_s)
            if excess is not None:
                self._memory[setting_id] = excess
        reason = "a chunk was not finite" if report.has_nan else breach(evidence, profile, drift=drift, motion=motion)
        if not reason or self.pins.at(now_unix_s).reason(setting_id, ""):
            return None
        # Old evidence must not take it out again as soon as it is back.
        self._evidence[setting_id] = SettingEvidence()
        return self.pin(setting_id, reason, now_unix_s)

    def pin(self, setting_id: str, reason: str, now_unix_s: float) -> Pin:
        """Take a setting out of use for a while."""
        pin = Pin(arm_id=setting_id, reason=reason, since_unix_s=now_unix_s, until_unix_s=now_unix_s + PINNED_S)
        self.pins = self.pins.at(now_unix_s).with_pin(pin)
        return pin

    def release(self, setting_id: str, now_unix_s: float) -> Pin | None:
        """A person's word that a setting may be used again; the pin that there was."""
        board = self.pins.at(now_unix_s)
        found = next((pin for pin in board.pins if pin.arm_id == setting_id), None)
        self.pins = board.without([setting_id])
        return found

    def _learn_times(self, report: ChunkReport, profile: VideoProfile, hardware: str, now_unix_s: float) -> None:
        """Tell what the machine does to every setting from what is a setting's own.

        The machine's level follows quickly, so that a setting that has not run for long is not taken to be as fast as
        the machine was then; what stays when it has moved is the setting's. Only their sum is seen while one setting
        runs, so that what is put down to the wrong one stays there. A chunk that is suddenly slow therefore teaches
        nothing unless the next one is, too; then it is the setting where that was changed just before and decoding is
        as quick as ever, and else the machine. The first chunk under a setting says what the change cost (compiled
        code, cold caches), and nothing else.
        """
        running, made = self._running
        made = made + 1 if running == profile.setting_id else 1
        self._running = profile.setting_id, made
        if made == 1:
            return
        stages = self._stages.setdefault(profile.setting_id, {})
        priors = priors_of(profile, hardware)
        expected = self._corrections(profile, hardware, now_unix_s)
        ratios = log_ratios(profile, report, expected)
        surprises = {stage: ratio - expected[stage].mean_log for stage, ratio in ratios.items()}
        slows_all = _is_sudden(*(surprises.get(stage, 0.0) for stage in (VideoStage.FORWARD, VideoStage.VAE)))
        for stage, ratio in ratios.items():
            if stage is VideoStage.CHUNK and report.session_chunk == 0:
                continue  # nothing overlaps a session's first chunk
            posterior = stages.get(stage) or LogRatioPosterior.fresh(priors[stage])
            seen, level, surprise = self._seen.get(stage, 0), self._machine.get(stage, 0.0), surprises[stage]
            # A level that rests on a few chunks is as likely to be wrong as the setting is.
            is_the_machine = made > _SETTLING_CHUNKS or seen <= _SETTLING_CHUNKS or slows_all
            before = self._sudden.get(stage, 0.0)
            is_sudden = seen > 0 and _is_sudden(surprise)
            self._sudden[stage] = surprise if is_sudden else 0.0
            if is_sudden and before * surprise <= 0:
                continue
            if not is_sudden:
                level += max(_MACHINE_WEIGHT, 1.0 / (seen + 1)) * surprise
            elif is_the_machine:
                level += math.copysign(min(abs(before), abs(surprise)), surprise)
            self._machine[stage], self._seen[stage] = level, seen + 1
            if not (is_sudden and is_the_machine):
                stages[stage] = posterior.observe(ratio - level, now_unix_s)

    def corrections(self, profiles: Iterable[VideoProfile], hardware: str, now_unix_s: float) -> dict[str, Corrections]:
        """What is known of each setting's times; of one that never ran, what the machine does to all."""
        untried: dict[bool, Corrections] = {}
        found = {}
        for profile in profiles:
            at_home = priors_of(profile, hardware) is LOCAL_PRIORS
            if profile.setting_id in self._stages:
                found[profile.setting_id] = self._corrections(profile, hardware, now_unix_s)
                continue
            if at_home not in untried:
                untried[at_home] = self._corrections(profile, hardware, now_unix_s)
            found[profile.setting_id] = untried[at_home]
        return found

    def memory_factors(self, profiles: Iterable[VideoProfile], now_unix_s: float) -> dict[str, float]:
        """What each setting's memory is to be multiplied by; of one that never ran, the least of those that did.

        What all of them need beyond their profiles is the engine's own, and another setting will need it, too.
        """
        found = {
            each.setting_id: memory_factor(self._memory.get(each.setting_id), each, now_unix_s) for each in profiles
        }
        shared = min((factor for factor in found.values() if factor is not None), default=1.0)
        return {setting_id: shared if factor is None else factor for setting_id, factor in found.items()}

    def _corrections(self, profile: VideoProfile, hardware: str, now_unix_s: float) -> Corrections:
        stages, priors = self._stages.get(profile.setting_id, {}), priors_of(profile, hardware)
        found = {}
        for stage in VideoStage:
            own = (stages.get(stage) or LogRatioPosterior.fresh(priors[stage])).correction(now_unix_s)
            found[stage] = replace(own, mean_log=own.mean_log + self._machine.get(stage, 0.0))
        return found

    def applied(self, answer: Applied) -> None:
        """Learn what a change took."""
        if answer.refused or answer.transition is Transition.NONE:
            return
        before = self.switch_seconds.get(answer.transition)
        step = 0.0 if before is None else answer.seconds - before
        self.switch_seconds[answer.transition] = answer.seconds if before is None else before + _SWITCH_WEIGHT * step
        self.keeps_kv[answer.transition] = answer.keeps_kv

    def to_document(self) -> dict[str, Any]:
        """JSON-ready; the guard's evidence starts afresh in another process."""
        return {
            "stages": {
                name: {stage.value: posterior.to_list() for stage, posterior in stages.items()}
                for name, stages in self._stages.items()
            },
            "memory": {
                name: [excess.log_factor, excess.profile_bytes, excess.at_unix_s]
                for name, excess in self._memory.items()
            },
            "machine": {stage.value: [level, self._seen[stage]] for stage, level in self._machine.items()},
            "switch_seconds": {reach.name.lower(): seconds for reach, seconds in self.switch_seconds.items()},
            "keeps_kv": {reach.name.lower(): keeps for reach, keeps in self.keeps_kv.items()},
            "pins": self.pins.to_json(),
            "chunks": self.chunks,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> EngineLessons:
        """The inverse of `to_document`. Raises: FieldError."""
        lessons = cls()
        try:
            for name, stages in document["stages"].items():
                lessons._stages[name] = {
                    VideoStage(stage): LogRatioPosterior.from_list(values) for stage, values in stages.items()
                }
            for stage, (level, seen) in document["machine"].items():
                lessons._machine[VideoStage(stage)] = _finite(level)
                lessons._seen[VideoStage(stage)] = int(seen)
            # Records of an earlier release have none.
            for name, (log_factor, profile_bytes, at_unix_s) in document.get("memory", {}).items():
                lessons._memory[name] = MemoryExcess(
                    log_factor=log_factor, profile_bytes=profile_bytes, at_unix_s=at_unix_s
                )
            for reach, seconds in document["switch_seconds"].items():
                lessons.switch_seconds[Transition[reach.upper()]] = _finite(seconds)
            for reach, keeps in document["keeps_kv"].items():
                lessons.keeps_kv[Transition[reach.upper()]] = bool(keeps)
            lessons.pins = PinBoard.from_json(document["pins"])
            lessons.chunks = int(document["chunks"])
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise FieldError("video_lessons", f"not what an engine taught: {error}") from error
        return lessons


def _is_sudden(*surprises: float) -> bool:
    """Whether all of these log ratios are far off, and on one side."""
    return min(surprises) > _SUDDEN_LOG or max(surprises) < -_SUDDEN_LOG


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise FieldError("video_lessons", f"{value} is not finite")
    return float(value)


def priors_of(profile: VideoProfile, hardware: str) -> Mapping[VideoStage, StagePrior]:
    """How far a profile's times are trusted on an engine's hardware before it ran."""
    at_home = profile.source is Source.MEASURED and profile.hardware == hardware
    return LOCAL_PRIORS if at_home else FOREIGN_PRIORS
