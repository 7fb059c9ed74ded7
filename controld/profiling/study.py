"""Studies and trials as the daemon holds them: frozen values, replaced as they move on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.trial import TrialOutcome, TrialTask
from controld.profiling.outcome_json import outcome_from_document, outcome_to_document
from controld.profiling.request import KV_DEFAULTS, VIDEO_DEFAULTS, Method, StudyRequest
from controld.store.records import StudyRecord, TrialChange, TrialRecord

_DEADLINE_S = 1800.0


class StudyState(StrEnum):
    """`FINISHED`: every trial has an end and at least one taught something; `FAILED`: none did.

    `PAUSED`: nothing new is begun; what workers are at is still taken.
    """

    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_open(self) -> bool:
        """Whether it may go on."""
        return self in (StudyState.RUNNING, StudyState.PAUSED)


class TrialSource(StrEnum):
    """Why a trial was chosen.

    `GRID`: of the curated grid. Of a search: `SOBOL` to fill the space at the start, `MODEL` for what it may gain,
    `REFINE` for more segments of a part of the front, `RANDOM` by chance while the search process was away.
    """

    GRID = "grid"
    SOBOL = "sobol"
    MODEL = "model"
    REFINE = "refine"
    RANDOM = "random"


class TrialState(StrEnum):
    """`RUNNING` is true of this process only and is never stored: after a restart such a trial is pending again."""

    PENDING = "pending"
    RUNNING = "running"
    MEASURED = "measured"
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing more will come."""
        return self not in (TrialState.PENDING, TrialState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trial.

    Args:
        hardware: of the worker that measured it; empty until then.
        agent_id: who is at it; empty unless it is running.
        attempts: how often it was begun and came to nothing, in this process.
        lost_s: seconds of workers that those attempts took; kept once the trial has ended.
        outcome: the result, or the latest progress, or None.
        finished_unix_s: when it ended; 0 before.
        source: who chose it.
        search_s: its share of the seconds that choosing took.
    """

    task: TrialTask
    state: TrialState = TrialState.PENDING
    agent_id: str = ""
    attempts: int = 0
    lost_s: float = 0.0
    outcome: TrialOutcome | None = None
    hardware: str = ""
    finished_unix_s: float = 0.0
    source: TrialSource = TrialSource.GRID
    search_s: float = 0.0

    @property
    def trial_id(self) -> str:
        """Short for the task's."""
        return self.task.trial_id

    @property
    def segments_total(self) -> int:
        """How many losses there will be."""
        return len(self.task.lengths) * self.task.segments_per_length

    @property
    def segments_done(self) -> int:
        """How many there are."""
        return self.outcome.segments if self.outcome else 0

    @property
    def spent_s(self) -> float:
        """Seconds of workers so far, those of attempts that came to nothing included."""
        return self.lost_s + (self.outcome.seconds if self.outcome else 0.0)

    def to_record(self) -> TrialRecord:
        """As stored: a running trial is pending."""
        state = TrialState.PENDING if self.state is TrialState.RUNNING else self.state
        return TrialRecord(
            study_id=self.task.study_id,
            trial_id=self.trial_id,
            state=state.value,
            spec=json.dumps(self._spec()),
            result=self._result() if state.is_final else "",
            updated_unix_s=self.finished_unix_s,
        )

    def _spec(self) -> dict[str, Any]:
        spec = {"lossy": dict(self.task.lossy), "coders": list(self.task.coders)}
        if self.source is TrialSource.GRID:
            return spec
        return {
            **spec,
            "segments": self.task.segments_per_length,
            "first_segment": self.task.first_segment,
            "source": self.source.value,
            "search_s": self.search_s,
        }

    def end_record(self) -> TrialChange:
        """The end of the trial, as stored in the place of the open one."""
        return TrialChange(
            trial_id=self.trial_id,
            expected=TrialState.PENDING.value,
            state=self.state.value,
            result=self._result(),
        )

    def _result(self) -> str:
        outcome = outcome_to_document(self.outcome) if self.outcome else None
        return json.dumps({"hardware": self.hardware, "outcome": outcome, "lost_s": self.lost_s}, allow_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A request with its trials.

    Args:
        model_name, model_fingerprint: the one model that all trials are about.
        space_json: what a search searches; empty for a grid.
        hardware: only workers on this, so that a search compares times of one machine; empty for a grid.
        is_video: whether the plane makes clips; else it carries KV.
        search_note: what went otherwise than usual when trials were chosen last, in this process.
        revision: rises with every change in this process.
    """

    study_id: str
    request: StudyRequest
    state: StudyState
    created_unix_s: float
    model_name: str
    model_fingerprint: str
    trials: Mapping[str, Trial]
    space_json: str = ""
    hardware: str = ""
    is_video: bool = False
    search_note: str = ""
    revision: int = 0

    def with_trial(self, trial: Trial) -> Study:
        """The study with one trial replaced."""
        return replace(self, trials={**self.trials, trial.trial_id: trial}, revision=self.revision + 1)

    def with_trials(self, trials: Iterable[Trial]) -> Study:
        """The study with trials added or replaced."""
        changed = {trial.trial_id: trial for trial in trials}
        return replace(self, trials={**self.trials, **changed}, revision=self.revision + 1)

    def with_state(self, state: StudyState) -> Study:
        """The study in another state."""
        return replace(self, state=state, revision=self.revision + 1)

    def with_search_note(self, note: str) -> Study:
        """The study with another note; itself where the note is the same."""
        if note == self.search_note:
            return self
        return replace(self, search_note=note, revision=self.revision + 1)

    @property
    def is_search(self) -> bool:
        """Whether its trials are chosen one after another."""
        return self.request.method is Method.SEARCH

    @property
    def open_trials(self) -> tuple[Trial, ...]:
        """Those without an end."""
        return tuple(trial for trial in self.trials.values() if not trial.state.is_final)

    @property
    def natural_end(self) -> StudyState | None:
        """How the study has ended if no more trials come, or None while a trial is open."""
        states = {trial.state for trial in self.trials.values()}
        if not all(state.is_final for state in states):
            return None
        return StudyState.FINISHED if TrialState.MEASURED in states else StudyState.FAILED

    def task(
        self,
        trial_id: str,
        lossy: Configuration,
        coders: tuple[str, ...],
        *,
        segments: int | None = None,
        first_segment: int = 0,
    ) -> TrialTask:
        """A trial of this study, on as many segments as the request names unless said otherwise."""
        request = self.request
        lengths: dict[str, Any] = (
            {"clip_chunks": request.lengths}
            if self.is_video
            else {"prompt_tokens": request.lengths, "continuation_tokens": request.continuation_tokens}
        )
        return TrialTask(
            study_id=self.study_id,
            trial_id=trial_id,
            workload=request.workload,
            lossy=lossy,
            coders=coders,
            segments_per_length=request.segments if segments is None else segments,
            first_segment=first_segment,
            deadline_s=_DEADLINE_S,
            **lengths,
        )

    def to_record(self) -> StudyRecord:
        """As stored, without its trials."""
        spec = {
            "request": self.request.to_json(),
            "model_name": self.model_name,
            "model_fingerprint": self.model_fingerprint,
            "space_json": self.space_json,
            "hardware": self.hardware,
            "video": self.is_video,
        }
        return StudyRecord(
            study_id=self.study_id,
            kind=self.request.method.value,
            state=self.state.value,
            spec=json.dumps(spec),
            created_unix_s=self.created_unix_s,
        )


def study_from_records(record: StudyRecord, trial_records: tuple[TrialRecord, ...]) -> Study:
    """What was stored, back as a study.

    Raises:
        FieldError: the records are not a study's.
    """
    try:
        spec = json.loads(record.spec)
        is_video = spec.get("video", False)
        study = Study(
            study_id=record.study_id,
            request=StudyRequest.from_json(spec["request"], VIDEO_DEFAULTS if is_video else KV_DEFAULTS),
            state=StudyState(record.state),
            created_unix_s=record.created_unix_s,
            model_name=spec["model_name"],
            model_fingerprint=spec["model_fingerprint"],
            trials={},
            space_json=spec.get("space_json", ""),
            hardware=spec.get("hardware", ""),
            is_video=is_video,
        )
        trials = {row.trial_id: _trial_from_record(study, row) for row in trial_records}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FieldError(f"study {record.study_id}", f"cannot be read: {error!r}") from error
    return replace(study, trials=trials)


def _trial_from_record(study: Study, record: TrialRecord) -> Trial:
    spec = json.loads(record.spec)
    task = study.task(
        record.trial_id,
        Configuration(spec["lossy"]),
        tuple(spec["coders"]),
        segments=spec.get("segments"),
        first_segment=spec.get("first_segment", 0),
    )
    state = TrialState(record.state)
    result = json.loads(record.result) if record.result else {}
    outcome = result.get("outcome")
    return Trial(
        task=task,
        state=state,
        outcome=outcome_from_document(outcome) if outcome else None,
        hardware=result.get("hardware", ""),
        lost_s=result.get("lost_s", 0.0),
        finished_unix_s=record.updated_unix_s if state.is_final else 0.0,
        source=TrialSource(spec.get("source", TrialSource.GRID)),
        search_s=spec.get("search_s", 0.0),
    )
