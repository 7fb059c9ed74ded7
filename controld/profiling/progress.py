"""How far a study is: what it knows of each lossy part, its Pareto front, its hypervolume by trial, and when to stop.

The hypervolume is taken in a fixed box, so that it can be followed while a study runs and compared between studies:

    loss               1e-6 to 1 nat per token, logarithmic
    wire / raw bytes   0 to 1
    seconds per byte   1e-10 to 1e-7 (10 GB/s to 10 MB/s, encode and decode together), logarithmic

and for a video engine

    loss               0.01 to 1 in its own unit, logarithmic
    memory             0 to 1 of the reference setting's
    seconds per frame  1e-4 to 1 (one session, end to end), logarithmic

with the reference at 1.1 of each axis, divided by 1.1 cubed: 1 is a lossless, free coder that leaves no bytes.

A search stops by the first of these that holds (`StopReason`):

    budget         as many trials as were asked for, or as many seconds of measuring
    levelled_off   the last max(40, 25 %) measured trials raised the hypervolume by less than 0.1 % of what it is
    failing        the last 10 trials to end have all failed: something is wrong with the workers, not with the parts
    exhausted      the search has nothing left to propose
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from controld.candidates.pareto import LOSS_FLOOR_NATS, REFERENCE, hypervolume, log_objectives, non_dominated
from controld.profiling.results import observation_of
from controld.profiling.search.observation import Observation, VariantCost
from controld.profiling.study import Study, StudyState, Trial, TrialState

LEVEL_SHARE = 0.001
LEVEL_TRIALS = 40
LEVEL_TRIALS_SHARE = 0.25
FAILED_IN_A_ROW = 10

_WHOLE = math.prod(REFERENCE)


class StopReason(StrEnum):
    """Why a search ended by itself."""

    BUDGET = "budget"
    LEVELLED_OFF = "levelled_off"
    FAILING = "failing"
    EXHAUSTED = "exhausted"


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """One point of a study's front: a lossy part under one coder."""

    observation: Observation
    cost: VariantCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """In which a hypervolume is taken, on the axes of `log_objectives`.

    Args:
        loss_floor: a loss that far below nobody can tell from none.
        fastest, slowest: log10 of seconds per byte or frame.
    """

    loss_floor: float
    fastest: float
    slowest: float

    def share(self, points: list[FrontPoint]) -> float:
        """What part of the box the points dominate."""
        ideal = (math.log10(self.loss_floor), 0.0, self.fastest)
        return hypervolume(self.axes(points), ideal=ideal, nadir=(0.0, 1.0, self.slowest)) / _WHOLE

    def axes(self, points: list[FrontPoint]) -> NDArray[np.float64]:
        """`[points, 3]`."""
        return log_objectives(
            [(max(p.observation.loss, 0.0), p.cost.seconds_per_unit, p.cost.size_ratio) for p in points],
            loss_floor=self.loss_floor,
        ).reshape(-1, 3)


KV_BOX = Box(loss_floor=LOSS_FLOOR_NATS, fastest=-10.0, slowest=-7.0)
VIDEO_BOX = Box(loss_floor=0.01, fastest=-4.0, slowest=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Where the seconds went.

    Args:
        measuring_s: of all workers together, attempts that came to nothing included.
        search_s: choosing what to measure; most of it while a worker measures.
        waiting_s: of the wall clock, in which no worker measured: paused, no worker, waiting for the search.
    """

    measuring_s: float
    search_s: float
    waiting_s: float


class StudyProgress:
    """Follows one study: `follow` takes in the trials that have ended since.

    Args:
        box: where the front is looked at.
    """

    def __init__(self, box: Box = KV_BOX) -> None:
        self.box = box
        self._seen: set[str] = set()
        self._trials: dict[str, list[Trial]] = defaultdict(list)
        self._observations: dict[str, Observation] = {}
        self._front: list[FrontPoint] = []
        self._hypervolume: list[float] = []

    @property
    def observations(self) -> tuple[Observation, ...]:
        """One for each part with an ended trial, infeasible ones included."""
        return tuple(self._observations.values())

    @property
    def front(self) -> tuple[FrontPoint, ...]:
        """By loss."""
        return tuple(sorted(self._front, key=lambda p: (p.observation.loss, p.cost.size_ratio)))

    @property
    def hypervolume_by_trial(self) -> tuple[float, ...]:
        """After each measured trial, in the order in which they ended."""
        return tuple(self._hypervolume)

    @property
    def has_levelled_off(self) -> bool:
        """Whether the last trials gained next to nothing."""
        measured = len(self._hypervolume)
        window = max(LEVEL_TRIALS, math.ceil(LEVEL_TRIALS_SHARE * measured))
        if measured <= window:
            return False
        now = self._hypervolume[-1]
        return now > 0 and now - self._hypervolume[-1 - window] < LEVEL_SHARE * now

    def unseen(self, study: Study) -> int:
        """How many ended trials `follow` would take in."""
        return sum(trial.state.is_final for trial in study.trials.values()) - len(self._seen)

    def follow(self, study: Study) -> None:
        """Take in the trials that have ended since."""
        new = [t for t in study.trials.values() if t.state.is_final and t.trial_id not in self._seen]
        for trial in sorted(new, key=lambda trial: (trial.finished_unix_s, trial.trial_id)):
            self._take(study, trial)

    def _take(self, study: Study, trial: Trial) -> None:
        self._seen.add(trial.trial_id)
        part = trial.task.lossy.config_id
        self._trials[part].append(trial)
        observation = observation_of(study, self._trials[part])
        if observation is None:
            return
        known = part in self._observations
        self._observations[part] = observation
        if trial.state is not TrialState.MEASURED:
            return
        if known:
            # It may have left the front and let others in.
            self._front = self._front_of([p for one in self._observations.values() for p in _points(one)])
        else:
            self._front = self._front_of([*self._front, *_points(observation)])
        self._hypervolume.append(self.box.share(self._front))

    def _front_of(self, points: list[FrontPoint]) -> list[FrontPoint]:
        keep = non_dominated(self.box.axes(points))
        return [point for point, kept in zip(points, keep, strict=True) if kept]


def progress_of(study: Study) -> StudyProgress:
    """An empty progress for a study of this kind."""
    return StudyProgress(VIDEO_BOX if study.is_video else KV_BOX)


def stop_reason(study: Study, progress: StudyProgress) -> StopReason | None:
    """Why no more trials are to be proposed, by the trials that there are; None where that is open."""
    budget = study.request.budget
    if budget is not None and budget.trials is not None and len(study.trials) >= budget.trials:
        return StopReason.BUDGET
    if budget is not None and budget.seconds is not None and measuring_s(study) >= budget.seconds:
        return StopReason.BUDGET
    if _is_failing(study):
        return StopReason.FAILING
    return StopReason.LEVELLED_OFF if progress.has_levelled_off else None


def _is_failing(study: Study) -> bool:
    ended = sorted((t for t in study.trials.values() if t.state.is_final), key=lambda trial: trial.finished_unix_s)
    last = ended[-FAILED_IN_A_ROW:]
    return len(last) == FAILED_IN_A_ROW and all(trial.state is TrialState.FAILED for trial in last)


def end_reason(study: Study, progress: StudyProgress) -> StopReason | None:
    """Why an ended search ended; None for one that runs, was cancelled, or is no search."""
    if not study.is_search or study.state not in (StudyState.FINISHED, StudyState.FAILED):
        return None
    return stop_reason(study, progress) or StopReason.EXHAUSTED


def measuring_s(study: Study) -> float:
    """Seconds of measuring, of all workers together, of ended and running trials and of attempts that failed."""
    return sum(trial.spent_s for trial in study.trials.values())


def time_split(study: Study, now_unix_s: float) -> TimeSplit:
    """Where the seconds went until now, or until the last trial ended where the study has ended."""
    trials = study.trials.values()
    end_s = now_unix_s if study.state.is_open else max((t.finished_unix_s for t in trials), default=0.0)
    spans = [
        (ended_s - trial.spent_s, ended_s)
        for trial in trials
        if trial.spent_s
        for ended_s in (trial.finished_unix_s or now_unix_s,)
    ]
    covered_s, reached_s = 0.0, study.created_unix_s
    for start_s, stop_s in sorted(spans):
        covered_s += max(stop_s - max(start_s, reached_s), 0.0)
        reached_s = max(reached_s, stop_s)
    return TimeSplit(
        measuring_s=measuring_s(study),
        search_s=sum(trial.search_s for trial in trials),
        waiting_s=max(end_s - study.created_unix_s - covered_s, 0.0),
    )


def _points(observation: Observation) -> list[FrontPoint]:
    return [FrontPoint(observation, cost) for cost in observation.costs if cost.seconds_per_unit > 0]
