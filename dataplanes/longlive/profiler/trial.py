"""One trial of a video engine: a setting's loss on every clip, and what each of its variants takes and holds.

The loss of a clip is paired: its error under the setting less its error under the reference setting, from the same
prompt and the same noise, so that the reference loses exactly nothing. Reference errors are measured once and kept.

A trial ends as `INFEASIBLE` where the engine refuses the setting or there is no such corpus: that is knowledge. It ends
as `FAILED` where something went wrong: the daemon may ask again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from statistics import fmean

from controld.contract.configuration import Configuration
from controld.contract.errors import ControldError, FieldError
from controld.contract.space import StrategySpace
from controld.contract.trial import ClipLoss, EngineMeasurement, TrialOutcome, TrialStatus, TrialTask
from controld.contract.variant import with_variant
from dataplanes.agent.profiling_worker import TrialCancelledError
from dataplanes.agent.trials import Cancelled, Progress
from dataplanes.longlive.engine import EngineError, VideoEngine
from dataplanes.longlive.profiler.timing import SettingTimes, time_setting, total_bytes
from dataplanes.longlive.reference.quality import SEED, QualityMeter, SegmentLoss, corpus_digest
from dataplanes.longlive.reference.setting import FULL
from dataplanes.longlive.reference.shapes import WORLD_VERSION

_log = logging.getLogger(__name__)

WORKLOAD = "shapes"
"""The one corpus: clips of the toy world that training held out."""
CORPUS = f"toy world {WORLD_VERSION}, held-out shapes, seed {SEED}, {corpus_digest()}"

_REFUSALS = frozenset({"engine.refused", "engine.out_of_memory", "engine.not_finite"})
"""What follows from the setting; anything else that an engine says may be chance."""


class VideoTrialRunner:
    """Measures trials one after another; nothing that a trial does ends the process.

    Args:
        space: what the worker advertises; a trial outside of it is infeasible.
        new_engine: an engine with nothing loaded.
        meter: of quality.
        checkpoint: whose weights are measured.
    """

    def __init__(
        self, space: StrategySpace, new_engine: Callable[[], VideoEngine], meter: QualityMeter, checkpoint: str
    ) -> None:
        self.space = space
        self.meter = meter
        self._new_engine = new_engine
        self._checkpoint = checkpoint
        self._reference_clips: dict[tuple[int, int], SegmentLoss] = {}
        self._reference_times: SettingTimes | None = None

    def run(
        self,
        task: TrialTask,
        progress: Progress = lambda outcome: None,
        cancelled: Cancelled = lambda: False,
    ) -> TrialOutcome:
        """Measure a trial. Progress carries the losses measured so far."""
        run = _Run(self, task, progress, cancelled)
        try:
            run.measure()
        except TrialCancelledError as error:
            return run.outcome(TrialStatus.CANCELLED, str(error))
        except FieldError as error:
            return run.outcome(TrialStatus.INFEASIBLE, f"{error.code}: {error}")
        except ControldError as error:
            is_refusal = isinstance(error, EngineError) and error.code in _REFUSALS
            return run.outcome(TrialStatus.INFEASIBLE if is_refusal else TrialStatus.FAILED, f"{error.code}: {error}")
        except Exception as error:  # noqa: BLE001 - the edge of a trial: whatever an engine does, the worker lives on
            _log.exception("trial %s failed", task.trial_id)
            return run.outcome(TrialStatus.FAILED, f"{type(error).__name__}: {error}")
        return run.outcome(TrialStatus.MEASURED)

    def time(self, configuration: Configuration, between: Callable[[], None]) -> SettingTimes:
        """Raises: EngineError."""
        return time_setting(self._new_engine(), configuration, self._checkpoint, between)

    def reference_times(self, between: Callable[[], None]) -> SettingTimes:
        """Of the reference setting. Raises: EngineError."""
        if self._reference_times is None:
            self._reference_times = self.time(FULL, between)
        return self._reference_times

    def reference_clip(self, segment: int, chunks: int) -> SegmentLoss:
        """A clip under the reference setting. Raises: EngineError."""
        place = segment, chunks
        if place not in self._reference_clips:
            self._reference_clips[place] = self.meter.under(FULL).measure(segment, chunks)
        return self._reference_clips[place]


class _Run:
    """The state of one trial while it is measured."""

    def __init__(self, runner: VideoTrialRunner, task: TrialTask, progress: Progress, cancelled: Cancelled) -> None:
        self._runner = runner
        self._task = task
        self._progress = progress
        self._cancelled = cancelled
        self._started_s = time.monotonic()
        self._clips: list[ClipLoss] = []
        self._motion_kept: list[float] = []
        self._engine: list[EngineMeasurement] = []

    def outcome(self, status: TrialStatus, detail: str = "") -> TrialOutcome:
        """What there is so far, under this status."""
        return TrialOutcome(
            study_id=self._task.study_id,
            trial_id=self._task.trial_id,
            status=status,
            detail=detail,
            clips=tuple(self._clips),
            engine=tuple(self._engine),
            seconds=time.monotonic() - self._started_s,
            corpus=CORPUS,
        )

    def measure(self) -> None:
        """Fill in the losses, short clips first, and the costs. Raises: ControldError."""
        task = self._task
        if not task.clip_chunks:
            raise FieldError("trial.clip_chunks", "is empty", hint="this worker measures clips, not prompts")
        if task.workload != WORKLOAD:
            raise FieldError("trial.workload", f"there are no clips of {task.workload!r}", hint=f"workload: {WORKLOAD}")
        variants = {name: with_variant(task.lossy, name) for name in task.coders}
        for configuration in variants.values():
            self._runner.space.validate(configuration)
        self._measure_clips(next(iter(variants.values())))
        for name, configuration in variants.items():
            self._measure_engine(name, configuration)

    def _measure_clips(self, configuration: Configuration) -> None:
        """Quality, which the lossless parameters have no part in."""
        quality = self._runner.meter.under(configuration)
        first = self._task.first_segment
        for chunks in sorted(self._task.clip_chunks):
            for segment in range(first, first + self._task.segments_per_length):
                self._look()
                reference = self._runner.reference_clip(segment, chunks)
                made = reference if self._is_reference else quality.measure(segment, chunks)
                self._clips.append(ClipLoss(chunks=chunks, segment=segment, loss=made.loss - reference.loss))
                if reference.flicker > 0:
                    self._motion_kept.append(made.flicker / reference.flicker)
                self._progress(self.outcome(TrialStatus.PROGRESS))

    def _measure_engine(self, name: str, configuration: Configuration) -> None:
        """Motion is in the unit of a chunk report's flicker, so that a guard can compare: the reference setting's
        flicker on the timed clip, times how much of its flicker this setting keeps on the clips."""
        reference = self._runner.reference_times(self._look)
        times = reference if configuration == FULL else self._runner.time(configuration, self._look)
        motion = reference.flicker
        if motion is not None and self._motion_kept:
            motion *= fmean(self._motion_kept)
        reference_bytes = total_bytes(reference.memory)
        self._engine.append(times.measurement(name, reference_bytes=reference_bytes, motion=motion))

    @property
    def _is_reference(self) -> bool:
        return all(FULL.get(name) == value for name, value in self._task.lossy.items())

    def _look(self) -> None:
        if self._cancelled():
            raise TrialCancelledError
