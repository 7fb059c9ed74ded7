"""Studies over the connected profiling workers: durable, resumed after any crash, watched while they run.

What is stored is enough to go on: a study with its trials, and every trial's end with its result. Which worker is at
which trial is known to this process only; after a restart the open trials are simply asked for again, and a worker that
is still at one, or has finished it meanwhile, says so instead of measuring twice. Profiles are stored before the trial
that gave them is marked as measured, so a crash between the two repeats the trial and loses nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

from controld.candidates.distill import distill
from controld.candidates.measurement import TrialMeasurement
from controld.candidates.profile import Profile
from controld.contract.clock import Clock
from controld.contract.errors import ControldError, FieldError
from controld.contract.space import StrategySpace
from controld.contract.trial import TrialOutcome, TrialStatus
from controld.fleet.errors import FleetError
from controld.fleet.session import AgentSession
from controld.profiling.dispatch import Assignment, Plan, TrialKey, after_giving_up, plan_assignments
from controld.profiling.grid import curated_grid
from controld.profiling.profilers import Profiler, TrialFleet, profilers_among
from controld.profiling.study import Study, StudyRequest, StudyState, Trial, TrialState, study_from_records
from controld.profiling.study_view import study_summary, study_view
from controld.store.errors import StoreError
from controld.store.interface import Store
from controld.store.records import AuditEvent, ProfileKey, ProfileRecord

_log = logging.getLogger(__name__)

Json = dict[str, Any]
OnProfiles = Callable[[], None]

_REVIEW_S = 2.0

_END_OF = {
    TrialStatus.MEASURED: TrialState.MEASURED,
    TrialStatus.INFEASIBLE: TrialState.INFEASIBLE,
    TrialStatus.CANCELLED: TrialState.CANCELLED,
}


class StudyNotFoundError(ControldError):
    """There is no such study."""

    def __init__(self, study_id: str) -> None:
        super().__init__(f"there is no study {study_id}", code="study.not_found", hint="GET /v1/studies lists them")


class StudyRefusedError(ControldError):
    """The study cannot be started now. Codes: `study.no_profiler`, `study.ambiguous_model`."""


def _ignore_profiles() -> None:
    """Nobody asked."""


class StudyService:
    """Starts, watches and cancels studies. One event loop; no method blocks it.

    Args:
        store: where studies, trials and profiles live.
        fleet: the workers.
        clock: for ages and dates.
        on_profiles: called once new or changed profiles are durable.
        review_s: how often assignments are looked at without any cause.
    """

    def __init__(
        self,
        store: Store,
        fleet: TrialFleet,
        clock: Clock,
        *,
        on_profiles: OnProfiles = _ignore_profiles,
        review_s: float = _REVIEW_S,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._clock = clock
        self._on_profiles = on_profiles
        self._review_s = review_s
        self._studies: dict[str, Study] = {}
        self._assignments: dict[TrialKey, Assignment] = {}
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()
        self._loop: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Read what is stored and go on with what is open. A record that cannot be read is logged and left alone.

        Raises:
            StoreError: the studies cannot be read.
        """
        for record in await self._store.studies.list():
            try:
                study = study_from_records(record, await self._store.studies.trials(record.study_id))
            except FieldError as error:
                _log.error("study left alone: %s", error)
                continue
            self._studies[study.study_id] = study
        self._loop = asyncio.get_running_loop().create_task(self._run(), name="studies")

    async def stop(self) -> None:
        """Stop giving out work; what workers are at goes on, and is taken by the next process."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
            self._loop = None

    async def _run(self) -> None:
        while True:
            try:
                await self.dispatch()
            except StoreError as error:
                _log.error("studies wait: %s", error)
            try:
                async with asyncio.timeout(self._review_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def dispatch(self) -> None:
        """One review: give up what is lost, ask again, start what is next."""
        async with self._lock:
            plan = plan_assignments(
                self._studies.values(),
                self._assignments.values(),
                profilers_among(self._fleet.sessions()),
                self._clock.monotonic_s(),
            )
            await self._apply(plan)
            await self._settle()

    async def _apply(self, plan: Plan) -> None:
        self._assignments = {assignment.key: assignment for assignment in plan.kept}
        for assignment, reason in plan.given_up:
            _log.warning("trial %s of %s came to nothing: %s", assignment.trial_id, assignment.study_id, reason)
            self._cancel_at_worker(assignment)
            await self._give_up(assignment.key, reason)
        for assignment in plan.asked_again:
            self._ask(assignment, self._studies[assignment.study_id].trials[assignment.trial_id])
        for assignment, _ in plan.started:
            study = self._studies[assignment.study_id]
            trial = replace(
                study.trials[assignment.trial_id], state=TrialState.RUNNING, agent_id=assignment.agent_id, outcome=None
            )
            if self._ask(assignment, trial):
                self._assignments[assignment.key] = assignment
                self._replace(study.with_trial(trial))
        if plan.given_up:
            self._wake.set()

    def _ask(self, assignment: Assignment, trial: Trial) -> bool:
        try:
            self._fleet.request_trial(assignment.agent_id, trial.task)
        except FleetError as error:
            _log.info("trial %s waits: %s", assignment.trial_id, error)
            return False
        return True

    def _cancel_at_worker(self, assignment: Assignment) -> None:
        try:
            self._fleet.cancel_trial(assignment.agent_id, assignment.study_id, assignment.trial_id)
        except FleetError:
            pass  # it is gone, and the trial with it

    # ------------------------------------------------------------------------------------------ what workers say

    async def on_session(self, session: AgentSession) -> None:
        """A worker came or went."""
        if profilers_among([session]) or any(a.agent_id == session.agent_id for a in self._assignments.values()):
            self._wake.set()

    async def on_trial_result(self, session: AgentSession, outcome: TrialOutcome) -> None:
        """Progress or the end of a trial. Late, repeated and unknown results change nothing."""
        async with self._lock:
            study = self._studies.get(outcome.study_id)
            trial = study.trials.get(outcome.trial_id) if study else None
            if study is None or trial is None:
                _log.info("result of the unknown trial %s/%s", outcome.study_id, outcome.trial_id)
                return
            key = (outcome.study_id, outcome.trial_id)
            if outcome.status is not TrialStatus.PROGRESS:
                self._drop_assignment(key, session.agent_id)
            if trial.state.is_final:
                return
            if outcome.status is TrialStatus.PROGRESS:
                if trial.state is TrialState.RUNNING and trial.agent_id == session.agent_id:
                    self._replace(study.with_trial(replace(trial, outcome=outcome)))
                return
            try:
                await self._take_end(study, trial, outcome, session.identity.hardware)
                await self._settle()
            except StoreError as error:
                # Asked again, the worker answers with what it has measured.
                _log.error("result of trial %s of %s not kept: %s", *reversed(key), error)
                self._replace(study.with_trial(replace(trial, state=TrialState.PENDING, agent_id="")))

    async def _take_end(self, study: Study, trial: Trial, outcome: TrialOutcome, hardware: str) -> None:
        key = (study.study_id, trial.trial_id)
        if outcome.status is TrialStatus.FAILED:
            _log.warning("trial %s of %s failed: %s", *reversed(key), outcome.detail)
            await self._give_up(key, outcome.detail)
        elif outcome.status is TrialStatus.CANCELLED and study.state is StudyState.RUNNING:
            await self._give_up(key, "the worker gave it up")
        else:
            await self._end_trial(study, trial, outcome, hardware)

    def _drop_assignment(self, key: TrialKey, agent_id: str) -> None:
        assignment = self._assignments.get(key)
        if assignment is not None and assignment.agent_id == agent_id:
            del self._assignments[key]
        self._wake.set()

    async def _end_trial(self, study: Study, trial: Trial, outcome: TrialOutcome, hardware: str) -> None:
        ended = replace(
            trial,
            state=_END_OF[outcome.status],
            agent_id="",
            outcome=outcome,
            hardware=hardware,
            finished_unix_s=self._clock.unix_s(),
        )
        profiles: tuple[Profile, ...] = ()
        if ended.state is TrialState.MEASURED:
            profiles = self._distill(study.with_trial(ended), ended)
            await self._store.profiles.upsert([_profile_record(profile) for profile in profiles])
        await self._store_end(ended)
        self._replace(study.with_trial(ended))
        if profiles:
            self._on_profiles()

    async def _give_up(self, key: TrialKey, reason: str) -> None:
        study = self._studies[key[0]]
        trial = study.trials[key[1]]
        if trial.state.is_final:
            return
        tried = after_giving_up(trial, reason)
        if tried.state.is_final:
            tried = replace(tried, finished_unix_s=self._clock.unix_s())
            await self._store_end(tried)
        self._replace(study.with_trial(tried))

    async def _store_end(self, trial: Trial) -> None:
        await self._store.studies.transition_trial(
            trial.task.study_id,
            trial.trial_id,
            expected=TrialState.PENDING.value,
            state=trial.state.value,
            result=trial.result_json(),
        )

    async def _settle(self) -> None:
        """Close the studies whose trials have all ended."""
        for study in list(self._studies.values()):
            end = study.natural_end
            if study.state is StudyState.RUNNING and end is not None:
                await self._store.studies.transition(study.study_id, expected=study.state.value, state=end.value)
                self._replace(study.with_state(end))
                await self._audit(AuditEvent.STUDY_ENDED, self._studies[study.study_id])

    def _distill(self, measured: Study, trial: Trial) -> tuple[Profile, ...]:
        """Profiles of a lossy part from every trial that measured it on the same model, texts and hardware."""
        studies = {**self._studies, measured.study_id: measured}
        corpus = trial.outcome.corpus if trial.outcome else ""
        measurements = [
            _measurement(study, other)
            for study in studies.values()
            for other in study.trials.values()
            if other.state is TrialState.MEASURED
            and other.outcome is not None
            and study.model_fingerprint == measured.model_fingerprint
            and other.task.workload == trial.task.workload
            and other.task.lossy == trial.task.lossy
            and other.task.continuation_tokens == trial.task.continuation_tokens
            and (other.outcome.corpus, other.hardware) == (corpus, trial.hardware)
        ]
        return tuple(distill(measurements))

    # ------------------------------------------------------------------------------------------ what users ask

    async def begin(self, body: Mapping[str, Any]) -> Json:
        """Begin a study of the curated grid.

        Args:
            body: see `StudyRequest`.

        Returns:
            The study as `get` shows it; its id is `id`.

        Raises:
            FieldError: a field of the request is wrong.
            StudyRefusedError: no connected worker can measure it, or it is not clear for which model.
            StoreError: it could not be kept; nothing was started.
        """
        request = StudyRequest.from_json(body)
        profiler = self._choose_profiler(request)
        now_s = self._clock.unix_s()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
        study = Study(
            study_id=f"{stamp}-{secrets.token_hex(2)}",
            request=request,
            state=StudyState.RUNNING,
            created_unix_s=now_s,
            model_name=profiler.model_name,
            model_fingerprint=profiler.model_fingerprint,
            trials={},
        )
        points = curated_grid(StrategySpace.from_json(profiler.space_json), request.grid)
        trials = [
            Trial(task=study.task(f"{number:03d}", point.lossy, point.coders)) for number, point in enumerate(points)
        ]
        study = replace(study, trials={trial.trial_id: trial for trial in trials})
        await self._store.studies.create(study.to_record())
        await self._store.studies.add_trials([trial.to_record() for trial in trials])
        self._replace(study)
        await self._audit(AuditEvent.STUDY_STARTED, study)
        self._wake.set()
        return study_view(study, self._clock.unix_s())

    async def list(self) -> list[Json]:
        """All studies, the newest first, without their trials."""
        ordered = sorted(self._studies.values(), key=lambda study: study.created_unix_s, reverse=True)
        return [study_summary(study, self._clock.unix_s()) for study in ordered]

    async def get(self, study_id: str) -> Json:
        """One study with its trials. Raises: StudyNotFoundError."""
        return study_view(self._find(study_id), self._clock.unix_s())

    async def cancel(self, study_id: str) -> Json:
        """Cancel a study; what it measured stays. A study that has ended stays as it is.

        Raises:
            StudyNotFoundError: there is none.
        """
        async with self._lock:
            study = self._find(study_id)
            if study.state is StudyState.RUNNING:
                await self._store.studies.transition(
                    study_id, expected=study.state.value, state=StudyState.CANCELLED.value
                )
                for trial in study.trials.values():
                    if not trial.state.is_final:
                        ended = replace(
                            trial,
                            state=TrialState.CANCELLED,
                            agent_id="",
                            outcome=None,
                            finished_unix_s=self._clock.unix_s(),
                        )
                        await self._store_end(ended)
                        study = study.with_trial(ended)
                self._replace(study.with_state(StudyState.CANCELLED))
                for assignment in self._assignments.values():
                    if assignment.study_id == study_id:
                        self._cancel_at_worker(assignment)
                await self._audit(AuditEvent.STUDY_ENDED, self._studies[study_id])
        return await self.get(study_id)

    def events(self, study_id: str) -> AsyncIterator[Json]:
        """The study now, and again after every change; ends with the study. A slow reader skips states.

        Raises:
            StudyNotFoundError: there is none.
        """
        self._find(study_id)
        return self._events(study_id)

    async def _events(self, study_id: str) -> AsyncIterator[Json]:
        shown = -1
        while True:
            changed = self._changed
            study = self._find(study_id)
            if study.revision != shown:
                shown = study.revision
                yield study_view(study, self._clock.unix_s())
            if study.state is not StudyState.RUNNING:
                return
            if self._studies[study_id].revision == shown:
                await changed.wait()

    # ------------------------------------------------------------------------------------------ small things

    def _find(self, study_id: str) -> Study:
        study = self._studies.get(study_id)
        if study is None:
            raise StudyNotFoundError(study_id)
        return study

    def _replace(self, study: Study) -> None:
        self._studies[study.study_id] = study
        # Each event serves one change: who waits holds the old one.
        self._changed.set()
        self._changed = asyncio.Event()

    def _choose_profiler(self, request: StudyRequest) -> Profiler:
        connected = profilers_among(self._fleet.sessions())
        fitting = [
            profiler
            for profiler in connected
            if profiler.kind == request.plane
            and request.deployment in ("", profiler.deployment)
            and request.model in ("", profiler.model_fingerprint)
        ]
        if not fitting:
            raise StudyRefusedError(
                f"no profiling worker for {request.plane} is connected",
                code="study.no_profiler",
                hint="start one: python -m dataplanes.sglang.profiler --model DIR --address ADDRESS",
            )
        models = {profiler.model_fingerprint: profiler.model_name for profiler in fitting}
        if len(models) > 1:
            raise StudyRefusedError(
                f"profiling workers of {len(models)} models are connected",
                code="study.ambiguous_model",
                hint="say which: " + ", ".join(f"model={mark} ({name})" for mark, name in sorted(models.items())),
            )
        return fitting[0]

    async def _audit(self, event: AuditEvent, study: Study) -> None:
        summary = study_summary(study, self._clock.unix_s())
        try:
            await self._store.audit.append(event, json.dumps(summary))
        except StoreError as error:
            _log.error("not in the audit trail: %s: %s", event, error)


def _measurement(study: Study, trial: Trial) -> TrialMeasurement:
    assert trial.outcome is not None
    return TrialMeasurement(
        lossy_part=trial.task.lossy,
        workload=trial.task.workload,
        model_fingerprint=study.model_fingerprint,
        losses=trial.outcome.losses,
        coders=trial.outcome.coders,
        sender_hardware=trial.hardware,
        receiver_hardware=trial.hardware,
        measured_unix_s=trial.finished_unix_s,
        corpus=trial.outcome.corpus,
        study_id=study.study_id,
        trial_id=trial.trial_id,
    )


def _profile_record(profile: Profile) -> ProfileRecord:
    key = ProfileKey(
        model_fingerprint=profile.model_fingerprint,
        workload=profile.workload,
        config_id=profile.arm_id,
        sender_hardware=profile.sender_hardware,
        receiver_hardware=profile.receiver_hardware,
    )
    return ProfileRecord(key=key, document=profile.to_json(), updated_unix_s=profile.measured_unix_s)
