"""Studies and trials as the daemon holds them: frozen values, replaced as they move on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.trial import TrialOutcome, TrialTask
from controld.profiling.grid import GridSize
from controld.profiling.outcome_json import outcome_from_document, outcome_to_document
from controld.store.records import StudyRecord, TrialRecord

KIND = "grid"
DEFAULT_PROMPT_TOKENS = (256, 1024, 2048)
_MAX_LENGTHS = 8
_MAX_PROMPT_TOKENS = 1_000_000
_MAX_SEGMENTS = 1_000
_DEADLINE_S = 1800.0


class StudyState(StrEnum):
    """`FINISHED`: every trial has an end and at least one taught something; `FAILED`: none did."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


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
class StudyRequest:
    """What somebody asks for.

    Args:
        plane: kind of data plane.
        workload: whose texts are measured on and whose profiles these become.
        grid: which curated grid.
        segments: per prompt length.
        lengths: prompt lengths in tokens.
        deployment: only profilers of this deployment; empty: any.
        model: only this model fingerprint; empty: the one that the profilers have.
        continuation_tokens: over how many tokens the loss is meant.
    """

    plane: str
    workload: str
    grid: GridSize = GridSize.FULL
    segments: int = 8
    lengths: tuple[int, ...] = DEFAULT_PROMPT_TOKENS
    deployment: str = ""
    model: str = ""
    continuation_tokens: int = 128

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> StudyRequest:
        """Read a request strictly.

        Raises:
            FieldError: a field is unknown, missing or out of range; it is named.
        """
        known = {field.name for field in fields(cls)}
        for name in body:
            if name not in known:
                raise FieldError(name, "unknown field", hint=f"one of {sorted(known)}")
        for name in ("plane", "workload"):
            if not _is_name(body.get(name)):
                raise FieldError(name, "must be a name")
        for name in ("deployment", "model"):
            if name in body and not isinstance(body[name], str):
                raise FieldError(name, f"{body[name]!r} is not text")
        values = dict(body)
        if "grid" in values:
            if values["grid"] not in list(GridSize):
                raise FieldError("grid", f"{values['grid']!r} is no grid", hint=f"one of {[g.value for g in GridSize]}")
            values["grid"] = GridSize(values["grid"])
        for name in ("segments", "continuation_tokens"):
            if name in values:
                _require_count(name, values[name], _MAX_SEGMENTS)
        if "lengths" in values:
            lengths = values["lengths"]
            if not isinstance(lengths, list) or not 1 <= len(lengths) <= _MAX_LENGTHS:
                raise FieldError("lengths", f"must be a list of 1 to {_MAX_LENGTHS} prompt lengths")
            for length in lengths:
                _require_count("lengths", length, _MAX_PROMPT_TOKENS)
            values["lengths"] = tuple(sorted(set(lengths)))
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {
            "plane": self.plane,
            "workload": self.workload,
            "grid": self.grid.value,
            "segments": self.segments,
            "lengths": list(self.lengths),
            "deployment": self.deployment,
            "model": self.model,
            "continuation_tokens": self.continuation_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trial.

    Args:
        hardware: of the worker that measured it; empty until then.
        agent_id: who is at it; empty unless it is running.
        attempts: how often it was begun and came to nothing, in this process.
        outcome: the result, or the latest progress, or None.
        finished_unix_s: when it ended; 0 before.
    """

    task: TrialTask
    state: TrialState = TrialState.PENDING
    agent_id: str = ""
    attempts: int = 0
    outcome: TrialOutcome | None = None
    hardware: str = ""
    finished_unix_s: float = 0.0

    @property
    def trial_id(self) -> str:
        """Short for the task's."""
        return self.task.trial_id

    @property
    def segments_total(self) -> int:
        """How many losses there will be."""
        return len(self.task.prompt_tokens) * self.task.segments_per_length

    @property
    def segments_done(self) -> int:
        """How many there are."""
        return len(self.outcome.losses) if self.outcome else 0

    def to_record(self) -> TrialRecord:
        """As stored: a running trial is pending."""
        state = TrialState.PENDING if self.state is TrialState.RUNNING else self.state
        return TrialRecord(
            study_id=self.task.study_id,
            trial_id=self.trial_id,
            state=state.value,
            spec=json.dumps({"lossy": dict(self.task.lossy), "coders": list(self.task.coders)}),
            result=self.result_json() if state.is_final else "",
            updated_unix_s=self.finished_unix_s,
        )

    def result_json(self) -> str:
        """The end of the trial, as stored."""
        outcome = outcome_to_document(self.outcome) if self.outcome else None
        return json.dumps({"hardware": self.hardware, "outcome": outcome}, allow_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A request with its trials.

    Args:
        model_name, model_fingerprint: the one model that all trials are about.
        revision: rises with every change in this process.
    """

    study_id: str
    request: StudyRequest
    state: StudyState
    created_unix_s: float
    model_name: str
    model_fingerprint: str
    trials: Mapping[str, Trial]
    revision: int = 0

    def with_trial(self, trial: Trial) -> Study:
        """The study with one trial replaced."""
        return replace(self, trials={**self.trials, trial.trial_id: trial}, revision=self.revision + 1)

    def with_state(self, state: StudyState) -> Study:
        """The study in another state."""
        return replace(self, state=state, revision=self.revision + 1)

    @property
    def natural_end(self) -> StudyState | None:
        """How the study has ended by itself, or None while a trial is open."""
        states = {trial.state for trial in self.trials.values()}
        if not all(state.is_final for state in states):
            return None
        return StudyState.FINISHED if TrialState.MEASURED in states else StudyState.FAILED

    def task(self, trial_id: str, lossy: Configuration, coders: tuple[str, ...]) -> TrialTask:
        """A trial of this study."""
        return TrialTask(
            study_id=self.study_id,
            trial_id=trial_id,
            workload=self.request.workload,
            lossy=lossy,
            coders=coders,
            prompt_tokens=self.request.lengths,
            segments_per_length=self.request.segments,
            continuation_tokens=self.request.continuation_tokens,
            deadline_s=_DEADLINE_S,
        )

    def to_record(self) -> StudyRecord:
        """As stored, without its trials."""
        spec = {
            "request": self.request.to_json(),
            "model_name": self.model_name,
            "model_fingerprint": self.model_fingerprint,
        }
        return StudyRecord(
            study_id=self.study_id,
            kind=KIND,
            state=self.state.value,
            spec=json.dumps(spec),
            created_unix_s=self.created_unix_s,
        )


def study_from_records(record: StudyRecord, trial_records: tuple[TrialRecord, ...]) -> Study:
    """What was stored, back as a study.

    Raises:
        FieldError: the records are not a grid study's.
    """
    try:
        spec = json.loads(record.spec)
        study = Study(
            study_id=record.study_id,
            request=StudyRequest.from_json(spec["request"]),
            state=StudyState(record.state),
            created_unix_s=record.created_unix_s,
            model_name=spec["model_name"],
            model_fingerprint=spec["model_fingerprint"],
            trials={},
        )
        trials = {row.trial_id: _trial_from_record(study, row) for row in trial_records}
    except (ValueError, KeyError, TypeError) as error:
        raise FieldError(f"study {record.study_id}", f"cannot be read: {error!r}") from error
    return replace(study, trials=trials)


def _trial_from_record(study: Study, record: TrialRecord) -> Trial:
    spec = json.loads(record.spec)
    task = study.task(record.trial_id, Configuration(spec["lossy"]), tuple(spec["coders"]))
    state = TrialState(record.state)
    result = json.loads(record.result) if record.result else {}
    outcome = result.get("outcome")
    return Trial(
        task=task,
        state=state,
        outcome=outcome_from_document(outcome) if outcome else None,
        hardware=result.get("hardware", ""),
        finished_unix_s=record.updated_unix_s if state.is_final else 0.0,
    )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value) and len(value) <= 100


def _require_count(name: str, value: object, largest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest or not math.isfinite(value):
        raise FieldError(name, f"{value!r} is not a whole number from 1 to {largest}")
