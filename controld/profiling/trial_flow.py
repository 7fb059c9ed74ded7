"""Trials on their way: given to workers, followed, and taken in when they end.

Which worker is at which trial is known to this process only; after a restart the open trials are simply asked for
again, and a worker that is still at one, or has finished it meanwhile, says so instead of measuring twice. Profiles are
stored before the trial that gave them is marked as measured, so a crash between the two repeats the trial and loses
nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from controld.contract.clock import Clock
from controld.contract.errors import FieldError
from controld.contract.trial import TrialOutcome, TrialStatus
from controld.fleet.errors import FleetError
from controld.fleet.session import AgentSession
from controld.profiling.answer import require_answer
from controld.profiling.dispatch import Assignment, Plan, TrialKey, after_giving_up, fits, plan_assignments
from controld.profiling.profilers import Profiler, TrialFleet, profilers_among
from controld.profiling.results import rows_of
from controld.profiling.study import Study, StudyState, Trial, TrialState
from controld.profiling.study_book import StudyBook
from controld.profiling.study_ledger import StudyLedger
from controld.store.errors import StoreError
from controld.store.interface import Store
from controld.store.records import AuditEvent, ProfileRecord

_log = logging.getLogger(__name__)

_END_OF = {
    TrialStatus.MEASURED: TrialState.MEASURED,
    TrialStatus.INFEASIBLE: TrialState.INFEASIBLE,
    TrialStatus.CANCELLED: TrialState.CANCELLED,
}


class TrialFlow:
    """Gives trials out and takes their ends. One event loop; no method blocks it.

    Args:
        book, ledger: studies as they are, and their changes.
        store: where profiles live.
        fleet: the workers.
        clock: for ages and dates.
        is_complete: whether no more trials of a study are to be chosen.
        on_profiles: called once new or changed profiles are durable.
        wake: asks for a review soon.
    """

    def __init__(
        self,
        book: StudyBook,
        ledger: StudyLedger,
        store: Store,
        fleet: TrialFleet,
        clock: Clock,
        *,
        is_complete: Callable[[Study], Awaitable[bool]],
        on_profiles: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        self._book = book
        self._ledger = ledger
        self._store = store
        self._fleet = fleet
        self._clock = clock
        self._is_complete = is_complete
        self._on_profiles = on_profiles
        self._wake_up = wake
        self._assignments: dict[TrialKey, Assignment] = {}
        self._lent: set[str] = set()

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

    def drop_study(self, study_id: str) -> None:
        """Tell the workers that are at a study's trials to stop."""
        for assignment in self._assignments.values():
            if assignment.study_id == study_id:
                self._cancel_at_worker(assignment)

    def _cancel_at_worker(self, assignment: Assignment) -> None:
        try:
            self._fleet.cancel_trial(assignment.agent_id, assignment.study_id, assignment.trial_id)
        except FleetError:
            pass  # it is gone, and the trial with it

    # ------------------------------------------------------------------------------------ what workers say

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
            try:
                await self._end_trial(study, trial, outcome, hardware)
            except FieldError as error:
                # A worker's words must not hold up the study; what it says again is refused again, and that is an end.
                _log.warning("result of trial %s of %s refused: %s", *reversed(key), error)
                await self._give_up(key, f"the result is refused: {error}", outcome.seconds)

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
            require_answer(trial.task, outcome)
            whole = study.with_trial(ended)
            others = [one for one in self._book.all() if one.study_id != study.study_id]
            records = await self._rows_to_store([*others, whole], whole, ended)
            await self._store.profiles.upsert(records)
        await self._ledger.end_trial(study, ended)
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
            await self._ledger.end_trial(study, replace(tried, finished_unix_s=self._clock.unix_s()))
        else:
            self._book.replace(study.with_trial(tried))

    async def _settle(self) -> None:
        """Close the studies to which nothing more will come."""
        for study in self._book.all():
            end = study.natural_end
            if study.state is StudyState.RUNNING and end is not None and await self._is_complete(study):
                await self._ledger.move(study, end)
                await self._ledger.audit(AuditEvent.STUDY_ENDED, study.study_id)
