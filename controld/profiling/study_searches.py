"""The searches of all studies: each has a loop of its own, so that a slow answer for one holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from controld.profiling.dispatch import fits
from controld.profiling.profilers import TrialFleet, profilers_among
from controld.profiling.review import keep_reviewing
from controld.profiling.search_process import Search
from controld.profiling.searching import TrialChooser, trials_wanted
from controld.profiling.study import Study, StudyState
from controld.profiling.study_book import StudyBook
from controld.store.interface import Store


class StudySearches:
    """Keeps the trials of searches ahead of their workers. Trials are stored before they are in the book.

    Args:
        book, store, fleet: where studies and trials are, and the workers.
        search: who chooses.
        review_s: how often a search is looked at without any cause.
        on_chosen: called when there are new trials, or when it is known that there will be none.
    """

    def __init__(
        self,
        book: StudyBook,
        store: Store,
        fleet: TrialFleet,
        search: Search,
        *,
        review_s: float,
        on_chosen: Callable[[], None],
    ) -> None:
        self._book = book
        self._store = store
        self._fleet = fleet
        self._chooser = TrialChooser(search)
        self._review_s = review_s
        self._on_chosen = on_chosen
        self._exhausted_at: dict[str, tuple[int, int]] = {}
        self._loops: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}

    def begin(self, study: Study) -> None:
        """Choose for a study, if it is a search, until it ends or `stop`."""
        if not study.is_search or not study.state.is_open:
            return
        study_id, wake = study.study_id, asyncio.Event()
        loop = keep_reviewing(
            lambda: self.review(study_id),
            wake,
            every_s=self._review_s,
            goes_on=lambda: self._book.find(study_id).state.is_open,
        )
        task = asyncio.create_task(loop, name=f"study-search-{study_id}")
        task.add_done_callback(lambda _: self._loops.pop(study_id))
        self._loops[study_id] = task, wake

    def wake_up(self) -> None:
        """Something has changed: look at all searches now."""
        for _, wake in self._loops.values():
            wake.set()

    async def stop(self) -> None:
        """End the loops and the search."""
        loops = [task for task, _ in self._loops.values()]
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await self._chooser.stop()

    async def is_complete(self, study: Study) -> bool:
        """Whether no more trials are to be chosen; true of what is no search."""
        if not study.is_search or self._exhausted_at.get(study.study_id) == _marks(study):
            return True
        return trials_wanted(study, await self._book.progress(study), workers=1) == 0

    async def review(self, study_id: str) -> None:
        """Choose trials if the workers will soon have none. The slow part holds no lock."""
        while await self._choose(study_id):
            pass

    async def _choose(self, study_id: str) -> bool:
        """Choose trials once; whether it is worth another look at once."""
        study = self._book.find(study_id)
        if not study.is_search or study.state is not StudyState.RUNNING:
            return False
        workers = sum(fits(profiler, study) for profiler in profilers_among(self._fleet.sessions()))
        progress = await self._book.progress(study)
        wanted = trials_wanted(study, progress, workers)
        if not wanted or self._exhausted_at.get(study_id) == _marks(study):
            return False
        batch = await self._chooser.choose(study, progress, wanted)
        async with self._book.lock:
            now = self._book.find(study_id)
            if now.state is not StudyState.RUNNING:
                return False
            noted = now.with_search_note(batch.detail)
            if batch.trials:
                await self._store.studies.add_trials([trial.to_record() for trial in batch.trials])
                self._book.replace(noted.with_trials(batch.trials))
            else:
                # Trials under way may open something up (a part that is worth more segments): asked again after them.
                self._exhausted_at[study_id] = _marks(study)
                if noted is not now:
                    self._book.replace(noted)
        self._on_chosen()
        return bool(batch.trials)


def _marks(study: Study) -> tuple[int, int]:
    """Changes whenever a search may see more than before."""
    return len(study.trials), len(study.open_trials)
