"""Studies over the connected profiling workers: durable, resumed after any crash, watched while they run.

What is stored is enough to go on: a study with its trials, and every trial's end with its result. Which worker is at
which trial is known to this process only; after a restart the open trials are simply asked for again, and a worker that
is still at one, or has finished it meanwhile, says so instead of measuring twice. Profiles are stored before the trial
that gave them is marked as measured, so a crash between the two repeats the trial and loses nothing. The trials of a
search are stored before a worker is asked for them, so a crash while they are chosen leaves nothing behind. A grid is
stored, and any study is cancelled, with all its trials in one step.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from controld.contract.clock import Clock
from controld.contract.errors import FieldError
from controld.contract.space import StrategySpace
from controld.contract.trial import TrialOutcome, TrialStatus
from controld.fleet.errors import FleetError
from controld.fleet.session import AgentSession
from controld.profiling.dispatch import Assignment, Plan, TrialKey, after_giving_up, fits, plan_assignments
from controld.profiling.errors import StudyRefusedError
from controld.profiling.grid import curated_grid
from controld.profiling.profilers import Profiler, TrialFleet, choose_profiler, profilers_among
from controld.profiling.request import VIDEO_DEFAULTS, Method, StudyRequest
from controld.profiling.results import rows_of
from controld.profiling.review import keep_reviewing
from controld.profiling.search_process import Search, SearchProcess
from controld.profiling.searching import searched_space
from controld.profiling.study import Study, StudyState, Trial, TrialState, study_from_records
from controld.profiling.study_book import StudyBook
from controld.profiling.study_searches import StudySearches
from controld.profiling.study_view import study_comparison, study_event, study_summary, study_view
from controld.store.errors import StoreError
from controld.store.interface import Store
from controld.store.records import AuditEvent, ProfileRecord

_log = logging.getLogger(__name__)

Json = dict[str, Any]
OnProfiles = Callable[[], None]

_REVIEW_S = 2.0
_EVENTS_APART_S = 0.25

_END_OF = {
    TrialStatus.MEASURED: TrialState.MEASURED,
    TrialStatus.INFEASIBLE: TrialState.INFEASIBLE,
    TrialStatus.CANCELLED: TrialState.CANCELLED,
}


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
        search: who chooses the trials of searches; by default a process that is started when it is needed.
        events_apart_s: the least time between two states that a reader of events is shown.
    """

    def __init__(
        self,
        store: Store,
        fleet: TrialFleet,
        clock: Clock,
        *,
        on_profiles: OnProfiles = _ignore_profiles,
        review_s: float = _REVIEW_S,
        search: Search | None = None,
        events_apart_s: float = _EVENTS_APART_S,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._clock = clock
        self._on_profiles = on_profiles
        self._review_s = review_s
        self._events_apart_s = events_apart_s
        self._book = StudyBook()
        self._wake = asyncio.Event()
        self._searches = StudySearches(
            self._book,
            store,
            fleet,
            search if search is not None else SearchProcess(clock),
            review_s=review_s,
            on_chosen=self._wake.set,
        )
        self._assignments: dict[TrialKey, Assignment] = {}
        self._lent: set[str] = set()
        self._dispatching: asyncio.Task[None] | None = None

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
                _log.error("study %s left alone: %s", record.study_id, error)
                continue
            self._book.replace(study)
        self._dispatching = asyncio.create_task(
            keep_reviewing(self.dispatch, self._wake, every_s=self._review_s), name="studies"
        )
        for study in self._book.all():
            self._searches.begin(study)

    async def stop(self) -> None:
        """Stop giving out work; what workers are at goes on, and is taken by the next process."""
        await self._searches.stop()
        if self._dispatching is not None:
            self._dispatching.cancel()
            await asyncio.gather(self._dispatching, return_exceptions=True)
            self._dispatching = None

    def lend(self, kind: str, model_fingerprint: str) -> Profiler | None:
        """A worker that no running study has use for; studies leave it alone until it is given back."""
        at_work = {assignment.agent_id for assignment in self._assignments.values()} | self._lent
        running = [study for study in self._book.all() if study.state is StudyState.RUNNING]
        for worker in profilers_among(self._fleet.sessions()):
            wanted = worker.agent_id in at_work or any(fits(worker, study) for study in running)
            if (worker.kind, worker.model_fingerprint) == (kind, model_fingerprint) and not wanted:
                self._lent.add(worker.agent_id)
                return worker
        return None

    def give_back(self, agent_id: str) -> None:
        """A lent worker may work for studies again."""
        self._lent.discard(agent_id)
        self._wake_up()

    async def dispatch(self) -> None:
        """One review: give up what is lost, ask again, start what is next."""
        async with self._book.lock:
            plan = plan_assignments(
                self._book.all(),
                self._assignments.values(),
                [one for one in profilers_among(self._fleet.sessions()) if one.agent_id not in self._lent],
                self._clock.monotonic_s(),
            )
            await self._apply(plan)
            await self._settle()

    async def _apply(self, plan: Plan) -> None:
        for assignment, reason in plan.given_up:
            _log.warning("trial %s of %s came to nothing: %s", assignment.trial_id, assignment.study_id, reason)
            self._cancel_at_worker(assignment)
            await self._give_up(assignment.key, reason, assignment.worked_s(self._clock.monotonic_s()))
            # Not before: where the store fails, the next review finds the assignment and gives it up again.
            del self._assignments[assignment.key]
        self._assignments = {assignment.key: assignment for assignment in plan.kept}
        unsendable: list[tuple[Assignment, str]] = []
        for assignment in (*plan.asked_again, *(assignment for assignment, _ in plan.started)):
            study = self._book.find(assignment.study_id)
            trial = replace(
                study.trials[assignment.trial_id], state=TrialState.RUNNING, agent_id=assignment.agent_id, outcome=None
            )
            try:
                asked = self._ask(assignment, trial)
            except (TypeError, ValueError) as error:
                # No message can carry this task; those after it can still be sent.
                unsendable.append((assignment, f"the worker cannot be asked: {error}"))
                continue
            if asked and assignment.key not in self._assignments:  # who is asked again is at it already
                self._assignments[assignment.key] = assignment
                self._book.replace(study.with_trial(trial))
        for assignment, reason in unsendable:
            _log.warning("trial %s of %s came to nothing: %s", assignment.trial_id, assignment.study_id, reason)
            await self._give_up(assignment.key, reason, assignment.worked_s(self._clock.monotonic_s()))
            self._assignments.pop(assignment.key, None)
        if plan.given_up or unsendable:
            self._wake_up()

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
            self._wake_up()

    async def on_trial_result(self, session: AgentSession, outcome: TrialOutcome) -> None:
        """Progress or the end of a trial. Late, repeated and unknown results change nothing."""
        async with self._book.lock:
            study = self._book.get(outcome.study_id)
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
                    self._book.replace(study.with_trial(replace(trial, outcome=outcome)))
                return
            try:
                await self._take_end(study, trial, outcome, session.identity.hardware)
            except StoreError as error:
                # Asked again, the worker answers with what it has measured.
                _log.error("result of trial %s of %s not kept: %s", *reversed(key), error)
                self._book.replace(study.with_trial(replace(trial, state=TrialState.PENDING, agent_id="")))
                return
            try:
                await self._settle()
            except StoreError as error:
                # The result is kept; the next review closes what is to be closed.
                _log.error("studies wait: %s", error)

    async def _take_end(self, study: Study, trial: Trial, outcome: TrialOutcome, hardware: str) -> None:
        key = (study.study_id, trial.trial_id)
        if outcome.status is TrialStatus.FAILED:
            _log.warning("trial %s of %s failed: %s", *reversed(key), outcome.detail)
            await self._give_up(key, outcome.detail, outcome.seconds)
        elif outcome.status is TrialStatus.CANCELLED and study.state.is_open:
            await self._give_up(key, "the worker gave it up", outcome.seconds)
        else:
            await self._end_trial(study, trial, outcome, hardware)

    def _drop_assignment(self, key: TrialKey, agent_id: str) -> None:
        assignment = self._assignments.get(key)
        if assignment is not None and assignment.agent_id == agent_id:
            del self._assignments[key]
        self._wake_up()

    async def _end_trial(self, study: Study, trial: Trial, outcome: TrialOutcome, hardware: str) -> None:
        ended = replace(
            trial,
            state=_END_OF[outcome.status],
            agent_id="",
            outcome=outcome,
            hardware=hardware,
            finished_unix_s=self._clock.unix_s(),
        )
        records: list[ProfileRecord] = []
        if ended.state is TrialState.MEASURED:
            whole = study.with_trial(ended)
            others = [one for one in self._book.all() if one.study_id != study.study_id]
            records = await self._rows_to_store([*others, whole], whole, ended)
            await self._store.profiles.upsert(records)
        await self._store_end(ended)
        self._book.replace(study.with_trial(ended))
        if records:
            self._on_profiles()

    async def _rows_to_store(self, studies: Sequence[Study], measured: Study, trial: Trial) -> list[ProfileRecord]:
        rows = rows_of(studies, measured, trial)
        if not rows.siblings:
            return list(rows.own)
        stored = await self._store.profiles.list(
            model_fingerprint=measured.model_fingerprint, workload=trial.task.workload
        )
        here = {record.key for record in stored}
        return [*rows.own, *(record for record in rows.siblings if record.key in here)]

    async def _give_up(self, key: TrialKey, reason: str, spent_s: float) -> None:
        study = self._book.find(key[0])
        trial = study.trials[key[1]]
        if trial.state.is_final:
            return
        tried = after_giving_up(trial, reason, spent_s)
        if tried.state.is_final:
            tried = replace(tried, finished_unix_s=self._clock.unix_s())
            await self._store_end(tried)
        self._book.replace(study.with_trial(tried))

    async def _store_end(self, trial: Trial) -> None:
        await self._store.studies.transition_trial(trial.task.study_id, trial.end_record())

    async def _settle(self) -> None:
        """Close the studies to which nothing more will come."""
        for study in self._book.all():
            end = study.natural_end
            if study.state is StudyState.RUNNING and end is not None and await self._searches.is_complete(study):
                await self._move(study, end)
                await self._audit(AuditEvent.STUDY_ENDED, self._book.find(study.study_id))

    async def _move(self, study: Study, state: StudyState) -> None:
        await self._store.studies.transition(study.study_id, expected=study.state.value, state=state.value)
        self._book.replace(study.with_state(state))

    async def search(self) -> None:
        """One review of every search: choose trials for those whose workers will soon have none."""
        await asyncio.gather(*(self._searches.review(study.study_id) for study in self._book.all()))

    # ------------------------------------------------------------------------------------------ what users ask

    async def begin(self, body: Mapping[str, Any]) -> Json:
        """Begin a study.

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
        profiler = choose_profiler(request, profilers_among(self._fleet.sessions()))
        if profiler.is_video:
            request = StudyRequest.from_json(body, VIDEO_DEFAULTS)
        now_s = self._clock.unix_s()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
        study = Study(
            study_id=f"{stamp}-{secrets.token_hex(2)}",
            request=request,
            state=StudyState.RUNNING,
            created_unix_s=now_s,
            model_name=profiler.model_name,
            model_fingerprint=profiler.model_fingerprint,
            is_video=profiler.is_video,
            trials={},
        )
        if request.method is Method.SEARCH:
            space = await asyncio.to_thread(searched_space, request, profiler.space_json)
            study = replace(study, space_json=space.to_json(), hardware=profiler.hardware)
        else:
            study = study.with_trials(_grid_trials(study, profiler))
        # One step: a grid without its trials would look like one that has ended.
        await self._store.studies.create(study.to_record(), [trial.to_record() for trial in study.trials.values()])
        self._book.replace(study)
        if self._dispatching is not None:
            self._searches.begin(study)
        await self._audit(AuditEvent.STUDY_STARTED, study)
        self._wake_up()
        return await self.get(study.study_id)

    async def list(self) -> list[Json]:
        """All studies, the newest first, without their trials."""
        ordered = sorted(self._book.all(), key=lambda study: study.created_unix_s, reverse=True)
        return [study_summary(study, self._clock.unix_s()) for study in ordered]

    async def get(self, study_id: str) -> Json:
        """One study with its trials. Raises: StudyNotFoundError."""
        study = self._book.find(study_id)
        return study_view(study, await self._book.progress(study), self._clock.unix_s())

    async def compare(self, study_ids: Sequence[str]) -> tuple[Json, ...]:
        """The hypervolume by trial of some studies, side by side. Raises: StudyNotFoundError."""
        studies = [self._book.find(study_id) for study_id in study_ids]
        now_s = self._clock.unix_s()
        return tuple([study_comparison(study, await self._book.progress(study), now_s) for study in studies])

    async def pause(self, study_id: str) -> Json:
        """Begin nothing new; what workers are at is still taken. Nothing changes where it is paused already.

        Raises:
            StudyNotFoundError: there is none.
            StudyRefusedError: it has ended.
        """
        return await self._change(study_id, StudyState.PAUSED)

    async def resume(self, study_id: str) -> Json:
        """Go on with a paused study. Nothing changes where it runs.

        Raises:
            StudyNotFoundError: there is none.
            StudyRefusedError: it has ended.
        """
        return await self._change(study_id, StudyState.RUNNING)

    async def _change(self, study_id: str, state: StudyState) -> Json:
        async with self._book.lock:
            study = self._book.find(study_id)
            if not study.state.is_open:
                raise StudyRefusedError(f"study {study_id} is {study.state}", code="study.ended")
            if study.state is not state:
                await self._move(study, state)
        self._wake_up()
        return await self.get(study_id)

    async def cancel(self, study_id: str) -> Json:
        """Cancel a study; what it measured stays. A study that has ended stays as it is.

        Raises:
            StudyNotFoundError: there is none.
            StoreError: it could not be kept; the study goes on.
        """
        async with self._book.lock:
            study = self._book.find(study_id)
            if study.state.is_open:
                ended = [self._cancelled(trial) for trial in study.open_trials]
                await self._store.studies.transition(
                    study_id,
                    expected=study.state.value,
                    state=StudyState.CANCELLED.value,
                    trials=[trial.end_record() for trial in ended],
                )
                study = study.with_trials(ended).with_state(StudyState.CANCELLED)
                self._book.replace(study)
                for assignment in self._assignments.values():
                    if assignment.study_id == study_id:
                        self._cancel_at_worker(assignment)
                await self._audit(AuditEvent.STUDY_ENDED, study)
        return await self.get(study_id)

    def _cancelled(self, trial: Trial) -> Trial:
        return replace(
            trial,
            state=TrialState.CANCELLED,
            agent_id="",
            outcome=None,
            finished_unix_s=self._clock.unix_s(),
        )

    def events(self, study_id: str) -> AsyncIterator[Json]:
        """The study now, and again after every change; ends with the study. A slow reader skips states.

        Of the trials only the open ones and the latest ended ones are shown.

        Raises:
            StudyNotFoundError: there is none.
        """
        self._book.find(study_id)
        return self._events(study_id)

    async def _events(self, study_id: str) -> AsyncIterator[Json]:
        shown = -1
        while True:
            changed = self._book.changed
            study = self._book.find(study_id)
            if study.revision != shown:
                shown = study.revision
                progress = await self._book.progress(study)
                yield study_event(study, progress, self._clock.unix_s())
            if not study.state.is_open:
                return
            if self._book.find(study_id).revision == shown:
                await changed.wait()
            await asyncio.sleep(self._events_apart_s)

    # ------------------------------------------------------------------------------------------ small things

    def _wake_up(self) -> None:
        self._wake.set()
        self._searches.wake_up()

    async def _audit(self, event: AuditEvent, study: Study) -> None:
        summary = study_summary(study, self._clock.unix_s())
        try:
            await self._store.audit.append(event, json.dumps(summary))
        except StoreError as error:
            _log.error("not in the audit trail: %s: %s", event, error)


def _grid_trials(study: Study, profiler: Profiler) -> list[Trial]:
    points = curated_grid(StrategySpace.from_json(profiler.space_json), study.request.grid)
    return [Trial(task=study.task(f"{number:03d}", point.lossy, point.coders)) for number, point in enumerate(points)]
