"""Studies over the connected profiling workers: durable, resumed after any crash, watched while they run.

What is stored is enough to go on: a study with its trials, and every trial's end with its result
(`controld.profiling.trial_flow`). The trials of a search are stored before a worker is asked for them, so a crash while
they are chosen leaves nothing behind. A grid is stored, and any study is cancelled, with all its trials in one step.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from controld.contract.clock import Clock
from controld.contract.errors import FieldError
from controld.contract.space import StrategySpace
from controld.profiling.errors import StudyRefusedError
from controld.profiling.grid import curated_grid
from controld.profiling.profilers import Profiler, TrialFleet, choose_profiler, profilers_among
from controld.profiling.request import VIDEO_DEFAULTS, Method, StudyRequest
from controld.profiling.review import keep_reviewing
from controld.profiling.search_process import Search, SearchProcess
from controld.profiling.searching import searched_space
from controld.profiling.study import Study, StudyState, Trial, TrialState, study_from_records
from controld.profiling.study_book import StudyBook
from controld.profiling.study_ledger import StudyLedger
from controld.profiling.study_searches import StudySearches
from controld.profiling.study_view import study_comparison, study_event, study_summary, study_view
from controld.profiling.trial_flow import TrialFlow
from controld.store.interface import Store
from controld.store.records import AuditEvent

_log = logging.getLogger(__name__)

Json = dict[str, Any]
OnProfiles = Callable[[], None]

_REVIEW_S = 2.0
_EVENTS_APART_S = 0.25


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

    Attributes:
        trials: gives them to workers and takes what comes of them.
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
        self._ledger = StudyLedger(self._book, store, clock)
        self.trials = TrialFlow(
            self._book,
            self._ledger,
            store,
            fleet,
            clock,
            is_complete=self._searches.is_complete,
            on_profiles=on_profiles,
            wake=self._wake_up,
        )
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
            keep_reviewing(self.trials.dispatch, self._wake, every_s=self._review_s), name="studies"
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
        await self._ledger.create(study)
        if self._dispatching is not None:
            self._searches.begin(study)
        await self._ledger.audit(AuditEvent.STUDY_STARTED, study.study_id)
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
                await self._ledger.move(study, state)
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
                await self._ledger.move(study, StudyState.CANCELLED, ended)
                self.trials.drop_study(study_id)
                await self._ledger.audit(AuditEvent.STUDY_ENDED, study_id)
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


def _grid_trials(study: Study, profiler: Profiler) -> list[Trial]:
    points = curated_grid(StrategySpace.from_json(profiler.space_json), study.request.grid)
    return [Trial(task=study.task(f"{number:03d}", point.lossy, point.coders)) for number, point in enumerate(points)]
