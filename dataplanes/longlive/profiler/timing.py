"""What an engine takes and holds under one setting: some chunks of a session, and a second session beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from controld.contract.configuration import Configuration
from controld.contract.trial import EngineMeasurement
from controld.contract.video import ChunkReport, MemorySplit
from dataplanes.longlive.engine import LoadSpec, SessionSpec, VideoEngine

PROMPT = "a red square moves sideways"

WARM_CHUNKS = 2
TIMED_CHUNKS = 6
"""With the warm ones, enough to fill the largest window."""

_CHUNKS = WARM_CHUNKS + TIMED_CHUNKS
_LEAST_FRAMES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingTimes:
    """One setting at work.

    Args:
        reports: of the timed chunks.
        close_s: seconds of closing the session: what was not decoded before is decoded there.
        memory: with one session.
        memory_of_two: with a second one.
        frames_per_chunk: of the engine.
    """

    reports: tuple[ChunkReport, ...]
    close_s: float
    memory: MemorySplit
    memory_of_two: MemorySplit
    frames_per_chunk: int

    @property
    def forward_s(self) -> float:
        """Of the least disturbed chunk: what else the machine does is learned while serving, not profiled."""
        return min(report.dit_s / (len(report.denoise_s) + 1) for report in self.reports)

    @property
    def vae_s(self) -> float:
        """Of the least disturbed chunk; where nothing was decoded before the end, what a chunk took there."""
        decoded = [report.vae_s for report in self.reports if report.vae_s > 0]
        return min(decoded) if decoded else self.close_s / _CHUNKS

    @property
    def drift(self) -> float:
        """The mean over chunks."""
        return statistics.fmean(report.drift for report in self.reports)

    @property
    def flicker(self) -> float | None:
        """The mean over chunks; None where none brought frames."""
        # Frames of a chunk may come with a later one: a report that brought none says nothing of motion.
        seen = [report.flicker for report in self.reports if report.frames >= _LEAST_FRAMES]
        return statistics.fmean(seen) if seen else None

    def measurement(self, variant: str, *, reference_bytes: int, motion: float | None) -> EngineMeasurement:
        """As a trial's result."""
        return EngineMeasurement(
            variant=variant,
            forward_s=self.forward_s,
            vae_s=self.vae_s,
            frames_per_chunk=self.frames_per_chunk,
            memory=self.memory,
            session_bytes=max(total_bytes(self.memory_of_two) - total_bytes(self.memory) - self.memory.kv_bytes, 0),
            reference_bytes=reference_bytes,
            drift=self.drift,
            motion=motion,
        )


def time_setting(
    engine: VideoEngine,
    configuration: Configuration,
    checkpoint: str,
    between: Callable[[], None] = lambda: None,
) -> SettingTimes:
    """Load, make some chunks of one session, then of a second one, unload.

    Args:
        engine: nothing is loaded in it.
        between: called before each chunk; what it raises ends the measurement.

    Raises:
        EngineError: the setting is refused.
    """
    engine.load(LoadSpec(checkpoint=checkpoint, setting=configuration))
    try:
        engine.open(SessionSpec(session_id="profile", prompt=PROMPT, seed=1, chunks=_CHUNKS))
        reports = _chunks(engine, "profile", between)
        engine.open(SessionSpec(session_id="second", prompt=PROMPT, seed=2, chunks=_CHUNKS))
        second = _chunks(engine, "second", between)
        begin_s = time.perf_counter()
        engine.close("profile")
        close_s = time.perf_counter() - begin_s
    finally:
        engine.unload()
    return SettingTimes(
        reports=tuple(reports[WARM_CHUNKS:]),
        close_s=close_s,
        memory=reports[-1].memory,
        memory_of_two=second[-1].memory,
        frames_per_chunk=engine.capabilities().frames_per_chunk,
    )


def _chunks(engine: VideoEngine, session_id: str, between: Callable[[], None]) -> list[ChunkReport]:
    reports = []
    for _ in range(_CHUNKS):
        between()
        reports.append(engine.step(session_id).report)
    return reports


def total_bytes(memory: MemorySplit) -> int:
    """What is held in all."""
    return memory.weights_bytes + memory.kv_bytes + memory.activation_bytes
